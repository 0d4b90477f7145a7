#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/world.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/net.h"

/// A module under each technique that has a plain loop.
namespace tessera::testing_support {

inline const std::vector<std::string> techniques{"ddp", "zero1", "zero2", "fsdp"};

struct WrapOptions {
  nn::ParameterFilter only = {};
  bool unused = false;  ///< find_unused_parameters
  bool average = false;
};

inline std::unique_ptr<GradientSynchronizer> wrap_by(const std::string& technique, torch::nn::Module& module, const ShardGroups& groups,
                                                     WrapOptions options = {}) {
  if (technique == "ddp") {
    return std::make_unique<DistributedDataParallel>(
        module, groups.shard,
        DdpOptions{.sizes = small_buckets, .only = std::move(options.only), .average = options.average, .find_unused_parameters = options.unused});
  }
  if (technique == "fsdp") {
    return fully_shard(module, groups.shard,
                       {.only = std::move(options.only), .average = options.average, .find_unused_parameters = options.unused, .replicate = groups.replicate});
  }
  return std::make_unique<ShardedDataParallel>(module, groups,
                                               ZeroOptions{.stage = technique == "zero1" ? 1 : 2,
                                                           .sizes = small_buckets,
                                                           .only = std::move(options.only),
                                                           .average = options.average,
                                                           .find_unused_parameters = options.unused});
}

/// Over all ranks, or, where a technique takes it, over halves of them that hold the same.
inline ShardGroups halves_of(const std::string& technique, comm::World& world) {
  if (technique == "ddp" || world.size() % 2 != 0) return {.shard = world.group()};
  const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", world.size() / 2}});
  return {.shard = mesh["dp_shard"], .replicate = mesh["dp_replicate"]};
}

/// Those of them that shard parameters give them back.
inline void unshard_all(const std::vector<GradientSynchronizer*>& wrappers) {
  for (auto* const wrapper : wrappers) {
    if (auto* const sharded = dynamic_cast<FullyShardedDataParallel*>(wrapper)) unshard(*sharded);
  }
}

inline std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

}  // namespace tessera::testing_support
