#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// How a model, and a step of it, may be cut over the ranks of a world: one point of the space that a search goes through.
struct LayoutChoice {
  int tp = 1, pp = 1, cp = 1, ep = 1;
  int stage = 0;           ///< zero.stage
  int shard = 1;           ///< data ranks that the state is cut over, beside those of cp; the rest hold copies
  int64_t batch = 1;       ///< batch.global_size
  int64_t micro_size = 1;  ///< sequences of a forward pass
  std::string recompute = "none";
  std::string schedule = "1f1b";  ///< where pp > 1
  int chunks = 1;                 ///< of a stage
  bool offload = false;           ///< state on the host, where zero.stage = 3
  bool host_optimizer = false;    ///< of the state, the optimizer's alone
  int expert_tp = 1;
  bool sequence_parallel = true;  ///< where tp > 1

  auto operator<=>(const LayoutChoice&) const = default;

  int data_ranks(int world) const { return world / (tp * pp * cp); }
  /// Micro-batches of a step on the data rank that has most.
  int64_t micro_batches(int world) const { return (batch / micro_size + data_ranks(world) - 1) / data_ranks(world); }
};

/// As --set takes it. `beside`: sets of keys that no choice is of, which hold of every one; of a key that the choice says, it counts.
std::vector<std::string> settings_of(const LayoutChoice& choice, int world, const std::vector<std::string>& beside = {});

/// "tp 2, pp 4, dp 8 (zero 1), micro 2, recompute selective".
std::string to_string(const LayoutChoice& choice, int world);

/// Of a sequence that is cut a search leaves a rank so many tokens at least: fewer are for who has more ranks than sequences.
constexpr int64_t kFewestColumns = 4096;

/// All that the model's and the world's divisors allow; what the configuration's rules refuse beside is not known here. `batches` are the sizes of a step to
/// choose from.
std::vector<LayoutChoice> all_choices(const Config& config, int world, const Machine& machine, const std::vector<int64_t>& batches,
                                      int64_t fewest_columns = kFewestColumns);

/// A choice that differs in one thing, and what that is: "tp 4".
struct Neighbour {
  std::string what;
  LayoutChoice choice;
};
std::vector<Neighbour> neighbours_of(const LayoutChoice& choice, const Config& config, int world, const Machine& machine,
                                     int64_t fewest_columns = kFewestColumns);

}  // namespace tessera::plan
