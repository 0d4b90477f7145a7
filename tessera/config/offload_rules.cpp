#include "tessera/config/offload_rules.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/config/detail.h"
#include "tessera/config/optim_groups.h"
#include "tessera/core/error.h"

// Where slices of stage 3 lie, their gradients and their state lie, too, for the host's cores update there: one of them alone elsewhere would cross the link
// twice a step and save nothing that the three together do not. State may lie further away, and below stage 3 it is all that has a place, with gradients that
// go to the host as they come. Which parameters a pattern names, the model alone can say (train/places.h).

namespace tessera {
namespace {

/// As it is written: "host", or a table.
std::string written(const ByPattern& places) {
  if (places.by_pattern.empty()) return places.everywhere;
  std::string all;
  for (const auto& [pattern, place] : places.by_pattern) all += (all.empty() ? "{ " : ", ") + detail::quoted(pattern) + " = " + detail::quoted(place);
  return all + " }";
}

/// Slices of stage 3, what is added up for them, and what updates them.
void validate_slices(const Config& config) {
  const auto& offload = config.offload;
  const std::string place = written(offload.params);
  const bool whole = offload.params.by_pattern.empty();
  require(config.zero.stage == 3, "offload.params = ", place, ": what waits ",
          place == "host"   ? "on the host"
          : place == "disk" ? "on disk"
                            : "there",
          " are slices that a unit fetches when it is used, which zero.stage = 3 alone has, and zero.stage is ", config.zero.stage,
          "; set zero.stage = 3 (one rank is enough)", whole ? " with offload.params, offload.gradients and offload.optimizer = " + place : "",
          ", or offload.optimizer = ", place, " alone");
  const bool away = !offload.optimizer.is("device");
  require(away && offload.gradients == offload.params, "offload.params = ", place, ": ",
          away ? "offload.gradients = " + written(offload.gradients) : "offload.optimizer = device",
          ", and the host's cores update parameters, so these, their gradients and the optimizer's state lie there together; ",
          whole ? "set offload.params, offload.gradients and offload.optimizer to " + place + ", or offload.optimizer alone"
                : "leave offload.gradients and offload.optimizer out, which then follow");
  require(offload.update == "host", "offload.update = device: offload.params = ", place,
          ", and what is updated lies there; set offload.update = host, or leave parameters and gradients on the device");
}

/// Gradients that go to the host as they come, below stage 3.
void validate_stream(const Config& config, int stages) {
  const auto& offload = config.offload;
  const std::string set = "offload.gradients = " + written(offload.gradients);
  require(config.zero.stage < 3, set, ": offload.params = device",
          ", and the host's cores update parameters, so these, their gradients and the optimizer's state lie there together; set offload.params, "
          "offload.gradients and offload.optimizer to host, or offload.optimizer alone");
  require(offload.gradients.is("host"), set, ": with zero.stage = ", config.zero.stage, " all gradients go to the host as they come, or none; set ",
          "offload.gradients = host, or zero.stage = 3 with offload.params = ", written(offload.gradients));
  require(!offload.optimizer.is("device"), set, ": offload.optimizer = device, and gradients would come back to be used; set offload.optimizer = host or ",
          "disk, or offload.gradients = device");
  require(offload.optimizer.by_pattern.empty(), set,
          ": takes all gradients to the host, so all state is used there, and offload.optimizer = ", written(offload.optimizer),
          " leaves some on the device; set offload.optimizer = host or disk, or offload.gradients = device");
  require(!config.run.deterministic, set, ": takes each gradient as it comes, and run.deterministic = true adds them up in a ",
          "tree; set offload.gradients = device, or run.deterministic = false");
  require(!updates_within_steps(config, stages), set, ": pipeline.schedule = ", config.pipeline.schedule,
          " updates on the device in the midst of a step; set offload.gradients = device");
  require(offload.update == "host", "offload.update = device: ", set,
          ", and what is updated lies there; set offload.update = host, or leave both on the device");
}

void validate_delayed_update(const Config& config, const OffloadRanks& ranks, const std::string& summing) {
  const auto& offload = config.offload;
  const bool slices = !offload.params.is("device"), streamed = !slices && !offload.gradients.is("device");
  require(!offload.optimizer.is("device") && offload.update == "host",
          "offload.delayed_update = true: an update that runs beside the next step is the host's, of state that waits there; ",
          "set offload.optimizer = host and offload.update = host");
  require(offload.optimizer.by_pattern.empty(), "offload.delayed_update = true: offload.optimizer = ", written(offload.optimizer),
          " would have some parameters updated late and others not; set offload.optimizer = host or disk, or offload.delayed_update = false");
  require(!slices && !streamed, "offload.delayed_update = true: offload.", slices ? "params" : "gradients", " = ",
          written(slices ? offload.params : offload.gradients),
          ", which the next step uses while the update would change it; set offload.params and offload.gradients to device");
  require(!updates_within_steps(config, ranks.stages), "offload.delayed_update = true: pipeline.schedule = ", config.pipeline.schedule,
          " has updates of its own delay; set offload.delayed_update = false, or pipeline.schedule = 1f1b");
  require(config.precision.loss_scale == "none", "offload.delayed_update = true: precision.loss_scale = ", config.precision.loss_scale,
          " skips steps, and the update before would wait for the next that is not skipped; set precision.loss_scale = none");
  require(summing.empty(), "offload.delayed_update = true: ", summing, " exchanges sums with the ", ranks.cut,
          " ranks over which parameters are cut while it updates, beside those of the next step; set offload.delayed_update = false, or adamw there");
}

void validate_update(const Config& config, const OffloadRanks& ranks) {
  const auto& offload = config.offload;
  if (!offload.params.is("device")) {
    validate_slices(config);
  } else if (!offload.gradients.is("device")) {
    validate_stream(config, ranks.stages);
  }
  const bool on_disk = offload.optimizer.uses("disk"), paged = on_disk || (!offload.optimizer.is("device") && offload.update == "device");
  const std::string summing = ranks.cut > 1 ? setting_of_optimizer(config.optim, {"adafactor", "adam8bit", "muon"}) : "";
  require(!paged || summing.empty(), "offload.", on_disk ? "optimizer = disk" : "update = device", ": state comes piece by piece, and ", summing,
          " asks of parameters that are cut over ", ranks.cut,
          " ranks for sums of all pieces first; set offload.optimizer = host and offload.update = host, or adamw there");
  require(!(paged || offload.delayed_update) || ranks.stages == 1 || !config.pipeline.post_validate,
          "pipeline.post_validate = true: takes an update back by a ", "copy of all that it changed, and with offload.",
          offload.delayed_update ? "delayed_update = true that is still changing"
          : on_disk              ? "optimizer = disk that is not in memory"
                                 : "update = device that is not on the device",
          "; set pipeline.post_validate = false");
  if (offload.delayed_update) validate_delayed_update(config, ranks, summing);
}

}  // namespace

void validate_places(const OffloadConfig& offload) {
  for (const auto& [key, places] :
       {std::pair{"params", &offload.params}, {"gradients", &offload.gradients}, {"optimizer", &offload.optimizer}, {"activations", &offload.activations}}) {
    const auto stays = [](const auto& one) { return one.second == "device"; };
    if (places->by_pattern.empty() || !std::ranges::all_of(places->by_pattern, stays)) continue;
    throw ConfigError(idle_exception(std::string("offload.") + key, places->by_pattern.begin()->first));
  }
}

std::string idle_exception(const std::string& key, const std::string& pattern) {
  return detail::concat(key, ": '", pattern,
                        "' = device: is no exception from any other pattern, and what no pattern names stays on the device; take the pattern out");
}

void validate_offload(const Config& config, const OffloadRanks& ranks) {
  const auto& offload = config.offload;
  require(offload.fraction >= 0 && offload.fraction <= 1, "offload.fraction = ", offload.fraction, ": expected a share, from 0 to 1");
  for (const auto& [key, value] : {std::pair{"min_bytes", offload.min_bytes}, {"budget_bytes", offload.budget_bytes}, {"prefetch", offload.prefetch}}) {
    require(value >= 0, "offload.", key, " = ", value, ": expected at least 0; set offload.", key);
  }
  validate_places(offload);
  validate_update(config, ranks);
}

}  // namespace tessera
