#include "tessera/plan/out_of_memory.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/flops.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/settings.h"
#include "tessera/train/places.h"
#include "tessera/train/state_bytes.h"

namespace tessera::plan {

namespace {

/// What would have been enough: the limit, or what the device had already given.
int64_t room(const MemoryRefusal& refusal) { return refusal.limit > 0 ? refusal.limit : total_of(refusal.in_use); }

std::string where(const MemoryRefusal& refusal) {
  std::string text = refusal.phase.empty() ? " before the first step" : " in " + refusal.phase;
  if (!refusal.module.empty()) text += " of " + refusal.module;
  return text;
}

/// A device's own limit counts what it has reserved, so there may be less in use.
std::string rule(const MemoryRefusal& refusal, int64_t device_limit) {
  const std::string in_use = format_bytes(total_of(refusal.in_use));
  if (refusal.limit > 0) return fmt::format("would pass run.memory_limit_bytes = {} with {} in use", refusal.limit, in_use);
  const std::string of_device = fmt::format("could not be had beside the {} in use", in_use);
  return device_limit > 0 ? fmt::format("{}, with run.memory_limit_bytes = {} of what its allocator reserves", of_device, device_limit) : of_device;
}

std::string what_was_refused(const OutOfMemory& failure, int64_t device_limit) {
  const auto& refusal = failure.refusal;
  return fmt::format("rank {} is out of memory{}: {} more ({}) {}", failure.rank, where(refusal), format_bytes(refusal.requested), to_string(refusal.category),
                     rule(refusal, device_limit));
}

std::string way_out(const FitSearch& search) {
  const Setting* const best = search.best();
  const std::string micro_size = search.bound_to_micro_size.empty()
                                     ? ""
                                     : fmt::format("; a smaller batch.micro_size needs less, and trains otherwise with {}", search.bound_to_micro_size);
  if (!best && !search.complete) return "there was no time to try settings that need less (tessera plan --search chooses among layouts as well)";
  if (!best) return "there is no setting left that needs less; use more ranks, or a smaller model" + micro_size;
  const std::string peak = format_bytes(best->needed);
  const std::string as_much = search.beyond > 0 ? " with as much beyond its plan" : "", no_time = search.complete ? "" : ", and there was no time for more";
  if (search.fits) return fmt::format("the cheapest setting that would fit{}: {} (peak {})", as_much, flags_of(best->sets), peak);
  if (search.beyond > 0 || best->needed >= search.now.needed) {
    return fmt::format("none of {} settings tried {}{}; use more ranks, or a smaller model{}", search.tried.size(),
                       search.beyond > 0 ? "would fit" + as_much : "needs less", no_time, micro_size);
  }
  return fmt::format("none of {} settings tried would fit{}: the smallest peak, {}, is that of {}{}", search.tried.size(), no_time, peak, flags_of(best->sets),
                     micro_size);
}

/// Of a run whose plan fits: by how much it went beyond that, and what a plan does not know of it.
std::string went_beyond(const Config& config, int world, const FitSearch& search, bool patient) {
  if (search.beyond == 0) return "";
  const auto bounds = patient ? find_bounds(config, dry_run(config, world), {}) : std::nullopt;
  std::string unknown = bounds ? to_string(*bounds, 0) : "\n";  // a line
  unknown.pop_back();
  return fmt::format("; its plan, by a dry run, is {}, and the run went beyond it by {}{}", format_bytes(search.now.needed), format_bytes(search.beyond),
                     unknown.empty() ? "" : "; " + unknown);
}

/// Of the model as it is trained: with what [lora] adds, and without what [quantize] has in fewer bits.
struct Elements {
  double dense = 0, experts = 0;
};

Elements elements_of(const Config& config) {
  if (config.lora.modules.empty() && config.model.experts == 0) return {.dense = static_cast<double>(num_parameters(config.model))};
  Elements elements;
  for (const PlacedElements& kind : count_elements(config).elements) (kind.expert ? elements.experts : elements.dense) += kind.count;
  return elements;
}

std::string share(double part, double whole) { return whole > 0 ? fmt::format("{:+.1f}%", 100 * (part / whole - 1)) : std::string("-"); }

}  // namespace

std::string formula_text(const Config& config, int world, int64_t held) {
  const Sharers by = sharers(config, mesh_shape(config.mesh, config.zero.stage, world));
  const int shards = by.ranks;
  const Elements all = elements_of(config);
  const auto whole = bytes_per_parameter(config), dense = kept_per_parameter(whole, config.zero.stage, shards);
  // Of stage 3 slices are held, of all alike; below it fewer ranks share out what is kept for experts, which are dealt first.
  const double experts = config.zero.stage == 3 ? 0 : all.experts * by.experts / (all.dense + all.experts * by.experts);
  const auto of_experts = kept_per_parameter(whole, config.zero.stage, std::max(1, static_cast<int>(std::lround(shards * by.experts))));
  const auto mean = [&](double BytesPerParameter::* part) { return (1 - experts) * dense.*part + experts * of_experts.*part; };
  const BytesPerParameter kept{mean(&BytesPerParameter::weight), mean(&BytesPerParameter::gradient), mean(&BytesPerParameter::state), dense.quantized};
  // Bytes are a parameter's that the shape has, and who adapts it holds more elements.
  const auto model = static_cast<double>(num_parameters(config.model));
  const double parameters = static_cast<double>(held) * (config.zero.stage == 3 ? shards : 1) * model / (all.dense + all.experts);
  return fmt::format(
      "(w, g, k) = ({:g}, {:g}, {:g}) bytes of weight, gradient and optimizer a parameter; zero.stage = {} over {} rank{} keeps {:.3g} + {:.3g} + {:.3g} of "
      "them\n"
      "on each{}{}: {} for {} parameters{}; activations, outputs, comm and other come on top\n",
      whole.weight, whole.gradient, whole.state, config.zero.stage, shards, shards == 1 ? "" : "s", kept.weight, kept.gradient, kept.state,
      config.offload.params.is("host")   ? ", on the host"
      : config.offload.params.is("disk") ? ", weights and gradients on disk"
                                         : "",
      kept.quantized > 0 ? fmt::format(", beside {:.3g} of weights in fewer bits", kept.quantized) : "",
      format_bytes(static_cast<int64_t>(kept.total() * parameters)), format_count(parameters),
      parameters < 0.999 * model ? fmt::format(" of {}, a rank's share of the model", format_count(model)) : "");
}

namespace {

std::string rows_text(const FitSearch& search) {
  std::string out = fmt::format("  {:>10}  {:>8}  {:>8}  setting\n", "peak", "FLOPs", "sent");
  const auto row = [&](const Setting& setting, const std::string& name) {
    out += fmt::format("  {:>10}  {:>8}  {:>8}  {}\n", format_bytes(setting.needed), share(setting.flops, search.now.flops),
                       share(setting.sent_bytes, search.now.sent_bytes), name);
  };
  row(search.now, "as it is");
  for (const auto& setting : search.tried) row(setting, flags_of(setting.sets));
  return out;
}

}  // namespace

std::string settings_text(const FitSearch& search) { return rows_text(search) + way_out(search) + "\n"; }

OutOfMemoryReport explain(const Config& config, const OutOfMemory& failure) {
  const auto& refusal = failure.refusal;
  const auto until = std::chrono::steady_clock::now() + kFitPatience;
  const FitSearch search = find_fit(config, failure.world, room(refusal), kFitPatience, std::nullopt, total_of(refusal.in_use) + refusal.requested);
  const std::string refused = what_was_refused(failure, config.run.memory_limit_bytes);
  std::string tables =
      fmt::format("the memory of rank {} when it ran out\n{}", failure.rank, category_table({{"in use", refusal.in_use}, {"predicted peak", search.now.peak}}));
  if (refusal.largest.empty()) {
    tables += "the largest tensors at the peak of a dry run of the same step\n" +
              block_table(largest_class(dry_run(config, failure.world, {.largest = true})).largest);
  } else {
    tables += "the largest tensors alive then\n" + block_table(refusal.largest);
  }
  tables += "by formula: " + formula_text(config, failure.world, search.now.parameters);
  tables += fmt::format("settings tried by dry run, cheapest first, for a peak of {} at most{}\n{}", format_bytes(std::max<int64_t>(0, search.limit)),
                        search.beyond > 0 ? ", which leaves free what this run took beyond its plan" : "", rows_text(search));
  return {.sentence = refused + went_beyond(config, failure.world, search, std::chrono::steady_clock::now() < until) + "; " + way_out(search),
          .tables = std::move(tables)};
}

}  // namespace tessera::plan
