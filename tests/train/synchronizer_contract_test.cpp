// Gradients under every technique: those of one process.

#include "tests/train/synchronizer_contract.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using namespace testing_support;
using namespace testing_support::contract;
using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(, SynchronizerContract, ::testing::ValuesIn(techniques_of_the_contract()), [](const auto& info) { return info.param.name; });

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

}  // namespace
}  // namespace tessera
