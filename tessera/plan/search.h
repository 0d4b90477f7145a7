#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/plan/layout_choice.h"
#include "tessera/plan/machine.h"
#include "tessera/plan/step_time.h"

namespace tessera::plan {

/// A layout that was run dry.
struct Tried {
  LayoutChoice choice{};
  int64_t peak_bytes = 0;    ///< of tensors, on the rank that needs most
  int64_t needed_bytes = 0;  ///< of its device (plan::needed_bytes)
  bool fits = false;
  StepTime time{};
  double estimated_seconds = 0;  ///< of a step, by formula: why it was looked at
};

/// Beside the best: one that differs from it in one thing, and why it is not chosen.
struct Loses {
  std::string what;    ///< "tp 4"
  std::string reason;  ///< "12% slower: 0.31 s more waiting for collectives"
};

/// Which layout to train in, by dry runs.
struct LayoutSearch {
  int world = 1;
  int64_t limit = 0;
  size_t possible = 0;                    ///< layouts that the divisors allow
  size_t too_large = 0;                   ///< of those, whose state alone is beyond the limit
  double seconds = 0;                     ///< that the search took
  bool complete = true;                   ///< false: patience ended before every neighbour of the best was run
  size_t refused = 0;                     ///< layouts that a rule of the configuration refuses
  std::string refusal{};                  ///< what it says of most of them
  bool exhausted = false;                 ///< every layout was run, refused by a rule or is too large by its state: where none fits, none does
  std::vector<Tried> ranked;              ///< those that fit, the fastest for a token first; then those that do not, by what they need
  std::vector<Loses> losing;              ///< the best's neighbours
  std::vector<std::string> observations;  ///< what of the field's rules of thumb came out of the costs, and what did not
  std::vector<std::string> beside{};      ///< SearchOptions::beside
  std::optional<int> smallest_world;      ///< where nothing fits: the fewest ranks, in powers of two of these, of which a layout was run that does

  int most_ruled_out = 0;       ///< where there is none: of so many no layout fits
  int most_looked_at = 0;       ///< and of so many some were run, none of which fits
  int too_many_for_a_step = 0;  ///< and over so many no layout deals its sequences

  const Tried* best() const { return !ranked.empty() && ranked.front().fits ? &ranked.front() : nullptr; }
};

struct SearchOptions {
  std::vector<int64_t> batches{};  ///< of which batch.global_size may be chosen; empty: as it is
  std::chrono::seconds patience{20};
  size_t most_runs = SIZE_MAX;                               ///< dry runs, too, whatever they take
  std::function<bool(const LayoutChoice& choice)> admits{};  ///< which layouts are looked at; empty: all
  int64_t fewest_columns = kFewestColumns;                   ///< of a sequence, that a rank keeps
  std::optional<int64_t> micro_size{};                       ///< batch.micro_size of the run as it was; where another is chosen, what depends on it is said
  std::function<Machine(Config& layout)> driven{};           ///< the machine as each layout drives it, which may settle its stages; empty: `machine` is
  bool allocator = false;                                    ///< what an accelerator's allocator reserves has to fit (DryRunOptions::allocator)
  bool on_the_host = true;                                   ///< where nothing fits else, optimizers there are tried, and larger worlds
  std::vector<std::string> beside{};                         ///< sets that hold of every layout, as `config` has them: what else its file says is to be told
  std::function<void(const std::string&)> progress{};
};

/// Goes through the layouts of a model on `world` devices: formulas (estimate.h) leave out those whose state alone does not fit and say in which order to look;
/// the step is run dry in the first of them, and then in all that differ from the best so far in one thing, as long as one of them is better. Rules of the
/// configuration are not repeated: what they refuse is passed over. Optimizer, precision, model and data stay as they are; mesh.*, zero.stage, recompute.mode,
/// pipeline.schedule, batch.micro_size and tensor.sequence_parallel (off where routers look at whole passes) are chosen, and where nothing fits else,
/// offload.optimizer. run.memory_limit_bytes, the device's, has to be set. Cost: dry runs, for `patience`, after which one that has begun is broken off; where
/// that was the first, there is nothing to rank, and `complete` is false.
LayoutSearch search_layouts(const Config& config, int world, const Machine& machine, const SearchOptions& options = {});

nlohmann::json to_json(const LayoutSearch& search);

/// A table for people.
std::string to_string(const LayoutSearch& search, size_t rows = 10);

}  // namespace tessera::plan
