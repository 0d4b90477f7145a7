#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"

namespace tessera::plan {

/// What decides of a step's size and time and is not known before it runs: how long the documents are that a window packs, of which a plan takes each window
/// for one, and how many tokens routers send to experts that are dealt over ranks, or round each expert's in fp8, of which it takes as many for each, so that
/// no capacity drops any.
struct Unknowns {
  bool documents = false, routers = false;
  bool any() const { return documents || routers; }
};
Unknowns unknowns_of(const Config& config, int world);

/// Between which the rank that needs most, and a step, come to lie, whatever documents and routers bring.
struct Bounds {
  Unknowns unknown{};
  int64_t lowest_peak = 0, highest_peak = 0;      ///< bytes of tensors
  int64_t lowest_needed = 0, highest_needed = 0;  ///< of the device (needed_bytes)
  std::optional<double> lowest_seconds{}, highest_seconds{};
};

/// Of documents a window is cut into so many for a plan that is to say what shorter ones take.
constexpr int64_t kShortDocuments = 8;

/// What a figure comes to where documents have no length, of what it is with long ones and with some `ratio` times shorter. Memory is the largest of sums that
/// grow linearly with the length, a convex function, and what a line through two of its points says before both of them is never above it.
double without_length(double whole, double parts, double ratio = kShortDocuments);

/// Between which plans that line is drawn: of whole windows and kShortDocuments in each, or, where a sliding window cuts long ones, of documents within it, and
/// none of one length, of which attention takes no two together.
struct DocumentLine {
  int64_t few = 1, many = kShortDocuments;  ///< DryRunOptions::documents
  bool apart = false;                       ///< DryRunOptions::documents_apart
  double ratio = kShortDocuments;
};
DocumentLine document_line(const Config& config, int world);

/// None where nothing is unknown. Costs up to three dry runs, and two more under a sliding window, beside `run`, which is that of `config`.
std::optional<Bounds> find_bounds(const Config& config, const DryRun& run, const DryRunOptions& options);

nlohmann::json to_json(const Bounds& bounds);
/// One line; says so where the highest is beyond `memory_limit` (0: none).
std::string to_string(const Bounds& bounds, int64_t memory_limit);

}  // namespace tessera::plan
