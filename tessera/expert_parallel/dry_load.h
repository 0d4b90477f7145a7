#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/ambient.h"

namespace tessera::experts {

/// How many rows routers send to the experts of this rank: what a dry run has to assume, for it has no tokens.
enum class DryLoad : uint8_t { Fewest, Even, Most };

/// With what bounds it: a token sends at most one row to an expert.
struct DryRouting {
  DryLoad load = DryLoad::Even;
  int64_t per_token = 1;       ///< rows of a token
  double capacity_factor = 0;  ///< most rows of an expert, in even shares; 0: all tokens
  /// Tokens of a micro-batch on a rank of the world: columns of cut sequences may be uneven, or none. Unset: as many on all.
  std::function<int64_t(int world_rank)> tokens{};
  /// Which part of them a rank takes where several share tokens (ExpertParallelOptions::same_tokens). Unset: as its place in the group says.
  std::function<int(int world_rank)> part{};
};

/// While alive, this thread's dry runs take it so. Nests.
class DryRoutingScope {
 public:
  explicit DryRoutingScope(const DryRouting& routing);
  ~DryRoutingScope();
  DryRoutingScope(const DryRoutingScope&) = delete;
  DryRoutingScope& operator=(const DryRoutingScope&) = delete;

 private:
  DryRouting before_;
};

/// Of `rows` that a rank has, those of each of the experts that lie in blocks of `block` experts, the block of `here` being this rank's.
/// `routed_by`: so many ranks have parts of the same tokens' rows, which lie by expert: one of them may have all rows of an expert.
/// Fewest: none for this block, where there is another, and none at all where rows may be padding (nn::SampleContext::padding); Most: as many for it as the
/// tokens of these rows can send, and a capacity lets pass.
std::vector<int64_t> dry_load(int64_t rows, int64_t experts, int64_t block, int64_t here, int routed_by = 1);

/// Rows of all tokens of another rank of the world where rank `world_rank` has `rows`.
int64_t dry_rows_of(int other, int64_t rows, int world_rank);

/// The part of shared tokens that a rank of the world takes; `otherwise` where nobody says.
int dry_part_of(int world_rank, int otherwise);

}  // namespace tessera::experts
