// The loop of a libtorch program, unchanged, over sharded modules: equal to one process.

#include <gmock/gmock.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "memory_file.h"
#include "support.h"
#include "tessera/comm/collectives.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

using Loop = std::function<void(DeepNet& net, torch::optim::Optimizer& optimizer, const std::function<Batch(int step)>& batch, FullyShardedDataParallel*)>;

/// Runs `loop` in one process, and over ranks: weights have to agree.
void expect_same_weights(int ranks, FullyShardOptions options, const Loop& loop, double bound = 10 * parity) {
  DeepNet whole;
  auto optimizer = momentum(*whole);
  loop(whole, optimizer, [](int step) { return whole_batch(samples, step); }, nullptr);
  const Gradients expected = named_values(*whole);
  run_ranks(ranks, [&](World& world) {
    DeepNet net;
    FullyShardOptions mine = options;
    if (mine.offload == Offload::Disk) mine.file = std::make_shared<MemoryFile>();
    auto sharded = fully_shard(net, world.group(), mine);
    auto own = momentum(*net);
    loop(net, own, [&](int step) { return part_of(whole_batch(samples, step), ranks, world.rank()); }, sharded.get());
    EXPECT_LT(slice_difference(*net, expected, /*values=*/true), bound);
  });
}

class PlainLoop : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(FullyShard, PlainLoop, ::testing::Values(1, 2, 3));

TEST_P(PlainLoop, ZeroGradForwardBackwardStep) {
  for (const auto trigger : kBoth) {
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const Batch mine = batch(step);
        loss_of(net(mine.x), mine.y, samples).backward();
        optimizer.step();
      }
    });
  }
}

/// What waits between forward and backward is the parameters' values of then: whoever writes them meanwhile, or reads all of them, leaves nothing stale.
TEST_P(PlainLoop, WhatWaitsForBackwardIsNeverStale) {
  using Between = std::function<void(DeepNet&, torch::optim::SGD&)>;
  const std::vector<Between> betweens{
      [](DeepNet&, auto&) {},
      [](DeepNet&, auto& optimizer) { optimizer.step(); },
      [](DeepNet& net, auto&) {
        for (const at::Tensor& parameter : net->parameters()) parameter.data().mul_(1.5);
      },
      [](DeepNet& net, auto&) {
        const at::NoGradGuard no_grad;
        net(whole_batch(samples).x);
      },
      [](DeepNet& net, auto&) { net(whole_batch(samples).x); },
  };
  for (const Between& between : betweens) {
    const auto trained = [&](bool reshard, bool find_unused = false) {
      std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(GetParam()));
      run_ranks(GetParam(), [&](World& world) {
        DeepNet net;
        auto sharded = fully_shard(net, world.group(),
                                   {.wrap = "block*", .reshard_after_forward = reshard, .find_unused_parameters = find_unused, .trigger = ShardTrigger::Calls});
        auto optimizer = momentum(*net);
        for (int step = 0; step < 3; ++step) {
          const Batch mine = part_of(whole_batch(samples, step), world.size(), world.rank());
          const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
          between(net, optimizer);
          optimizer.zero_grad();
          loss.backward();
          optimizer.step();
        }
        for (const at::Tensor& parameter : net->parameters()) values[static_cast<size_t>(world.rank())].push_back(parameter.detach().clone());
      });
      return values;
    };
    const auto gathered_again = trained(true);
    for (const auto& waited : {trained(false), trained(true, /*find_unused=*/true)}) {
      for (size_t rank = 0; rank < waited.size(); ++rank) EXPECT_TRUE(same_bits(waited[rank], gathered_again[rank])) << &between - betweens.data();
    }
  }
}

/// A direction is of all parameters: on slices each rank would go in its own.
TEST(FullyShardLoop, LbfgsIsRefused) {
  run_ranks(2, [](World& world) {
    for (const auto trigger : kBoth) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      torch::optim::LBFGS optimizer(net->parameters(), torch::optim::LBFGSOptions(0.1));
      const auto closure = [&] {
        optimizer.zero_grad();
        const Batch mine = part_of(whole_batch(samples), 2, world.rank());
        const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
        loss.backward();
        return loss;
      };
      EXPECT_THAT(refusal([&] { optimizer.step(closure); }), HasSubstr("torch::optim::LBFGS")) << static_cast<int>(trigger);
    }
  });
}

TEST_P(PlainLoop, ZeroGradMayStandBetweenForwardAndBackward) {
  for (const auto trigger : kBoth) {
    for (const bool to_none : {true, false}) {
      expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [&](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
        for (int step = 0; step < 3; ++step) {
          const Batch mine = batch(step);
          const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
          optimizer.zero_grad(to_none);
          loss.backward();
          optimizer.step();
        }
      });
    }
  }
}

TEST_P(PlainLoop, ASecondBackwardAdds) {
  for (const auto trigger : kBoth) {
    for (const bool held : {true, false}) {
      for (const bool each : {true, false}) {
        const auto loop = [&](DeepNet& net, auto& optimizer, const auto& batch, FullyShardedDataParallel* sharded) {
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            for (int pass = 0; pass < 3; ++pass) {
              const Attachment hold = held && sharded && pass < 2 ? sharded->no_sync() : Attachment();
              const Batch mine = batch(3 * step + pass);
              loss_of(net(mine.x), mine.y, samples).backward();
            }
            optimizer.step();
          }
        };
        expect_same_weights(GetParam(), {.wrap = "block*", .reduce_each_micro_batch = each, .trigger = trigger}, loop);
      }
    }
  }
}

/// What a pass adds to lies in the file, where the next reduction would be kept.
TEST_P(PlainLoop, SlicesOnDiskAddUp) {
  for (const auto trigger : kBoth) {
    for (const bool held : {true, false}) {
      for (const bool each : {true, false}) {
        for (const bool to_none : {true, false}) {
          const auto loop = [&](DeepNet& net, auto& optimizer, const auto& batch, FullyShardedDataParallel* sharded) {
            for (int step = 0; step < 3; ++step) {
              optimizer.zero_grad(to_none);
              for (int pass = 0; pass < 3; ++pass) {
                const Attachment hold = held && sharded && pass < 2 ? sharded->no_sync() : Attachment();
                const Batch mine = batch(3 * step + pass);
                loss_of(net(mine.x), mine.y, samples).backward();
              }
              optimizer.step();
            }
          };
          SCOPED_TRACE(::testing::Message() << "held " << held << ", each " << each << ", to none " << to_none);
          expect_same_weights(GetParam(), {.wrap = "block*", .reduce_each_micro_batch = each, .trigger = trigger, .offload = Offload::Disk}, loop);
        }
      }
    }
  }
}

/// A gradient penalty does not reach the last bias, which the passes before it have.
TEST_P(PlainLoop, APassThatAddsMayLeaveOutWhatAnEarlierOneUsed) {
  for (const auto trigger : kBoth) {
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [&](DeepNet& net, auto& optimizer, const auto& batch, auto* sharded) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        for (int pass = 0; pass < 2; ++pass) {
          net->skipped = pass == 1 ? &net->blocks[1] : nullptr;
          const Batch mine = batch(2 * step + pass);
          loss_of(net(mine.x), mine.y, samples).backward();
        }
        optimizer.step();
      }
      if (sharded == nullptr || sharded->group().size() == 1) return;
      optimizer.zero_grad();  // what was cleared was used by nobody
      const Batch mine = batch(0);
      EXPECT_THAT(refusal([&] { loss_of(net(mine.x), mine.y, samples).backward(); }),
                  ::testing::AllOf(HasSubstr("fully_shard: on rank "), HasSubstr("got no gradient in this step: 'block1.")));
    });
  }
}

/// Where operators tell, a unit is reduced when its gradients are there, and one whose gradients do not come is the last: in another order on each rank, and
/// with units of one size nobody else would notice.
TEST_P(PlainLoop, APassThatAddsLeavesOutTheSameOnEveryRank) {
  if (GetParam() == 1) return;
  run_ranks(GetParam(), [&](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
    fill_parameters(*net);
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const at::Tensor x = random_tensor({2, 6}, "x");
    const auto pass = [&](bool all) {
      const at::Tensor first = net->ptr<torch::nn::LinearImpl>(0)->forward(x);
      const at::Tensor last = net->ptr<torch::nn::LinearImpl>(2)->forward(net->ptr<torch::nn::LinearImpl>(1)->forward(first));
      (all ? last : first).sum().backward();
    };
    pass(true);
    pass(true);
    EXPECT_THAT(refusal([&] { pass(world.rank() == 0); }), HasSubstr("A pass that adds to gradients leaves out the same ones on every rank"));
  });
}

/// Also where a pass under no_sync has left it zeros, which the last pass adds to: an optimizer would decay it.
TEST_P(PlainLoop, WhatNoPassOfAStepUsesIsRefused) {
  if (GetParam() == 1) return;  // what one rank alone leaves out has no gradient, as without a wrapper
  for (const auto trigger : kBoth) {
    for (const bool each : {true, false}) {
      for (const int skips : {0, 1, 2}) {  // neither, the second, both
        run_ranks(GetParam(), [&](World& world) {
          DeepNet net;
          auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = each, .trigger = trigger});
          auto optimizer = momentum(*net);
          const auto step = [&] {
            optimizer.zero_grad();
            for (int pass = 0; pass < 2; ++pass) {
              const Attachment hold = pass == 0 ? sharded->no_sync() : Attachment();
              net->skipped = skips + pass >= 2 ? &net->blocks[1] : nullptr;
              const Batch mine = part_of(whole_batch(samples), world.size(), world.rank());
              loss_of(net(mine.x), mine.y, samples).backward();
            }
            optimizer.step();
          };
          if (skips == 2) {
            EXPECT_THAT(refusal(step), HasSubstr("got no gradient in this step: 'block1."));
          } else {
            step();
            step();
          }
        });
      }
    }
  }
}

/// Nobody waits for them, and an optimizer would decay what has a gradient of zeros. Types and places that one rank has by itself change nothing of that.
TEST(FullyShardLoop, OneRankMissesNoGradient) {
  for (const bool driven : {false, true}) {
    for (const auto trigger : kBoth) {
      for (const auto& options : {FullyShardOptions{.wrap = "block*", .trigger = trigger, .offload = Offload::Host},
                                  FullyShardOptions{.wrap = "block*", .param_dtype = at::kDouble, .trigger = trigger}}) {
        run_ranks(1, [&](World& world) {
          DeepNet net;
          net->skipped = &net->blocks[1];
          const auto sharded = fully_shard(net, world.group(), options);
          ASSERT_FALSE(sharded->units().empty()) << "it does what several ranks do";
          const Batch batch = whole_batch(samples);
          if (driven) sharded->begin_step();
          EXPECT_NO_THROW(backward_of(net, {batch.x.to(options.param_dtype.value_or(at::kFloat)), batch.y}));
          if (driven) EXPECT_NO_THROW(sharded->finish());
          for (const auto& [name, tensor, aliases] : nn::unique_parameters(*net)) {
            EXPECT_EQ(tensor.grad().defined(), tensor.requires_grad() && !name.starts_with("block1.")) << name;
          }
        });
      }
    }
  }
}

TEST_P(PlainLoop, WhatWasHeldIsClearedByZeroGrad) {
  for (const auto trigger : kBoth) {
    for (const bool to_none : {true, false}) {
      for (const bool each : {true, false}) {
        const auto loop = [&](DeepNet& net, auto& optimizer, const auto& batch, FullyShardedDataParallel* sharded) {
          const auto pass = [&](int index) {
            const Batch mine = batch(index);
            loss_of(net(mine.x), mine.y, samples).backward();
          };
          for (int step = 0; step < 2; ++step) {
            {
              const Attachment hold = sharded ? sharded->no_sync() : Attachment();
              pass(7);  // the rest of an epoch, which is given up
            }
            optimizer.zero_grad(to_none);
            {
              const Attachment hold = sharded ? sharded->no_sync() : Attachment();
              pass(step);
            }
            pass(step + 2);
            optimizer.step();
          }
        };
        expect_same_weights(GetParam(), {.wrap = "block*", .reduce_each_micro_batch = each, .trigger = trigger}, loop);
      }
    }
  }
}

TEST_P(PlainLoop, WhatWasClearedWasUsedByNobody) {
  const auto clear_what_used_all = [](DeepNet& net, auto& optimizer, const auto& batch, FullyShardedDataParallel* sharded, bool to_none) {
    net->skipped = nullptr;
    {
      const Attachment hold = sharded ? sharded->no_sync() : Attachment();
      const Batch mine = batch(7);
      loss_of(net(mine.x), mine.y, samples).backward();
    }
    optimizer.zero_grad(to_none);
    net->skipped = &net->blocks[1];
  };
  for (const auto trigger : kBoth) {
    for (const bool each : {true, false}) {
      for (const bool to_none : {true, false}) {
        const auto loop = [&](DeepNet& net, auto& optimizer, const auto& batch, FullyShardedDataParallel* sharded) {
          for (int step = 0; step < 2; ++step) {
            clear_what_used_all(net, optimizer, batch, sharded, to_none);
            const Batch mine = batch(step);
            loss_of(net(mine.x), mine.y, samples).backward();
            optimizer.step();  // with weight decay, which moves what has a gradient of zeros
          }
        };
        const FullyShardOptions options{.wrap = "block*", .reduce_each_micro_batch = each, .find_unused_parameters = true, .trigger = trigger};
        expect_same_weights(GetParam(), options, loop);
      }
      if (GetParam() == 1) continue;
      run_ranks(GetParam(), [&](World& world) {
        DeepNet net;
        const auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = each, .trigger = trigger});
        auto optimizer = momentum(*net);
        const auto batch = [&](int step) { return part_of(whole_batch(samples, step), GetParam(), world.rank()); };
        clear_what_used_all(net, optimizer, batch, sharded.get(), /*to_none=*/true);
        EXPECT_THAT(refusal([&] { backward_of(net, batch(0)); }), HasSubstr("got no gradient in this step: 'block1."));
      });
    }
  }
}

TEST_P(PlainLoop, AGraphThatIsKeptIsPassedTwice) {
  for (const auto trigger : kBoth) {
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Batch mine = batch(step);
        const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
        loss.backward({}, /*keep_graph=*/true);
        loss.backward();
        optimizer.step();
      }
    });
  }
}

TEST_P(PlainLoop, TwoForwardsBeforeTheirBackwards) {
  for (const auto trigger : kBoth) {
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Batch one = batch(2 * step), two = batch(2 * step + 1);
        const at::Tensor first = loss_of(net(one.x), one.y, samples), second = loss_of(net(two.x), two.y, samples);
        first.backward();
        const at::Tensor looked = net(one.x);  // and one that no backward follows
        second.backward();
        optimizer.step();
      }
    });
  }
}

TEST_P(PlainLoop, AForwardThatNoBackwardFollowsLeavesSlices) {
  for (const auto trigger : kBoth) {
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Batch mine = batch(step);
        loss_of(net(mine.x), mine.y, samples).backward();
        const at::Tensor looked = net(mine.x);
        optimizer.step();
      }
    });
  }
}

TEST_P(PlainLoop, EvaluationBetweenAndWithinSteps) {
  for (const auto trigger : kBoth) {
    for (const bool evaluating : {true, false}) {
      std::vector<at::Tensor> seen;
      const Batch all = whole_batch(samples, 50);
      expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, [&](DeepNet& net, auto& optimizer, const auto& batch, auto* sharded) {
        size_t at = 0;
        const auto look = [&] {
          const at::NoGradGuard no_grad;
          if (evaluating) net->eval();
          const at::Tensor out = net(all.x);
          net->train();
          if (sharded == nullptr) {
            seen.push_back(out);
          } else {
            const at::Tensor& want = seen.at(at++);
            EXPECT_LT((out - want).abs().max().item<double>(), 10 * parity * want.abs().max().item<double>());
          }
        };
        look();
        for (int step = 0; step < 3; ++step) {
          const Batch mine = batch(step);
          const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
          look();
          optimizer.zero_grad();
          loss.backward();
          look();
          optimizer.step();
          look();
          look();
        }
      });
    }
  }
}

TEST_P(PlainLoop, FreezingAndUnfreezing) {
  for (const auto trigger : kBoth) {
    const auto loop = [&](DeepNet& net, auto& optimizer, const auto& batch, auto*) {
      const auto train = [&](int from) {
        for (int step = from; step < from + 2; ++step) {
          optimizer.zero_grad();
          const Batch mine = batch(step);
          loss_of(net(mine.x), mine.y, samples).backward();
          optimizer.step();
        }
      };
      const auto freeze = [&](torch::nn::Module& module, bool frozen) {
        for (const at::Tensor& parameter : module.parameters()) parameter.set_requires_grad(!frozen);
      };
      train(0);
      freeze(*net->first, true);
      freeze(*net->blocks[0], true);
      train(2);
      freeze(*net, true);
      net->last->weight.set_requires_grad(true);
      train(4);
      freeze(*net, false);  // the shift as well, which was frozen when it was wrapped
      train(6);
      freeze(*net->blocks[2], true);  // and so it goes
    };
    expect_same_weights(GetParam(), {.wrap = "block*", .trigger = trigger}, loop);
  }
}

TEST_P(PlainLoop, AModelOnTheStackAndItsForward) {
  const auto expected = one_process(3);
  run_ranks(GetParam(), [&](World& world) {
    Net net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "middle"});
    torch::optim::SGD optimizer(net.parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      backward(net, part_of(whole_batch(samples, step), GetParam(), world.rank()));
      Gradients whole;
      for (size_t i = 0; const auto& item : net.named_parameters()) whole[item.key()] = expected[step][i++];
      EXPECT_LT(slice_difference(net, whole), 10 * parity);
      optimizer.step();
    }
  });
}

}  // namespace
}  // namespace tessera
