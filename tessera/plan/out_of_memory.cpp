#include "tessera/plan/out_of_memory.h"

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/settings.h"
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
  if (search.fits) return fmt::format("the cheapest setting that would fit: {} (peak {})", flags_of(best->sets), peak);
  return fmt::format("none of {} settings tried would fit{}: the smallest peak, {}, is that of {}{}", search.tried.size(),
                     search.complete ? "" : ", and there was no time for more", peak, flags_of(best->sets), micro_size);
}

std::string share(double part, double whole) { return whole > 0 ? fmt::format("{:+.1f}%", 100 * (part / whole - 1)) : std::string("-"); }

}  // namespace

std::string formula_text(const Config& config, int world) {
  const int shards = size_along(mesh_shape(config.mesh, config.zero.stage, world), mesh_roles(config).shard);
  const auto whole = bytes_per_parameter(config), kept = kept_per_parameter(whole, config.zero.stage, shards);
  const auto parameters = static_cast<double>(num_parameters(config.model));
  return fmt::format(
      "(w, g, k) = ({:g}, {:g}, {:g}) bytes of weight, gradient and optimizer a parameter; zero.stage = {} over {} rank{} keeps {:.3g} + {:.3g} + {:.3g} of "
      "them\n"
      "on each{}{}: {} for {} parameters; activations, outputs, comm and other come on top\n",
      whole.weight, whole.gradient, whole.state, config.zero.stage, shards, shards == 1 ? "" : "s", kept.weight, kept.gradient, kept.state,
      config.offload.params.is("host")   ? ", on the host"
      : config.offload.params.is("disk") ? ", weights and gradients on disk"
                                         : "",
      kept.quantized > 0 ? fmt::format(", beside {:.3g} of weights in fewer bits", kept.quantized) : "",
      format_bytes(static_cast<int64_t>(kept.total() * parameters)), format_count(parameters));
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
  const FitSearch search = find_fit(config, failure.world, room(refusal));
  const std::string refused = what_was_refused(failure, config.run.memory_limit_bytes);
  std::string tables =
      fmt::format("the memory of rank {} when it ran out\n{}", failure.rank, category_table({{"in use", refusal.in_use}, {"predicted peak", search.now.peak}}));
  if (refusal.largest.empty()) {
    tables += "the largest tensors at the peak of a dry run of the same step\n" +
              block_table(largest_class(dry_run(config, failure.world, {.largest = true})).largest);
  } else {
    tables += "the largest tensors alive then\n" + block_table(refusal.largest);
  }
  tables += "by formula: " + formula_text(config, failure.world);
  tables += fmt::format("settings tried by dry run, cheapest first, for a peak of {} at most\n{}", format_bytes(room(refusal)), rows_text(search));
  return {.sentence = refused + "; " + way_out(search), .tables = std::move(tables)};
}

}  // namespace tessera::plan
