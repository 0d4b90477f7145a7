#include "tessera/mesh/positions.h"

#include <algorithm>

namespace tessera {

std::vector<int> ranks_along(const MeshShape& shape, const std::vector<std::string>& axes) {
  size_along(shape, Axes(axes));  // refuses what the grid does not have
  std::vector<int> positions{0};
  for (const auto& [axis, size] : shape) {  // slowest first: each rank so far becomes `size` of them
    const bool asked = std::ranges::find(axes, axis) != axes.end();
    std::vector<int> longer;
    longer.reserve(positions.size() * static_cast<size_t>(size));
    for (const int position : positions) {
      for (int step = 0; step < size; ++step) longer.push_back(asked ? position * size + step : position);
    }
    positions = std::move(longer);
  }
  return positions;
}

std::vector<std::string> axes_beside(const std::vector<std::string>& axes, const MeshShape& shape) {
  std::vector<std::string> others;
  for (const auto& [axis, size] : shape) {
    if (std::ranges::find(axes, axis) == axes.end()) others.push_back(axis);
  }
  return others;
}

}  // namespace tessera
