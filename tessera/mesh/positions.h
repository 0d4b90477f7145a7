#pragma once

#include <vector>

#include "tessera/mesh/mesh.h"

namespace tessera {

/// Mesh::rank(r, axes) of every rank r of the grid, in one sweep: what a loop over a large world wants. No axes: all 0.
std::vector<int> ranks_along(const MeshShape& shape, const std::vector<std::string>& axes);

/// The grid's other axes, in its order.
std::vector<std::string> axes_beside(const std::vector<std::string>& axes, const MeshShape& shape);

}  // namespace tessera
