// What every GradientSynchronizer does alike (tessera/nn/gradient_synchronizer.h), each technique held to it by the same tests.
#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/meta.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/nn/collect.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

using namespace testing_support;
using comm::World;
using ::testing::HasSubstr;

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

std::unique_ptr<GradientSynchronizer> wrap_ddp(torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) {
  return std::make_unique<DistributedDataParallel>(module, groups.shard,
                                                   DdpOptions{.sizes = small_buckets, .average = wanted.average, .find_unused_parameters = wanted.find_unused});
}

std::unique_ptr<GradientSynchronizer> wrap_tree(torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) {
  const int64_t count = wanted.micro_batches > 0 ? wanted.micro_batches : wanted.passes * groups.shard.size();
  return std::make_unique<TreeReduction>(module, groups.shard, TreeReductionOptions{.num_micro_batches = count, .find_unused_parameters = wanted.find_unused});
}

auto wrap_zero(int stage, Accumulation accumulation = Accumulation::Sharded) {
  return [=](torch::nn::Module& module, const ShardGroups& groups, const Wanted& wanted) -> std::unique_ptr<GradientSynchronizer> {
    return std::make_unique<ShardedDataParallel>(
        module, groups,
        ZeroOptions{
            .stage = stage, .sizes = small_buckets, .accumulation = accumulation, .average = wanted.average, .find_unused_parameters = wanted.find_unused});
  };
}

auto wrap_fully(bool each) {
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

Gradients gradients_by_name(const torch::nn::Module& module) {
  Gradients gradients;
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) gradients.emplace(item.key(), item.value().grad().clone());
  }
  return gradients;
}

std::vector<std::string> names_of(const Gradients& gradients) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : gradients) names.push_back(name);
  return names;
}

/// Relative to the largest entry of each tensor; infinite where others have one.
double difference_of(const Gradients& got, const Gradients& want) {
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

const std::vector<Accumulate> accumulations{
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

INSTANTIATE_TEST_SUITE_P(, SynchronizerContract,
                         ::testing::Values(Technique{.name = "Ddp", .wrap = wrap_ddp},                                                         //
                                           Technique{.name = "Tree", .wrap = wrap_tree, .averages = false},                                    //
                                           Technique{.name = "Zero1", .wrap = wrap_zero(1), .shards = true},                                   //
                                           Technique{.name = "Zero2", .wrap = wrap_zero(2), .shards = true},                                   //
                                           Technique{.name = "Zero2Whole", .wrap = wrap_zero(2, Accumulation::Whole), .shards = true},         //
                                           Technique{.name = "Zero1Hybrid", .wrap = wrap_zero(1), .replicas = 2, .shards = true},              //
                                           Technique{.name = "Zero2Hybrid", .wrap = wrap_zero(2), .replicas = 2, .shards = true},              //
                                           Technique{.name = "FullyShard", .wrap = wrap_fully(true), .shards = true, .restarts = true},        //
                                           Technique{.name = "FullyShardWhole", .wrap = wrap_fully(false), .shards = true, .restarts = true},  //
                                           Technique{.name = "FullyShardHybrid", .wrap = wrap_fully(true), .replicas = 2, .shards = true, .restarts = true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(SynchronizerContract, GradientsAreThoseOfOneProcessAndWeightsTheSameBits) {
  constexpr int steps = 3;
  const auto expected = one_process(steps);
  const std::vector<std::string> names = Net().named_parameters().keys();
  for (size_t way = 0; way < accumulations.size(); ++way) {
    for (size_t size = 0; size < sizes().size(); ++size) {
      const int ranks = sizes()[size], passes = (way + size) % 2 == 0 ? 3 : 1;  // each way and each size meets both
      SCOPED_TRACE(std::string(accumulations[way].name) + ", " + std::to_string(passes) + " passes");
      std::vector<SliceCollector> gradients(steps);
      std::vector<std::vector<at::Tensor>> weights(ranks);
      on_ranks(ranks, {.passes = passes}, [&](Rank& rank) {
        for (int step = 0; step < steps; ++step) {
          accumulations[way].run(rank, rank.mine(step), passes);
          gradients[step].add_gradients(rank.sync->updated());
          rank.update();
        }
        if (GetParam().name.starts_with("Fully")) unshard(rank.net);
        for (const at::Tensor& parameter : rank.net.parameters()) weights[rank.world.rank()].push_back(parameter.detach().clone());
      });
      for (int step = 0; step < steps; ++step) {
        Gradients want;
        for (size_t i = 0; i < names.size(); ++i) want.emplace(names[i], expected[step][i]);
        EXPECT_LT(difference_of(gradients[step].whole(), want), parity) << "step " << step;
      }
      for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank;
    }
  }
}

TEST_P(SynchronizerContract, ParitySeesPlantedBugs) {
  const int ranks = replicas() > 1 ? 4 : 3;
  Net reference;
  backward(reference, whole_batch(samples));
  const auto difference = [&](const std::function<void(Rank&)>& step) {
    SliceCollector gradients;
    on_ranks(ranks, {}, [&](Rank& rank) {
      step(rank);
      gradients.add_gradients(rank.sync->updated());
    });
    return difference_of(gradients.whole(), gradients_by_name(reference));
  };
  const auto scaled = [](Rank& rank, double scale) {
    const Batch mine = rank.mine(0);
    (loss_of(rank.net.forward(mine.x), mine.y, samples) * (rank.world.rank() == 1 ? scale : 1.0)).backward();
  };
  EXPECT_LT(difference([&](Rank& rank) { scaled(rank, 1); }), parity);
  EXPECT_GT(difference([&](Rank& rank) { scaled(rank, 0); }), 100 * parity) << "a rank that is dropped";
  EXPECT_GT(difference([&](Rank& rank) {
              scaled(rank, 1);
              const comm::Group parts = rank.sync->norm_group();
              if (parts.rank() + 1 != parts.size()) return;
              for (const auto& parameter : rank.sync->updated()) parameter.tensor.grad().mul_(0.5);
            }),
            100 * parity)
      << "what a rank holds comes back at half its scale";
}

TEST_P(SynchronizerContract, AverageDividesByTheRanks) {
  if (!GetParam().averages) GTEST_SKIP() << "sums, and leaves the loss's scale to the program";
  for (const int ranks : sizes()) {
    Net reference;
    for (int pass = 0; pass < 3; ++pass) backward(reference, whole_batch(samples, pass));
    for (const bool plain : {true, false}) {
      SliceCollector gradients;
      on_ranks(ranks, {.average = true}, [&](Rank& rank) {
        if (plain) {
          for (int pass = 0; pass < 3; ++pass) rank.backward(whole_batch(samples, pass));  // averages add up
        } else {
          rank.sync->begin_step();
          for (int pass = 0; pass < 3; ++pass) {
            rank.sync->before_micro_batch({.index = pass, .last = pass == 2});
            rank.backward(whole_batch(samples, pass));
            rank.sync->after_micro_batch({});
          }
          rank.sync->finish();
        }
        gradients.add_gradients(rank.sync->updated());
      });
      EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity);
    }
  }
}

TEST_P(SynchronizerContract, ASecondBackwardAdds) {
  expect_gradients_of_one_process(
      [](Net& net, GradientSynchronizer* sync, const auto& mine) {
        for (int step = 0; step < 2; ++step) {
          clear(net, sync);
          for (int pass = 0; pass < 3; ++pass) backward(net, mine(3 * step + pass));
        }
      },
      {}, sizes());
  expect_gradients_of_one_process(  // on top of what no_sync() has held
      [](Net& net, GradientSynchronizer* sync, const auto& mine) {
        for (int step = 0; step < 2; ++step) {
          Attachment local = sync != nullptr ? sync->no_sync() : Attachment();
          backward(net, mine(2 * step));
          local.detach();
          backward(net, mine(2 * step + 1));
        }
      },
      {.passes = 2}, sizes());
}

TEST_P(SynchronizerContract, ClearingWithinAnAccumulationClearsIt) {
  expect_gradients_of_one_process(
      [](Net& net, GradientSynchronizer* sync, const auto& mine) {
        for (const bool again : {true, false}) {
          Attachment local = sync != nullptr ? sync->no_sync() : Attachment();
          backward(net, mine(0));
          if (again) {
            clear(net, sync);
            backward(net, mine(1));
          }
          local.detach();
          backward(net, mine(2));
        }
      },
      {.passes = 2}, sizes());
}

TEST_P(SynchronizerContract, UnusedParametersAreRefusedByName) {
  const auto without_last = [](Rank& rank) { return rank.net.middle(at::tanh(rank.net.first(rank.mine(0).x))).mul(rank.net.scale).sum(); };
  for (const int ranks : sizes(/*several=*/true)) {
    SliceCollector after;
    on_ranks(ranks, {}, [&](Rank& rank) {
      const bool uses_all = rank.world.rank() != 1;
      // In the plain loop on all ranks, whoever it was: none goes on alone.
      std::string text = refusal([&] { uses_all ? rank.backward(rank.mine(0)) : without_last(rank).backward(); });
      EXPECT_THAT(text, HasSubstr("2 of 7 parameters got no gradient in this step: 'last.weight'"));
      EXPECT_THAT(text, HasSubstr("on rank 1 of "));
      EXPECT_THAT(text, HasSubstr("find_unused_parameters"));
      rank.sync->clear_gradients();
      // By explicit calls where it was, and nobody waits for it.
      rank.sync->begin_step();
      rank.sync->before_micro_batch(rank.position(0, 1));
      without_last(rank).backward();
      rank.sync->after_micro_batch(rank.position(0, 1));
      text = refusal([&] { rank.sync->finish(); });
      EXPECT_THAT(text, HasSubstr("2 of 7 parameters got no gradient in this step: 'last.weight'"));
      rank.sync->clear_gradients();
      rank.backward(rank.mine(0));
      after.add_gradients(rank.sync->updated());
    });
    Net reference;
    backward(reference, whole_batch(samples));
    EXPECT_LT(difference_of(after.whole(), gradients_by_name(reference)), parity);
  }
}

TEST_P(SynchronizerContract, FindUnusedParameters) {
  const auto loss = [](Net& net, bool whole) {
    const at::Tensor hidden = net.middle(net.first(whole_batch(samples).x)) * net.scale;
    return whole ? net.last(hidden).sum() : hidden.sum();
  };
  for (const int ranks : sizes(/*several=*/true)) {
    for (const int users : {0, 1}) {  // of the last layer: nobody, or one rank
      for (const bool plain : {true, false}) {
        Net reference;
        SliceCollector gradients;
        for (int rank = 0; rank < ranks; ++rank) {
          loss(reference, rank < users).backward();
          if (plain) loss(reference, false).backward();
        }
        on_ranks(ranks, {.find_unused = true}, [&](Rank& rank) {
          for (int step = 0; step < 3; ++step) {
            const bool uses = step > 0 && rank.world.rank() < users;
            if (plain) {
              rank.sync->clear_gradients();
              loss(rank.net, uses).backward();
              continue;
            }
            rank.sync->begin_step();
            rank.sync->before_micro_batch(rank.position(0, 1));
            loss(rank.net, uses).backward();
            rank.sync->after_micro_batch(rank.position(0, 1));
            rank.sync->finish();
          }
          if (plain) loss(rank.net, false).backward();  // on top
          gradients.add_gradients(rank.sync->updated());
        });
        EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity) << users << " users";
      }
    }
  }
}

TEST_P(SynchronizerContract, APassThatEndsByAnExceptionLeavesWhatWasThereBefore) {
  const auto fail = [](Net& net) {
    at::Tensor hidden = net.first(whole_batch(samples).x);
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
    EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
  };
  for (const bool cleared : {true, false}) {
    expect_gradients_of_one_process(
        [&](Net& net, GradientSynchronizer* sync, const auto& mine) {
          if (sync != nullptr) fail(net);
          for (int step = 0; step < 2; ++step) {
            backward(net, mine(2 * step));
            if (sync != nullptr) fail(net);
            if (cleared) clear(net, sync);
            backward(net, mine(2 * step + 1));
          }
        },
        {}, sizes(/*several=*/true));
  }
  for (const int ranks : sizes(/*several=*/true)) {  // by explicit calls the next step finds it out
    SliceCollector gradients;
    on_ranks(ranks, {}, [&](Rank& rank) {
      rank.sync->begin_step();
      rank.sync->before_micro_batch(rank.position(0, 1));
      fail(rank.net);
      accumulations[1].run(rank, rank.mine(0), 1);
      gradients.add_gradients(rank.sync->updated());
    });
    Net reference;
    backward(reference, whole_batch(samples));
    EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity);
  }
}

/// In a forward, in a backward before its first gradient, in weight gradients: begin_step gives the step up, and what it had accumulated.
TEST_P(SynchronizerContract, AnActionThatIsBrokenOffGivesItsStepUp) {
  Net reference;
  backward(reference, whole_batch(samples));
  for (const ActionKind action : {ActionKind::Forward, ActionKind::Backward, ActionKind::Weights}) {
    for (const int ranks : sizes(/*several=*/true)) {
      SliceCollector gradients;
      on_ranks(ranks, {.passes = 2}, [&](Rank& rank) {
        rank.sync->begin_step();
        const bool left = action == ActionKind::Weights;
        for (int pass = 0; pass < (left ? 2 : 1); ++pass) {
          MicroBatchPosition position = rank.position(pass, 2);
          position.weights_later = left;
          rank.sync->before_micro_batch(position);
          rank.backward(rank.mine(pass + 1));
          rank.sync->after_micro_batch(position);
        }
        if (action == ActionKind::Backward) {
          rank.sync->before(ActionKind::Forward, rank.position(1, 2));
          rank.sync->after(ActionKind::Forward, rank.position(1, 2));
        }
        rank.sync->before(action, rank.position(left ? 0 : 1, 2));  // an exception comes
        accumulations[1].run(rank, rank.mine(0), 2);
        gradients.add_gradients(rank.sync->updated());
      });
      EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity) << "action " << static_cast<int>(action) << ", " << ranks << " ranks";
    }
  }
}

TEST_P(SynchronizerContract, AGradientWithAHistoryIsRefusedByName) {
  for (const int ranks : sizes(/*several=*/true)) {
    on_ranks(ranks, {}, [&](Rank& rank) {
      const Batch mine = rank.mine(0);
      const at::Tensor loss = loss_of(rank.net.forward(mine.x), mine.y, samples);
      const std::string text = refusal([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
      EXPECT_THAT(text, HasSubstr("got a gradient that has a history (backward with create_graph)"));
      EXPECT_THAT(text, HasSubstr("torch::autograd::grad("));
    });
  }
}

TEST_P(SynchronizerContract, FreezingBetweenSteps) {
  for (const bool plain : {true, false}) {
    expect_gradients_of_one_process(
        [&](Net& net, GradientSynchronizer* sync, const auto& mine) {
          const std::vector<std::pair<bool, bool>> stages{{true, true}, {false, true}, {true, true}, {true, false}, {false, true}};
          for (size_t stage = 0; stage < stages.size(); ++stage) {
            for (const at::Tensor& parameter : net.first->parameters()) parameter.set_requires_grad(stages[stage].first);
            for (const at::Tensor& parameter : net.last->parameters()) parameter.set_requires_grad(stages[stage].second);
            for (int step = 0; step < 2; ++step) {
              clear(net, sync);
              if (sync != nullptr && !plain) sync->begin_step();
              backward(net, mine(static_cast<int64_t>(2 * stage) + step));
              if (sync != nullptr && !plain) sync->finish();
            }
          }
        },
        {}, sizes());
  }
}

/// The last rank has a micro-batch less than the others, and one of weight 0 in its place.
TEST_P(SynchronizerContract, UnevenBatches) {
  const Batch whole = whole_batch(samples);
  Net reference;
  backward(reference, whole);
  for (const int ranks : sizes(/*several=*/true)) {
    const int count = 2 * ranks - 1;
    SliceCollector gradients;
    on_ranks(ranks, {.micro_batches = count}, [&](Rank& rank) {
      rank.sync->begin_step();
      for (int pass = 0; pass < 2; ++pass) {
        MicroBatchPosition position = rank.position(pass, 2);
        position.padding = position.index >= count;
        const Batch part = part_of(whole, count, static_cast<int>(position.padding ? 0 : position.index));
        rank.sync->before_micro_batch(position);
        (loss_of(rank.net.forward(part.x), part.y, samples) * (position.padding ? 0.0 : 1.0)).backward();
        rank.sync->after_micro_batch(position);
      }
      rank.sync->finish();
      gradients.add_gradients(rank.sync->updated());
    });
    EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity);
  }
}

TEST_P(SynchronizerContract, CallsThatAreMissingOrOutOfOrderAreRefusedByName) {
  for (const int ranks : {replicas(), 2 * replicas()}) {
    on_ranks(ranks, {.passes = 2}, [&](Rank& rank) {
      GradientSynchronizer& sync = *rank.sync;
      const auto first = rank.position(0, 2), last = rank.position(1, 2);
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("finish() was called without begin_step()"));
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(first); }), HasSubstr("before_micro_batch(), or before() of a forward, was called outside a step"));
      EXPECT_THAT(refusal([&] { sync.after_micro_batch(first); }),
                  HasSubstr("after_micro_batch(), or after() of a backward, was called without before_micro_batch()"));
      sync.begin_step();
      if (!GetParam().restarts) {
        EXPECT_THAT(refusal([&] { sync.begin_step(); }), HasSubstr("begin_step() was called again before finish()"));
        sync.begin_step();
      }
      sync.before_micro_batch(first);
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(first); }),
                  HasSubstr("was called before after_micro_batch(), or after() of a backward, of the one before"));
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("finish() was called before after_micro_batch()"));
      rank.backward(rank.mine(0));
      sync.after_micro_batch(first);
      EXPECT_THAT(refusal([&] { sync.after_update(); }), HasSubstr("after_update() was called before finish()"));
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("no call said MicroBatchPosition::last"));
      EXPECT_THAT(refusal([&] { sync.before(ActionKind::Backward, last); }),
                  HasSubstr("before() of a backward was called before the forward of its micro-batch"));
      EXPECT_THAT(refusal([&] { sync.before(ActionKind::Weights, last); }), HasSubstr("for what no backward has left for later"));
      sync.before(ActionKind::Forward, last);
      EXPECT_THAT(refusal([&] { sync.after(ActionKind::Backward, last); }), HasSubstr("was called without before_micro_batch()"));
      const at::Tensor loss = loss_of(rank.net.forward(rank.mine(0).x), rank.mine(0).y, samples);
      sync.after(ActionKind::Forward, last);
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("before the backward of 1 micro-batches whose forward has run"));
      sync.before(ActionKind::Backward, last);
      loss.backward();
      sync.after(ActionKind::Backward, last);
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(last); }), HasSubstr("was called after the step's last micro-batch"));
      sync.finish();
      rank.update();
    });
  }
}

struct Buffered : Net {
  Buffered() { register_buffer("table", at::ones({6})); }
};

TEST_P(SynchronizerContract, ADryRunMakesTheSameCalls) {
  const Wanted wanted{.passes = 2};
  const auto train = [&](Net& net, const ShardGroups& groups, int rank, at::Device device, comm::Recorder& recorder) {
    const auto sync = GetParam().wrap(net, groups, wanted);
    if (device == at::kMeta) materialize(net, 1, device);
    if (GetParam().shards) recorder.clear();  // of a model on meta nothing is made equal when it is wrapped: it has no values yet
    for (int step = 0; step < 2; ++step) {
      const Batch batch = whole_batch(samples);
      sync->begin_step();
      for (int pass = 0; pass < 2; ++pass) {
        const MicroBatchPosition position{.index = 2 * rank + pass, .last = pass == 1};
        sync->before_micro_batch(position);
        backward(net, {batch.x.to(device), batch.y.to(device)});
        sync->after_micro_batch(position);
      }
      sync->finish();
      sync->after_update();
    }
  };
  const int ranks = replicas() > 1 ? 4 : 3;
  std::vector<CollectiveEvent> real;
  comm::run_ranks(ranks, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const auto recorded = [&](const comm::Group& group) {
      if (group.size() == 1) return group;
      comm::GroupInfo info{.name = group.name(), .rank = group.rank(), .size = group.size(), .ranks = {}};
      for (int member = 0; member < group.size(); ++member) info.ranks.push_back(group.world_rank(member));
      return comm::Group(info, comm::make_record_engine(recorder, info, group.engine()));
    };
    const ShardGroups groups = groups_in(world);
    Buffered net;
    train(net, {.shard = recorded(groups.shard), .replicate = recorded(groups.replicate)}, world.rank(), at::kCPU, *recorder);
    if (world.rank() == 1) real = recorder->records();
  });
  const auto recorder = std::make_shared<comm::Recorder>();
  World world = World::dry(ranks, 1, recorder);
  const auto net = on_meta([] { return std::make_shared<Buffered>(); });
  train(*net, groups_in(world), 1, at::kMeta, *recorder);
  const std::vector<CollectiveEvent> planned = recorder->records();
  ASSERT_EQ(planned.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(planned[i].op, real[i].op) << i;
    EXPECT_EQ(planned[i].shape, real[i].shape) << i;
    EXPECT_EQ(planned[i].dtype, real[i].dtype) << i;
    EXPECT_EQ(planned[i].site, real[i].site) << i;
    EXPECT_EQ(planned[i].peer, real[i].peer) << i;
  }
}

}  // namespace
}  // namespace tessera
