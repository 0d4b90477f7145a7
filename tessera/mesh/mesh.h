#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/world.h"

namespace tessera {

struct MeshConfig;  // tessera/config/config.h

/// Axes and their sizes, slowest-varying first: with {{"dp", 2}, {"tp", 4}} ranks 0-3 are one tp group and ranks 0, 4 one dp group.
using MeshShape = std::vector<std::pair<std::string, int>>;

/// One axis or several, by name: "tp", or {"dp_shard", "cp"}.
struct Axes {
  Axes(const char* axis) : names{axis} {}
  Axes(std::string axis) : names{std::move(axis)} {}
  Axes(std::initializer_list<std::string> axes) : names(axes) {}
  Axes(std::vector<std::string> axes) : names(std::move(axes)) {}
  std::vector<std::string> names;
};

/// The world's ranks on a grid with named axes, and the one place that does rank arithmetic. A cheap value to copy.
///
/// A group varies along the axes asked for while the other coordinates stay this rank's. Groups of several axes number their members with the
/// first axis of the *mesh* slowest, in whatever order they are asked for. Making a group is collective over its members, at its first use: all ranks
/// must first use the same axes in the same order. Axes of size 1 are left out, and what remains of size 1 is the group of one and never
/// touches the network; the same members are never connected twice.
class Mesh {
 public:
  /// Throws ConfigError, with the product printed, where the sizes do not multiply to the world's size, for a size below 1 and for an axis named twice.
  Mesh(const comm::World& world, MeshShape axes);

  /// Another grid over the same ranks, for parameters that are dealt otherwise than the rest (experts: {"dp_shard", "cp", "tp"} into {{"edp", 4}, {"ep", 2}}):
  /// the ranks that differ along `over` alone, in the order of that group, are numbered anew along `into`, slowest first. The other axes stay, in front of
  /// them. Groups of the same members as here are the same connections. Throws ConfigError, with the product printed, where the sizes do not come out.
  Mesh regrouped(const Axes& over, const MeshShape& into) const;

  bool has(const std::string& axis) const;
  /// Product of the sizes. Throws InternalError, naming the axes there are, for one that the mesh does not have; so do all below.
  int size(const Axes& axes) const;
  /// This rank's coordinate on the axis, or its rank in the group of several axes; makes no group.
  int rank(const Axes& axes) const;
  /// Another rank's.
  int rank(int world_rank, const Axes& axes) const;
  /// This rank's coordinates, one per axis, slowest first.
  std::vector<int> coordinates() const;
  /// Another rank's.
  std::vector<int> coordinates(int world_rank) const;
  /// The rank at these coordinates.
  int world_rank(const std::vector<int>& coordinates) const;
  /// World ranks of this rank's group along `axes`, in group order.
  std::vector<int> members(const Axes& axes) const;
  /// Of another rank's.
  std::vector<int> members(int world_rank, const Axes& axes) const;
  const MeshShape& shape() const;

  comm::Group operator[](const Axes& axes) const;

  /// A further group of the same ranks as [axes], with connections of its own, for messages that must not meet those of the first. Collective as that is; each
  /// call makes another. `name` is added to the axes'.
  comm::Group another(const Axes& axes, const std::string& name) const;

 private:
  struct State;
  explicit Mesh(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// The grid that a configuration asks for on `world_size` ranks, axes in the order of mesh.order. -1 on one axis takes what is left; where none is -1,
/// an unset dp_shard does if `zero_stage` > 0, and an unset dp_replicate otherwise. Throws ConfigError, with the product printed, where it does not come out.
MeshShape mesh_shape(const MeshConfig& config, int zero_stage, int world_size);

/// Product of the sizes of `axes`, where there is no mesh yet. Throws InternalError as Mesh::size does.
int size_along(const MeshShape& shape, const Axes& axes);

}  // namespace tessera
