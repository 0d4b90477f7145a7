#pragma once

#include <cstdint>
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
/// Fewest: none for this block, where there is another; Most: as many for it as the tokens of these rows can send, and a capacity lets pass.
std::vector<int64_t> dry_load(int64_t rows, int64_t experts, int64_t block, int64_t here, int routed_by = 1);

}  // namespace tessera::experts
