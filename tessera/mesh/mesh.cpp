#include "tessera/mesh/mesh.h"

#include <algorithm>
#include <map>
#include <mutex>

#include <fmt/format.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/mesh/positions.h"

// Row-major numbering makes all of this arithmetic of strides, without tables of world size, and the same on every rank without asking: a group's members are
// this rank's origin along the axes plus all multiples of their strides. Groups are made at their first use and not all at once: a mesh of five axes has 31
// sets of them, of which a run uses a few.

namespace tessera {
namespace {

// "dp 2 x tp 4 = 8"
std::string product_text(const MeshShape& axes, int64_t product) {
  std::string text;
  for (const auto& [name, size] : axes) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name, size);
  return fmt::format("{} = {}", text.empty() ? "no axes" : text, product);
}

size_t index_of(const MeshShape& shape, const std::string& axis) {
  const auto found = std::ranges::find(shape, axis, [](const auto& one) { return one.first; });
  if (found != shape.end()) return static_cast<size_t>(found - shape.begin());
  std::string known;
  for (const auto& [name, size] : shape) known += (known.empty() ? "" : ", ") + name;
  throw InternalError(detail::concat("internal error: mesh has no axis ", axis, "; it has ", known));
}

// The product of the sizes, each of which is sound and named once.
int64_t checked_product(const MeshShape& axes) {
  int64_t product = 1;
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto& [name, size] = axes[i];
    require(size >= 1, "mesh.", name, " = ", size, " must be at least 1");
    for (size_t j = 0; j < i; ++j) require(axes[j].first != name, "mesh: the axis ", name, " is named twice");
    product *= size;
  }
  return product;
}

// Positions of the named axes, slowest first.
std::vector<size_t> indices_of(const MeshShape& shape, const Axes& asked) {
  std::vector<size_t> found;
  for (const auto& name : asked.names) found.push_back(index_of(shape, name));
  std::sort(found.begin(), found.end());
  const auto twice = std::adjacent_find(found.begin(), found.end());
  invariant(twice == found.end(), "mesh axis named twice: ", twice == found.end() ? "" : shape[*twice].first);
  return found;
}

}  // namespace

struct Mesh::State {
  State(comm::WorldView view, MeshShape shape, std::vector<int> ranks_of_places = {})
      : world(std::move(view)), axes(std::move(shape)), rank_of(std::move(ranks_of_places)), place_of(rank_of.size()), strides(axes.size(), 1) {
    for (size_t place = 0; place < rank_of.size(); ++place) place_of[static_cast<size_t>(rank_of[place])] = static_cast<int>(place);
    for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * axes[i].second;
    coordinates = coordinates_of(world.rank());
  }

  comm::WorldView world;
  MeshShape axes;
  std::vector<int> rank_of, place_of;  // of the grid's places, first axis slowest; empty: place and rank are the same number
  std::vector<int> strides;            // places between neighbors on each axis
  std::vector<int> coordinates;        // this rank's
  std::mutex mutex;
  std::map<std::vector<size_t>, comm::Group> groups;  // by axes of size > 1

  std::vector<size_t> indices(const Axes& asked) const { return indices_of(axes, asked); }

  std::vector<int> coordinates_of(int world_rank) const {
    std::vector<int> result;
    const int place = place_of.empty() ? world_rank : place_of[static_cast<size_t>(world_rank)];
    for (size_t i = 0; i < axes.size(); ++i) result.push_back(place / strides[i] % axes[i].second);
    return result;
  }

  int rank_at(int place) const { return rank_of.empty() ? place : rank_of[static_cast<size_t>(place)]; }

  std::vector<int> members(const std::vector<size_t>& along) const { return members(along, coordinates); }

  /// Of the rank at `place`.
  std::vector<int> members(const std::vector<size_t>& along, const std::vector<int>& place) const {
    int origin = 0;
    for (size_t i = 0; i < axes.size(); ++i) origin += std::ranges::count(along, i) > 0 ? 0 : place[i] * strides[i];
    std::vector<int> ranks{origin};
    for (const auto i : along) {
      std::vector<int> longer;
      longer.reserve(ranks.size() * axes[i].second);
      for (const int rank : ranks) {
        for (int step = 0; step < axes[i].second; ++step) longer.push_back(rank + step * strides[i]);
      }
      ranks = std::move(longer);
    }
    for (int& rank : ranks) rank = rank_at(rank);
    return ranks;
  }

  std::string name(const std::vector<size_t>& along) const {
    std::string text;
    for (const auto i : along) text += (text.empty() ? "" : "+") + axes[i].first;
    return text;
  }
};

Mesh::Mesh(const comm::World& world, MeshShape axes) {
  const int64_t product = checked_product(axes);
  require(product == world.size(), "mesh: ", product_text(axes, product), " is not the world size ", world.size(), "; change an axis or the number of ranks");
  state_ = std::make_shared<State>(comm::WorldView(world), std::move(axes));
}

Mesh Mesh::regrouped(const Axes& over, const MeshShape& into) const {
  const auto replaced = state_->indices(over);
  MeshShape axes;
  for (size_t i = 0; i < state_->axes.size(); ++i) {
    if (std::ranges::count(replaced, i) == 0) axes.push_back(state_->axes[i]);
  }
  const MeshShape kept = axes;
  axes.insert(axes.end(), into.begin(), into.end());
  checked_product(axes);
  const int64_t product = checked_product(into);
  require(product == size(over), "mesh: ", product_text(into, product), " is not the size ", size(over), " of ", state_->name(replaced),
          ", which it is to regroup; change an axis");
  Axes others(std::vector<std::string>{});
  for (const auto& [name, size] : kept) others.names.push_back(name);
  const std::vector<int> beside = ranks_along(state_->axes, others.names), along = ranks_along(state_->axes, over.names);  // of places
  std::vector<int> rank_of(beside.size());
  for (size_t place = 0; place < rank_of.size(); ++place) {
    rank_of[static_cast<size_t>(beside[place] * product + along[place])] = state_->rank_at(static_cast<int>(place));
  }
  return Mesh(std::make_shared<State>(state_->world, std::move(axes), std::move(rank_of)));
}

bool Mesh::has(const std::string& axis) const {
  for (const auto& [name, size] : state_->axes) {
    if (name == axis) return true;
  }
  return false;
}

int Mesh::size(const Axes& axes) const { return size_along(state_->axes, axes); }

int Mesh::rank(const Axes& axes) const { return rank(state_->world.rank(), axes); }

int Mesh::rank(int world_rank, const Axes& axes) const {
  const auto coordinates = state_->coordinates_of(world_rank);
  int position = 0;
  for (const auto i : state_->indices(axes)) position = position * state_->axes[i].second + coordinates[i];
  return position;
}

std::vector<int> Mesh::coordinates() const { return state_->coordinates; }

std::vector<int> Mesh::coordinates(int world_rank) const {
  invariant(world_rank >= 0 && world_rank < state_->world.size(), "mesh: rank ", world_rank, " of a world of ", state_->world.size());
  return state_->coordinates_of(world_rank);
}

int Mesh::world_rank(const std::vector<int>& coordinates) const {
  invariant(coordinates.size() == state_->axes.size(), "mesh of ", state_->axes.size(), " axes: ", coordinates.size(), " coordinates");
  int place = 0;
  for (size_t i = 0; i < coordinates.size(); ++i) {
    invariant(coordinates[i] >= 0 && coordinates[i] < state_->axes[i].second, "mesh axis ", state_->axes[i].first, ": coordinate ", coordinates[i], " of ",
              state_->axes[i].second);
    place += coordinates[i] * state_->strides[i];
  }
  return state_->rank_at(place);
}

std::vector<int> Mesh::members(const Axes& axes) const { return state_->members(state_->indices(axes)); }
std::vector<int> Mesh::members(int world_rank, const Axes& axes) const { return state_->members(state_->indices(axes), coordinates(world_rank)); }
const MeshShape& Mesh::shape() const { return state_->axes; }

comm::Group Mesh::operator[](const Axes& axes) const {
  const auto asked = state_->indices(axes);
  std::vector<size_t> along;
  for (const auto i : asked) {
    if (state_->axes[i].second > 1) along.push_back(i);
  }
  if (along.empty()) return state_->world.subgroup({state_->world.rank()}, state_->name(asked));
  const std::lock_guard lock(state_->mutex);
  if (const auto known = state_->groups.find(along); known != state_->groups.end()) return known->second;
  return state_->groups.emplace(along, state_->world.subgroup(state_->members(along), state_->name(along))).first->second;
}

comm::Group Mesh::another(const Axes& axes, const std::string& name) const {
  return size(axes) == 1 ? (*this)[axes] : state_->world.subgroup(members(axes), state_->name(state_->indices(axes)) + "." + name);
}

MeshShape mesh_shape(const MeshConfig& config, int zero_stage, int world_size) { return resolve_mesh(config, zero_stage, world_size); }

int size_along(const MeshShape& shape, const Axes& axes) {
  int product = 1;
  for (const auto i : indices_of(shape, axes)) product *= shape[i].second;
  return product;
}

}  // namespace tessera
