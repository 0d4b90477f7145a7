#pragma once

#include <map>
#include <memory>
#include <vector>

#include "tessera/comm/backends/record.h"
#include "tessera/mesh/mesh.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"

/// Steps of ShardedDataParallel on Net, beside one process.
namespace tessera::testing_support {

using comm::run_ranks;
using comm::World;

constexpr int steps = 3;

/// One of the ways in which stages 1 and 2 go.
struct Way {
  int stage;
  Accumulation accumulation = Accumulation::Sharded;
  std::optional<at::ScalarType> network = {};
};
inline const std::vector<Way> ways{{1}, {2, Accumulation::Sharded}, {2, Accumulation::Whole}};

inline ZeroOptions options_of(const Way& way) {
  return {.stage = way.stage, .sizes = small_buckets, .accumulation = way.accumulation, .network_dtype = way.network};
}

inline void update(const std::vector<nn::NamedParameter>& shards, double lr = 0.05) {
  const at::NoGradGuard no_grad;
  for (const auto& shard : shards) {
    if (shard.tensor.grad().defined()) at::Tensor(shard.tensor).sub_(shard.tensor.grad(), lr);
  }
}

/// One step of this rank: `passes` micro-batches of its part.
inline void run_step(Net& net, ShardedDataParallel& zero, const Batch& mine, int passes = 1) {
  zero.begin_step();
  for (int i = 0; i < passes; ++i) {
    const MicroBatchPosition position{.index = i, .last = i + 1 == passes};
    zero.before_micro_batch(position);
    backward(net, part_of(mine, passes, i));
    zero.after_micro_batch(position);
  }
  zero.finish();
}

inline ShardGroups groups_of(World& world, int replicas) {
  if (replicas == 1) return {.shard = world.group()};
  const Mesh mesh(world, {{"dp_replicate", replicas}, {"dp_shard", world.size() / replicas}});
  return {.shard = mesh["dp_shard"], .replicate = mesh["dp_replicate"]};
}

inline std::vector<at::Tensor> in_order_of(const Net& net, std::map<std::string, at::Tensor> named) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : net.named_parameters()) tensors.push_back(named.at(item.key()));
  return tensors;
}

/// Trains Net, and holds the gradients of each step against one process on the whole batch. `spoil` may plant a bug.
inline double trained_difference(int ranks, int replicas, const Way& way, int passes, const std::function<void(int rank, ShardedDataParallel&)>& spoil = {}) {
  const auto expected = one_process(steps);
  std::vector<SliceCollector> gradients(steps);
  std::vector<std::vector<at::Tensor>> weights(ranks);
  run_ranks(ranks, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, replicas), options_of(way));
    for (int step = 0; step < steps; ++step) {
      run_step(net, zero, part_of(whole_batch(samples, step), ranks, world.rank()), passes);
      if (spoil) spoil(world.rank(), zero);
      gradients[step].add_gradients(zero.shards());
      update(zero.shards());
      zero.after_update();
    }
    for (const at::Tensor& parameter : net.parameters()) weights[world.rank()].push_back(parameter.detach().clone());
  });
  for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank;
  double largest = 0;
  for (int step = 0; step < steps; ++step) largest = std::max(largest, largest_difference(in_order_of(Net(), gradients[step].whole()), expected[step]));
  return largest;
}

/// What each rank sent in the last of two steps.
inline std::vector<CollectiveEvent> records_of_a_step(int ranks, int replicas, const Way& way, int passes, ShardLayout& layout) {
  std::vector<std::shared_ptr<comm::Recorder>> recorders;
  for (int rank = 0; rank < ranks; ++rank) recorders.push_back(std::make_shared<comm::Recorder>());
  std::vector<CollectiveEvent> records;
  run_ranks(ranks, [&](World& world) {
    const auto recorded = [&](const comm::Group& group) {
      if (group.size() == 1) return group;
      const comm::GroupInfo info{.name = group.name(), .rank = group.rank(), .size = group.size(), .ranks = {}};
      return comm::Group(info, comm::make_record_engine(recorders[world.rank()], info, group.engine()));
    };
    ShardGroups groups = groups_of(world, replicas);
    groups = {.shard = recorded(groups.shard), .replicate = recorded(groups.replicate)};
    Net net;
    ShardedDataParallel zero(net, groups, options_of(way));
    for (int step = 0; step < 2; ++step) {
      recorders[world.rank()]->clear();
      run_step(net, zero, whole_batch(samples), passes);
      update(zero.shards());
      zero.after_update();
    }
    if (world.rank() != 0) return;
    records = recorders[0]->records();
    layout = zero.layout();
  });
  return records;
}

}  // namespace tessera::testing_support
