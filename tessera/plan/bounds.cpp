#include "tessera/plan/bounds.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "tessera/config/expert_rules.h"
#include "tessera/core/format.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"

namespace tessera::plan {
namespace {

/// Bytes of the rank that needs most: of tensors, and of its device.
struct Memory {
  double peak = 0, needed = 0;
};

Memory memory_of(const DryRun& run) {
  const RankClass& most = largest_class(run);
  return {static_cast<double>(total_of(most.peak_bytes)), static_cast<double>(needed_bytes(most))};
}

std::optional<double> seconds_of(const DryRun& run) { return run.time ? std::optional(run.time->seconds) : std::nullopt; }

}  // namespace

Unknowns unknowns_of(const Config& config, int world) {
  const bool dealt = config.model.experts > 0 && deals_experts(config, mesh_shape(config.mesh, config.zero.stage, world));
  // Between ranks that each hold a part of every expert no row travels that a capacity drops.
  const bool dropped = config.mesh.expert_tp > 1 && config.moe.capacity_factor > 0 && !experts_have_alike(config.model);
  const bool documents = config.data.documents != "none";  // and padding, which decides where experts have alike
  // Of each expert's rows alone fp8 makes a copy, which is as large as the busiest one's.
  const bool copied = config.model.experts > 0 && config.precision.compute == "fp8" && !experts_have_alike(config.model);
  return {.documents = documents, .routers = copied || (dealt && ((config.mesh.ep > 1 && (!experts_have_alike(config.model) || documents)) || dropped))};
}

double without_length(double whole, double parts, double ratio) { return parts - (whole - parts) / (ratio - 1); }

DocumentLine document_line(const Config& config, int world) {
  if (documents_that_fill(config, world) == 1) return {};
  const int64_t columns = config.data.seq_len, window = config.model.sliding_window, few = (columns + window - 1) / window;
  DocumentLine line{.few = few, .many = std::min(columns, kShortDocuments * few), .apart = true};
  line.ratio = static_cast<double>(columns / line.few) / static_cast<double>(columns / line.many);
  if (line.ratio <= 1) line.ratio = std::numeric_limits<double>::infinity();  // of one column each
  return line;
}

std::optional<Bounds> find_bounds(const Config& config, const DryRun& run, const DryRunOptions& options) {
  const Unknowns unknown = unknowns_of(config, run.world);
  if (!unknown.any()) return std::nullopt;
  DryRunOptions each{.machine = options.machine, .allocator = options.allocator, .exact_ranks = options.exact_ranks, .progress = options.progress};
  const auto with = [&](int64_t documents, experts::DryLoad routed) {
    each.documents = documents, each.routed = routed;
    return dry_run(config, run.world, each);
  };
  Bounds bounds{.unknown = unknown, .highest_seconds = seconds_of(run)};
  Memory lowest = memory_of(run), highest = lowest;
  std::optional<double> seconds = bounds.highest_seconds;
  if (unknown.routers) {
    const DryRun most = with(1, experts::DryLoad::Most);
    highest = {std::max(highest.peak, memory_of(most).peak), std::max(highest.needed, memory_of(most).needed)};
    if (most.time) bounds.highest_seconds = std::max(*bounds.highest_seconds, most.time->seconds);
    const Memory fewest = memory_of(with(1, experts::DryLoad::Fewest));
    lowest = {std::min(lowest.peak, fewest.peak), std::min(lowest.needed, fewest.needed)};
  }
  if (unknown.documents) {
    // Beside documents a rank may have padding alone, of which experts on other ranks get nothing, whatever the router.
    const auto routed = config.model.experts > 0 ? experts::DryLoad::Fewest : experts::DryLoad::Even;
    const DocumentLine line = document_line(config, run.world);
    each.documents_apart = line.apart;
    const Memory whole = line.few > 1 ? memory_of(with(line.few, routed)) : lowest;
    DryRun parts = with(line.many, routed);
    const Memory cut = memory_of(parts);
    lowest = {std::min(lowest.peak, without_length(whole.peak, cut.peak, line.ratio)),
              std::min(lowest.needed, without_length(whole.needed, cut.needed, line.ratio))};
    if (std::exchange(each.documents_apart, false) && parts.time) parts = with(kShortDocuments, routed);  // a kernel for each would take longer
    if (parts.time) seconds = std::min(*seconds, std::max(0.0, without_length(*seconds, parts.time->seconds)));
  }
  bounds.lowest_seconds = seconds;
  bounds.lowest_peak = static_cast<int64_t>(lowest.peak), bounds.highest_peak = static_cast<int64_t>(highest.peak);
  bounds.lowest_needed = static_cast<int64_t>(lowest.needed), bounds.highest_needed = static_cast<int64_t>(highest.needed);
  return bounds;
}

nlohmann::json to_json(const Bounds& bounds) {
  nlohmann::json unknown = nlohmann::json::array();
  if (bounds.unknown.documents) unknown.push_back("documents");
  if (bounds.unknown.routers) unknown.push_back("routers");
  nlohmann::json json = {{"unknown", unknown},
                         {"peak_bytes", {{"lowest", bounds.lowest_peak}, {"highest", bounds.highest_peak}}},
                         {"needed_bytes", {{"lowest", bounds.lowest_needed}, {"highest", bounds.highest_needed}}}};
  if (bounds.lowest_seconds) json["step_s"] = {{"lowest", *bounds.lowest_seconds}, {"highest", *bounds.highest_seconds}};
  return json;
}

std::string to_string(const Bounds& bounds, int64_t memory_limit) {
  std::string what;
  if (bounds.unknown.documents) what = "how long documents are (here each window is one)";
  if (bounds.unknown.routers) what += (what.empty() ? "" : " and ") + std::string("which experts routers choose (here all alike)");
  std::string text = fmt::format("not known before it runs is {}: the rank that needs most needs {} to {}", what, format_bytes(bounds.lowest_needed),
                                 format_bytes(bounds.highest_needed));
  if (bounds.lowest_seconds)
    text += fmt::format(", and a step takes {} to {}", format_duration(*bounds.lowest_seconds), format_duration(*bounds.highest_seconds));
  if (memory_limit > 0 && bounds.lowest_needed <= memory_limit && bounds.highest_needed > memory_limit) {
    text += fmt::format("; the limit of {} lies between", format_bytes(memory_limit));
  }
  return text + "\n";
}

}  // namespace tessera::plan
