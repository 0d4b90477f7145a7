#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

const std::vector<std::string> axis_names = {"dp_replicate", "dp_shard", "pp", "cp", "tp"};

/// What is asked of one axis: a size, "what is left", or nothing.
struct AskedAxis {
  std::string name;
  std::optional<int> size;
};

std::vector<AskedAxis> asked_axes(const MeshConfig& mesh) {
  std::vector<AskedAxis> asked;
  for (const auto& name : mesh.order) {
    const auto known = std::find(axis_names.begin(), axis_names.end(), name);
    require(known != axis_names.end(), "mesh.order holds ", name, ": no such axis; did you mean ", nearest(name, axis_names), "?");
    require(std::count(mesh.order.begin(), mesh.order.end(), name) == 1, "mesh.order names ", name, " twice: list each axis once");
    const std::optional<int> sizes[] = {mesh.dp_replicate, mesh.dp_shard, mesh.pp, mesh.cp, mesh.tp};
    asked.push_back({name, sizes[known - axis_names.begin()]});
  }
  for (const auto& name : axis_names) {
    require(std::count(mesh.order.begin(), mesh.order.end(), name) == 1, "mesh.order lacks ", name, ": list each of dp_replicate, dp_shard, pp, cp, tp once");
  }
  for (const auto& [name, size] : asked) {
    require(!size || *size >= 1 || *size == -1, "mesh.", name, " = ", size.value_or(0), ": expected a size of at least 1, or -1 for what is left");
  }
  return asked;
}

std::string product_text(const std::vector<std::pair<std::string, int>>& axes, int64_t product) {
  std::string text;
  for (const auto& [name, size] : axes) text += (text.empty() ? "" : " x ") + name + " " + std::to_string(size);
  return text + " = " + std::to_string(product);
}

}  // namespace

std::vector<std::pair<std::string, int>> resolve_mesh(const MeshConfig& mesh, int zero_stage, int world_size) {
  invariant(world_size >= 1, "a world of ", world_size, " ranks");
  const auto asked = asked_axes(mesh);
  std::string rest;  // the axis that takes what is left
  for (const auto& [name, size] : asked) {
    if (size != -1) continue;
    require(rest.empty(), "mesh.", rest, " = -1 and mesh.", name, " = -1: only one axis can take what is left; give the other a size");
    rest = name;
  }
  const std::string data_axis = zero_stage > 0 ? "dp_shard" : "dp_replicate";
  std::vector<std::pair<std::string, int>> axes;
  int64_t product = 1;
  for (const auto& [name, size] : asked) {
    if (rest.empty() && !size && name == data_axis) rest = name;
    axes.emplace_back(name, name == rest ? 1 : size.value_or(1));
    product *= axes.back().second;
    require(product <= int64_t{1} << 31, "mesh.", name, " = ", axes.back().second, ": the mesh has more ranks than any world; lower it");
  }
  for (auto& [name, size] : axes) {
    if (name != rest) continue;
    require(world_size % product == 0, "mesh: ", product_text(axes, product), " ranks without mesh.", rest,
            ", which takes what is left, and that does not divide the world of ", world_size, "; change the world size or an axis");
    size = static_cast<int>(world_size / product);
    product *= size;
  }
  require(product == world_size, "mesh: ", product_text(axes, product), ", but the world has ", world_size, " ranks; change an axis, or set one of them to -1");
  for (const auto& [name, size] : axes) {
    require(name != "dp_shard" || size == 1 || zero_stage > 0, "mesh.dp_shard = ", size,
            ": with zero.stage = 0 nothing is sharded; use mesh.dp_replicate, or set zero.stage to 1, 2 or 3");
  }
  return axes;
}

}  // namespace tessera
