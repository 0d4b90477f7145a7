#include <algorithm>
#include <charconv>
#include <set>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/verify/verify.h"

namespace tessera {

namespace {

const std::vector<std::string> kAxes{"dp_replicate", "dp_shard", "pp", "cp", "tp", "ep", "expert_tp"};

int size_of(const std::string& axis, const std::string& text) {
  int size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  require(error == std::errc() && end == text.data() + text.size() && size >= 1, "--mesh ", axis, "=", text, ": expected a size of at least 1, such as ", axis,
          "=2");
  return size;
}

void set_axis(MeshConfig& mesh, const std::string& axis, int size) {
  if (axis == "dp_replicate") mesh.dp_replicate = size;
  if (axis == "dp_shard") mesh.dp_shard = size;
  if (axis == "pp") mesh.pp = size;
  if (axis == "cp") mesh.cp = size;
  if (axis == "tp") mesh.tp = size;
  if (axis == "ep") mesh.ep = size;
  if (axis == "expert_tp") mesh.expert_tp = size;
}

}  // namespace

MeshConfig parse_mesh(const std::string& text, const MeshConfig& base) {
  MeshConfig mesh;
  mesh.order = base.order;
  for (const auto& axis : kAxes) set_axis(mesh, axis, 1);
  std::set<std::string> given;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = detail::trimmed(text.substr(begin, end - begin));
    const size_t equals = part.find('=');
    require(equals != std::string::npos, "--mesh ", text, ": '", part, "' is no axis=size; write --mesh dp_replicate=3, or several separated by commas");
    const std::string axis = part.substr(0, equals);
    require(std::find(kAxes.begin(), kAxes.end(), axis) != kAxes.end(), "--mesh ", text, ": there is no axis ", axis, "; did you mean ", nearest(axis, kAxes),
            "?");
    require(given.insert(axis).second, "--mesh ", text, ": ", axis, " is given twice; give each axis once");
    set_axis(mesh, axis, size_of(axis, part.substr(equals + 1)));
    begin = end + 1;
  }
  return mesh;
}

}  // namespace tessera
