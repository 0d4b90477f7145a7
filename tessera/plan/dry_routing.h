#pragma once

#include <cstdint>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/data/loader.h"
#include "tessera/expert_parallel/dry_load.h"
#include "tessera/mesh/mesh.h"

/// What routers send in a dry run, as the layout says who routes which tokens.
namespace tessera::plan {

/// `loader` is that of any rank of `mesh`.
experts::DryRouting dry_routing(const Config& config, experts::DryLoad load, const Mesh& mesh, const data::LoaderOptions& loader);

/// By rank of the world, the rows that a forward pass of a micro-batch brings to its experts; empty where no rank's rows go to another. Where a rank routes a
/// part of the tokens that it shares, and experts lie with ranks of few such parts, some of these get many rows and others none. `documents`: of a packed
/// window. Cost: some 100 ns a rank.
std::vector<int64_t> dealt_rows(const Config& config, const Mesh& mesh, experts::DryLoad load, int64_t documents);

}  // namespace tessera::plan
