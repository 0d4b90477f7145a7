#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"

/// What every GradientSynchronizer does alike (tessera/nn/gradient_synchronizer.h), each technique held to it by the same tests.
namespace tessera::testing_support::contract {

using comm::World;

/// What a test asks of a wrapper.
struct Wanted {
  bool average = false;
  bool find_unused = false;
  int passes = 1;             ///< of each rank in a step
  int64_t micro_batches = 0;  ///< of all ranks; 0: `passes` of each
};

struct Technique {
  std::string name;
  std::function<std::unique_ptr<GradientSynchronizer>(torch::nn::Module&, const ShardGroups&, const Wanted&)> wrap;
  int replicas = 1;
  bool averages = true;
  bool shards = false;
  bool restarts = false;  ///< begin_step gives up a step that did not end

  friend void PrintTo(const Technique& technique, std::ostream* out) { *out << technique.name; }
};

inline std::unique_ptr<GradientSynchronizer> wrap_ddp(torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) {
  return std::make_unique<DistributedDataParallel>(module, groups.shard,
                                                   DdpOptions{.sizes = small_buckets, .average = wanted.average, .find_unused_parameters = wanted.find_unused});
}

inline std::unique_ptr<GradientSynchronizer> wrap_tree(torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) {
  const int64_t count = wanted.micro_batches > 0 ? wanted.micro_batches : wanted.passes * groups.shard.size();
  return std::make_unique<TreeReduction>(module, groups.shard, TreeReductionOptions{.num_micro_batches = count, .find_unused_parameters = wanted.find_unused});
}

inline auto wrap_zero(int stage, Accumulation accumulation = Accumulation::Sharded) {
  return [=](torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) -> std::unique_ptr<GradientSynchronizer> {
    return std::make_unique<ShardedDataParallel>(
        module, groups,
        ZeroOptions{
            .stage = stage, .sizes = small_buckets, .accumulation = accumulation, .average = wanted.average, .find_unused_parameters = wanted.find_unused});
  };
}

inline auto wrap_fully(bool each) {
  return [=](torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) -> std::unique_ptr<GradientSynchronizer> {
    return fully_shard(module, groups.shard,
                       {.device = module.parameters().front().device(),
                        .reduce_each_micro_batch = each,
                        .average = wanted.average,
                        .find_unused_parameters = wanted.find_unused,
                        .replicate = groups.replicate});
  };
}

using Gradients = std::map<std::string, at::Tensor>;

inline Gradients gradients_by_name(const torch::nn::Module& module) {
  Gradients gradients;
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) gradients.emplace(item.key(), item.value().grad().clone());
  }
  return gradients;
}

inline std::vector<std::string> names_of(const Gradients& gradients) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : gradients) names.push_back(name);
  return names;
}

/// Relative to the largest entry of each tensor; infinite where others have one.
inline double difference_of(const Gradients& got, const Gradients& want) {
  EXPECT_EQ(names_of(got), names_of(want));
  if (names_of(got) != names_of(want)) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (const auto& [name, tensor] : want) largest = std::max(largest, largest_difference({got.at(name)}, {tensor}));
  return largest;
}

/// A rank with its wrapped model.
struct Rank {
  Rank(World& world, const ShardGroups& groups, const Technique& technique, const Wanted& wanted) : world(world), wanted(wanted) {
    sync = technique.wrap(net, groups, wanted);
  }

  Batch mine(int64_t step) const { return part_of(whole_batch(samples, step), world.size(), world.rank()); }
  void backward(const Batch& batch) { testing_support::backward(net, batch); }
  MicroBatchPosition position(int pass, int passes) const { return {.index = int64_t{passes} * world.rank() + pass, .last = pass + 1 == passes}; }

  void update() const {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : sync->updated()) {
      if (parameter.tensor.grad().defined()) at::Tensor(parameter.tensor).sub_(parameter.tensor.grad(), 0.05);
    }
    sync->after_update();
  }

  World& world;
  Wanted wanted;
  Net net;
  std::unique_ptr<GradientSynchronizer> sync;
};

/// A step of several passes over this rank's part of a batch.
struct Accumulate {
  const char* name;
  std::function<void(Rank&, const Batch& mine, int passes)> run;
};

inline const std::vector<Accumulate> accumulations{
    {"plain loop",
     [](Rank& rank, const Batch& mine, int passes) {
       rank.sync->clear_gradients();
       for (int pass = 0; pass < passes; ++pass) {
         const Attachment local = pass + 1 < passes ? rank.sync->no_sync() : Attachment();
         rank.backward(part_of(mine, passes, pass));
       }
     }},
    {"explicit calls",
     [](Rank& rank, const Batch& mine, int passes) {
       rank.sync->begin_step();
       for (int pass = 0; pass < passes; ++pass) {
         rank.sync->before_micro_batch(rank.position(pass, passes));
         rank.backward(part_of(mine, passes, pass));
         rank.sync->after_micro_batch(rank.position(pass, passes));
       }
       rank.sync->finish();
     }},
    {"an explicit step, held but for its last pass",
     [](Rank& rank, const Batch& mine, int passes) {
       rank.sync->begin_step();
       for (int pass = 0; pass < passes; ++pass) {
         const Attachment local = pass + 1 < passes ? rank.sync->no_sync() : Attachment();
         rank.backward(part_of(mine, passes, pass));
       }
       rank.sync->finish();
     }},
    {"an explicit step, held throughout",
     [](Rank& rank, const Batch& mine, int passes) {
       rank.sync->begin_step();
       {
         const Attachment local = rank.sync->no_sync();
         for (int pass = 0; pass < passes; ++pass) rank.backward(part_of(mine, passes, pass));
       }
       rank.sync->finish();
     }},
    {"forwards ahead",
     [](Rank& rank, const Batch& mine, int passes) {
       rank.sync->begin_step();
       std::vector<at::Tensor> losses;
       for (int pass = 0; pass < passes; ++pass) {
         const Batch part = part_of(mine, passes, pass);
         rank.sync->before(ActionKind::Forward, rank.position(pass, passes));
         losses.push_back(loss_of(rank.net.forward(part.x), part.y, samples));
         rank.sync->after(ActionKind::Forward, rank.position(pass, passes));
       }
       for (int pass = 0; pass < passes; ++pass) {
         rank.sync->before(ActionKind::Backward, rank.position(pass, passes));
         losses[pass].backward();
         rank.sync->after(ActionKind::Backward, rank.position(pass, passes));
       }
       rank.sync->finish();
     }},
};

class SynchronizerContract : public ::testing::TestWithParam<Technique> {
 protected:
  static int replicas() { return GetParam().replicas; }
  /// Of worlds; `several`: in which there is somebody to meet.
  static std::vector<int> sizes(bool several = false) {
    if (replicas() > 1) return {2, 4, 6};
    return several ? std::vector<int>{2, 3} : std::vector<int>{1, 2, 3, 5, 8};
  }

  static ShardGroups groups_in(World& world) {
    if (replicas() == 1) return {.shard = world.group()};
    const Mesh mesh(world, {{"dp_replicate", replicas()}, {"dp_shard", world.size() / replicas()}});
    return {.shard = mesh["dp_shard"], .replicate = mesh["dp_replicate"]};
  }

  static void on_ranks(int ranks, const Wanted& wanted, const std::function<void(Rank&)>& body) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    comm::run_ranks(ranks, [&](World& world) {
      Rank rank(world, groups_in(world), GetParam(), wanted);
      body(rank);
    });
  }

  /// Runs `train` on ranks, and on one process, where it has no synchronizer and the whole of each batch; holds the gradients it leaves against each other.
  using Train = std::function<void(Net&, GradientSynchronizer*, const std::function<Batch(int64_t)>& mine)>;
  static void expect_gradients_of_one_process(const Train& train, const Wanted& wanted, const std::vector<int>& sizes) {
    Net reference;
    train(reference, nullptr, [](int64_t step) { return whole_batch(samples, step); });
    for (const int ranks : sizes) {
      SliceCollector gradients;
      on_ranks(ranks, wanted, [&](Rank& rank) {
        train(rank.net, rank.sync.get(), [&](int64_t step) { return rank.mine(step); });
        gradients.add_gradients(rank.sync->updated());
      });
      EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), 10 * parity) << ranks << " ranks";
    }
  }

  static void clear(Net& net, GradientSynchronizer* sync) { sync != nullptr ? sync->clear_gradients() : net.zero_grad(); }
};

/// All of them.
inline const std::vector<Technique>& techniques_of_the_contract() {
  static const std::vector<Technique> all{Technique{.name = "Ddp", .wrap = wrap_ddp},                                                         //
                                          Technique{.name = "Tree", .wrap = wrap_tree, .averages = false},                                    //
                                          Technique{.name = "Zero1", .wrap = wrap_zero(1), .shards = true},                                   //
                                          Technique{.name = "Zero2", .wrap = wrap_zero(2), .shards = true},                                   //
                                          Technique{.name = "Zero2Whole", .wrap = wrap_zero(2, Accumulation::Whole), .shards = true},         //
                                          Technique{.name = "Zero1Hybrid", .wrap = wrap_zero(1), .replicas = 2, .shards = true},              //
                                          Technique{.name = "Zero2Hybrid", .wrap = wrap_zero(2), .replicas = 2, .shards = true},              //
                                          Technique{.name = "FullyShard", .wrap = wrap_fully(true), .shards = true, .restarts = true},        //
                                          Technique{.name = "FullyShardWhole", .wrap = wrap_fully(false), .shards = true, .restarts = true},  //
                                          Technique{.name = "FullyShardHybrid", .wrap = wrap_fully(true), .replicas = 2, .shards = true, .restarts = true}};
  return all;
}

}  // namespace tessera::testing_support::contract
