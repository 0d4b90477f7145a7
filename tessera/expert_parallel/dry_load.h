#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/ambient.h"
#include "tessera/nn/dry_sizes.h"

namespace tessera::experts {

/// How many rows routers send to the experts of this rank: what a dry run has to assume, for it has no tokens.
enum class DryLoad : uint8_t { Fewest, Even, Most };

/// With what bounds it: a token sends at most one row to an expert.
struct DryRouting {
  DryLoad load = DryLoad::Even;
  bool alike = false;          ///< every expert takes as many of a forward pass's tokens (nn::RouterKind::ExpertChoice)
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
  nn::DryGroupsScope groups_;
};

/// Of `all` rows, which lie by expert, those of one rank: the `size` from `begin` on. Others have the rest, where several route the same tokens.
struct DryRows {
  int64_t all = 0, begin = 0, size = 0;
  auto operator<=>(const DryRows&) const = default;
};

/// How many of `rows` are of each of the experts, which lie in blocks of `block` experts, the block of `here` being this rank's.
/// Even: as many of each of all rows, the first experts one more where they do not go up.
/// Fewest: none for this block, where there is another, and none at all where rows may be padding (nn::SampleContext::padding); Most: as many for it as the
/// tokens of these rows can send, and a capacity lets pass. Where experts have alike, neither is asked, unless rows may be padding. What a capacity may drop is
/// left out of Fewest alone.
std::vector<int64_t> dry_load(const DryRows& rows, int64_t experts, int64_t block, int64_t here);

/// Whether in a run no expert may get some of a rank's rows: a capacity drops them, or they are padding.
bool dry_rows_may_drop();

/// What the rows of a rank's experts are to those of a run, where experts lie in so many blocks.
nn::DrySizes dry_sizes(int64_t blocks);

/// Rows of all tokens of another rank of the world where rank `world_rank` has `rows`.
int64_t dry_rows_of(int other, int64_t rows, int world_rank);

/// The part of shared tokens that a rank of the world takes; `otherwise` where nobody says.
int dry_part_of(int world_rank, int otherwise);

}  // namespace tessera::experts
