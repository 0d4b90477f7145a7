#include <functional>
#include <map>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/collectives.h"
#include "tessera/nn/attach.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/zero/plain_loop.h"
#include "tests/zero/support.h"

/// Gradients that no backward pass has brought, on parameters and on parts, around clears.
namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// zero_grad(set_to_none = false) leaves zeros, with which an optimizer goes on (momentum, weight decay), also where the next loss leaves the parameter out.
TEST(ZeroPlainLoop, ZerosAreAGradientOfWhatNobodyUses) {
  enum class Cleared { Before, WithinAccumulation, BeforeAFailure };
  const auto run = [](Net& net, Cleared cleared, const std::function<Batch(int64_t)>& mine, const std::function<Attachment()>& no_sync,
                      const std::function<void()>& step) {
    const auto without_middle = [&](const Batch& batch) { loss_of(net.last(at::tanh(net.first(batch.x))), batch.y, samples).backward(); };
    backward(net, mine(0));
    step();
    if (cleared == Cleared::WithinAccumulation) {
      const Attachment local = no_sync();
      without_middle(mine(1));
    }
    net.zero_grad(/*set_to_none=*/false);
    if (cleared == Cleared::BeforeAFailure && no_sync) {
      const at::Tensor x = mine(1).x.clone().requires_grad_();
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
      EXPECT_THROW(loss_of(net.forward(x), mine(1).y, samples).backward(), std::runtime_error);
    }
    without_middle(mine(2));
    step();
  };
  for (const auto cleared : {Cleared::Before, Cleared::WithinAccumulation, Cleared::BeforeAFailure}) {
    Net whole;
    torch::optim::SGD alone(whole.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
    const auto everything = [](int64_t step) { return whole_batch(samples, step); };
    if (cleared == Cleared::BeforeAFailure) {
      run(whole, Cleared::Before, everything, {}, [&] { alone.step(); });
    } else {
      run(whole, cleared, everything, [] { return Attachment(); }, [&] { alone.step(); });
    }
    for (const int stage : {1, 2}) {
      run_ranks(3, [&](World& world) {
        Net net;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets, .find_unused_parameters = true});
        auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) {
          return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
        });
        run(
            net, cleared, [&](int64_t step) { return part_of(whole_batch(samples, step), 3, world.rank()); }, [&] { return zero.no_sync(); },
            [&] { optimizer.step(); });
        EXPECT_LT(largest_difference(net.parameters(), whole.parameters()), 10 * parity) << "stage " << stage << ", " << static_cast<int>(cleared);
      });
    }
  }
}

TEST(ZeroPlainLoop, AClearBehindAnEnginesStepIsOne) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, other;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2}), expected(other, {.shard = world.group()}, {.stage = 2});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      run_step(net, zero, mine);
      net.zero_grad(set_to_none);
      backward(net, mine);
      backward(other, mine);
      for (size_t i = 0; i < zero.updated().size(); ++i) EXPECT_TRUE(at::equal(zero.updated()[i].tensor.grad(), expected.updated()[i].tensor.grad())) << i;
    });
  }
}

TEST(ZeroPlainLoop, AGradientOfThisRankAloneIsNotAddedTo) {
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      for (const bool find_unused : {false, true}) {
        run_ranks(ranks, [&](World& world) {
          Net net;
          ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets, .find_unused_parameters = find_unused});
          const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
          const auto put = [&](const std::vector<at::Tensor>& gradients) {
            for (size_t i = 0; i < gradients.size(); ++i) net.parameters()[i].mutable_grad() = gradients[i].clone();
          };
          put(local_gradients(net, mine));
          EXPECT_THAT(refusal([&] { backward(net, mine); }), AllOf(HasSubstr("the program has put a gradient on 'scale'"), HasSubstr("on all ranks")));
          net.zero_grad();
          backward(net, mine);
          const std::vector<at::Tensor> once = [&] {
            std::vector<at::Tensor> parts;
            for (const auto& part : zero.updated()) parts.push_back(part.tensor.grad().clone());
            return parts;
          }();
          net.zero_grad();
          auto summed = local_gradients(net, mine);
          for (at::Tensor& gradient : summed) comm::all_reduce(world.group(), gradient);
          put(summed);
          backward(net, mine);
          for (size_t i = 0; i < once.size(); ++i) EXPECT_LT(largest_difference({zero.updated()[i].tensor.grad()}, {once[i] * 2}), parity) << i;
        });
      }
    }
  }
}

/// The contract's route for gradients that no backward pass brings.
TEST(ZeroPlainLoop, WhatIsPutOnAPartBehindAClearStays) {
  for (const bool set_to_none : {true, false}) {
    for (const bool kept : {true, false}) {
      for (const bool then_adds : {true, false}) {
        const auto loop = [&](Net& net, const auto& step, const auto& put, const Batch& first, const Batch& second, const Batch& third) {
          backward(net, first);
          step();
          net.zero_grad(set_to_none);
          put(local_gradients(net, second));
          if (!then_adds) return step();
          step();
          backward(net, third);
          step();
        };
        Net whole;
        const auto alone = make_sgd(whole.parameters());
        loop(
            whole, [&] { alone->step(); },
            [&](const std::vector<at::Tensor>& gradients) {
              for (size_t i = 0; i < gradients.size(); ++i) whole.parameters()[i].mutable_grad() = gradients[i];
            },
            whole_batch(samples, 0), whole_batch(samples, 1), whole_batch(samples, 2));
        for (const int stage : {1, 2}) {
          run_ranks(3, [&](World& world) {
            Net net;
            ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
            auto optimizer = zero_optimizer(zero, make_sgd);
            const std::vector<at::Tensor> parts = optimizer.inner().param_groups()[0].params();
            const auto mine = [&](int64_t i) { return part_of(whole_batch(samples, i), 3, world.rank()); };
            loop(
                net, [&] { optimizer.step(); },
                [&](std::vector<at::Tensor> gradients) {
                  for (at::Tensor& gradient : gradients) comm::all_reduce(world.group(), gradient);
                  const auto updated = kept ? std::vector<nn::NamedParameter>() : zero.updated();
                  for (size_t i = 0; i < parts.size(); ++i) {
                    at::Tensor part = kept ? parts[i] : updated[i].tensor;
                    int64_t begin = 0;
                    for (int rank = 0; rank < world.rank(); ++rank) begin += zero.slice_on(rank, part).numel();
                    part.mutable_grad() = gradients[i].reshape({-1}).narrow(0, begin, part.numel()).view(part.sizes()).clone();
                  }
                  (void)zero.updated();  // for a log, or a checkpoint
                },
                mine(0), mine(1), mine(2));
            EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << "stage " << stage << ", to none " << set_to_none;
          });
        }
      }
    }
  }
}

/// Whatever was made of a step's gradients before the model cleared them, as who leaves an update out does, is not added to the next step's.
TEST(ZeroPlainLoop, WhatWasMadeOfGradientsBeforeAClearIsCleared) {
  for (const auto& [set_to_none, looks] : {std::pair{true, false}, {false, false}, {true, true}, {false, true}}) {
    run_ranks(2, [&, set_to_none = set_to_none, looks = looks](World& world) {
      Net net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
      const auto pass = [&] { backward(net, part_of(whole_batch(samples), 2, world.rank())); };
      const auto gradients = [&] {
        std::vector<at::Tensor> parts;
        for (const auto& part : zero.updated()) parts.push_back(part.tensor.grad().clone());
        return parts;
      };
      pass();
      const std::vector<at::Tensor> once = gradients();
      for (const auto& part : zero.updated()) at::Tensor(part.tensor).mutable_grad() = part.tensor.grad() * 0.5;
      net.zero_grad(set_to_none);
      if (looks) (void)zero.updated();  // for a log, or a checkpoint
      pass();
      EXPECT_TRUE(same_bits(gradients(), once)) << "to none " << set_to_none;
    });
  }
}

/// What a program that puts gradients on parts is written against, with a wrapper and without.
struct PuttingLoop {
  std::vector<at::Tensor> parts;  ///< held from the start, or asked for anew by `look`
  std::function<void()> step, look;
  std::function<void(int64_t)> backward;
  std::function<at::Tensor(size_t, const at::Tensor&)> part_of;  ///< this rank's elements of what is like parameter i

  at::Tensor like(const Net& net, size_t i) const { return part_of(i, net.parameters()[i].detach() * 0.7 + 0.3); }
  void put(const Net& net) const {
    for (size_t i = 0; i < parts.size(); ++i) at::Tensor(parts[i]).mutable_grad() = like(net, i);
  }
};

void expect_parity_of_putting(const std::string& name, const std::function<void(Net&, const PuttingLoop&)>& train) {
  Net whole;
  const auto alone = make_sgd(whole.parameters());
  train(whole, {.parts = whole.parameters(),
                .step = [&] { alone->step(); },
                .look = [] {},
                .backward = [&](int64_t i) { backward(whole, whole_batch(samples, i)); },
                .part_of = [](size_t, const at::Tensor& given) { return given.clone(); }});
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
        auto optimizer = zero_optimizer(zero, make_sgd);
        PuttingLoop loop{.parts = optimizer.inner().param_groups()[0].params(),
                         .step = [&] { optimizer.step(); },
                         .look = [&] { (void)zero.updated(); },
                         .backward = [&](int64_t i) { backward(net, tessera::testing_support::part_of(whole_batch(samples, i), ranks, world.rank())); }};
        loop.part_of = [&](size_t i, const at::Tensor& given) {
          const at::Tensor& part = loop.parts[i];
          int64_t begin = 0;
          for (int rank = 0; rank < world.rank(); ++rank) begin += zero.slice_on(rank, part).numel();
          return given.reshape({-1}).narrow(0, begin, part.numel()).view(part.sizes()).clone();
        };
        train(net, loop);
        EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << name << ", " << ranks << " ranks, stage " << stage;
      });
    }
  }
}

/// What was put on the parts is the model's gradients, as what a pass has left: the model's next clear is theirs.
TEST(ZeroPlainLoop, AGradientThatWasPutIsClearedAsAnyOther) {
  for (const bool none_before : {true, false}) {
    for (const bool none_behind : {true, false}) {
      expect_parity_of_putting("put behind a clear", [&](Net& net, const PuttingLoop& loop) {
        for (int64_t i = 0; i < 2; ++i) {
          loop.backward(2 * i);
          loop.step();
          net.zero_grad(none_before);
          if (i == 1) loop.look();
          loop.put(net);
          loop.step();
          net.zero_grad(none_behind);
          loop.backward(2 * i + 1);
          loop.step();
        }
        net.zero_grad();
        loop.put(net);
        loop.step();
        net.zero_grad(none_behind);
        loop.step();
      });
    }
  }
  expect_parity_of_putting("by each parameter", [](Net& net, const PuttingLoop& loop) {
    const auto clear = [&] {
      for (at::Tensor parameter : net.parameters()) parameter.mutable_grad().reset();
    };
    loop.put(net);
    loop.step();
    clear();
    loop.backward(0);
    loop.step();
    clear();
    loop.put(net);
    loop.step();
    clear();
    loop.backward(1);
    loop.step();
  });
  expect_parity_of_putting("gradients of several losses", [](Net& net, const PuttingLoop& loop) {  // as PCGrad does
    for (int64_t step = 0; step < 3; ++step) {
      std::vector<std::vector<at::Tensor>> of;
      for (int64_t task = 0; task < 2; ++task) {
        net.zero_grad();
        loop.backward(2 * step + task);
        auto& gradients = of.emplace_back();
        for (const at::Tensor& part : loop.parts) gradients.push_back(part.grad().clone());
      }
      net.zero_grad();
      for (size_t i = 0; i < loop.parts.size(); ++i) at::Tensor(loop.parts[i]).mutable_grad() = of[0][i] * 0.4 + of[1][i] * 0.6;
      loop.step();
    }
  });
}

/// A clear of the model's is one of the parts when it is made, not when somebody looks.
TEST(ZeroPlainLoop, WhatIsPutOrAddedBehindAClearIsKeptByTheNextPassToo) {
  for (const bool to_none : {true, false}) {
    for (const bool looks : {true, false}) {
      for (const bool in_place : {true, false}) {
        for (const bool then_adds : {true, false}) {
          expect_parity_of_putting("to none " + std::to_string(to_none), [&](Net& net, const PuttingLoop& loop) {
            loop.backward(0);
            loop.step();
            net.zero_grad(to_none);
            if (looks) loop.look();
            for (size_t i = 0; i < loop.parts.size(); ++i) {
              at::Tensor& gradient = at::Tensor(loop.parts[i]).mutable_grad();
              ASSERT_EQ(gradient.defined(), !to_none);
              if (in_place && gradient.defined()) {
                gradient.add_(loop.like(net, i));
              } else {
                gradient = loop.like(net, i);
              }
            }
            if (then_adds) loop.backward(1);
            loop.step();
          });
        }
      }
    }
  }
}

/// A program that keeps what stood in grad() has cleared it all the same, and may let go of it whenever it likes.
TEST(ZeroPlainLoop, AClearOfAGradientThatIsHeldIsOne) {
  for (const bool lets_go_late : {true, false}) {
    expect_parity_of_putting("held", [&](Net& net, const PuttingLoop& loop) {
      loop.backward(0);
      loop.step();
      std::vector<at::Tensor> held;
      for (const at::Tensor& parameter : net.parameters()) held.push_back(parameter.grad());
      net.zero_grad();
      loop.backward(1);
      if (lets_go_late) held.clear();  // behind another gradient, which stays
      loop.step();
    });
  }
}

TEST(ZeroPlainLoop, AGradientIsClearedByItsDataToo) {
  for (const bool held : {false, true}) {
    expect_parity_of_putting("by data()", [&](Net& net, const PuttingLoop& loop) {
      for (int64_t i = 0; i < 3; ++i) {
        for (const at::Tensor& parameter : net.parameters()) {
          if (!parameter.grad().defined()) continue;
          at::Tensor data = parameter.grad().data();
          data.zero_();
          if (held) parameter.mutable_grad() = data;
        }
        loop.backward(i);
        loop.step();
      }
      net.zero_grad();
      loop.backward(3);
      loop.step();
    });
  }
}

/// A program that looks at another loss between, and puts back what it has taken: in parts, or without a pass, it can.
TEST(ZeroPlainLoop, GradientsAreSetAsideByTheirParts) {
  for (const bool in_parts : {true, false}) {
    expect_parity_of_putting("set aside", [&](Net& net, const PuttingLoop& loop) {
      const std::vector<at::Tensor> of = in_parts ? loop.parts : net.parameters();
      std::vector<at::Tensor> kept;
      loop.backward(0);
      for (const at::Tensor& each : of) kept.push_back(in_parts ? each.grad().clone() : each.grad());
      for (at::Tensor parameter : net.parameters()) parameter.mutable_grad().reset();
      if (in_parts) loop.backward(1);
      for (size_t i = 0; i < of.size(); ++i) at::Tensor(of[i]).mutable_grad() = kept[i];
      kept.clear();
      loop.step();
      net.zero_grad();
      loop.backward(2);
      loop.step();
    });
  }
}

/// What stands in grad() has nothing to put back once its parts are another's.
TEST(ZeroPlainLoop, AGradientThatIsPutBackIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      for (const bool by_pass : {true, false}) {
        for (const char* const asked : {"step", "norm", "pass", "gather"}) {
          run_ranks(ranks, [&](World& world) {
            Net net, other;
            ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage}), expected(other, {.shard = world.group()}, {.stage = stage});
            auto optimizer = zero_optimizer(zero, make_sgd), by_itself = zero_optimizer(expected, make_sgd);
            const auto pass = [&](Net& of, int64_t i) { backward(of, part_of(whole_batch(samples, i), ranks, world.rank())); };
            const std::map<std::string, std::function<void()>> asking{{"step", [&] { optimizer.step(); }},
                                                                      {"norm", [&] { zero.refuse_gradients_that_wait("clip_grad_norm"); }},
                                                                      {"pass", [&] { pass(net, 2); }},
                                                                      {"gather", [&] { zero.after_update(); }}};
            pass(net, 0);
            at::Tensor& gradient = net.last->weight.mutable_grad();
            const at::Tensor kept = gradient;
            gradient.reset();
            if (by_pass) pass(net, 1);
            (void)zero.updated();  // either finds the clear
            gradient = kept;
            EXPECT_THAT(refusal(asking.at(asked)),
                        AllOf(HasSubstr("what was put into grad() of 'last.weight'"), HasSubstr("keep clones of those of the parts")));
            optimizer.zero_grad();
            for (Net* const each : {&net, &other}) pass(*each, 3);
            optimizer.step();
            by_itself.step();
            EXPECT_TRUE(same_bits(weights_of(net), weights_of(other))) << asked;
          });
        }
      }
    }
  }
}

/// And what another parameter shows is no gradient of this one.
TEST(ZeroPlainLoop, AGradientOfAnotherParameterIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
    auto optimizer = zero_optimizer(zero, make_sgd);
    backward(net, part_of(whole_batch(samples), 2, world.rank()));
    std::swap(net.first->weight.mutable_grad(), net.last->weight.mutable_grad());
    EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("what was put into grad() of 'last.weight'"));
  });
}

/// A clear that a held gradient hides is one of what was there: what was put since is used by whoever has nothing else to use.
TEST(ZeroPlainLoop, WhatIsPutBehindAClearOfAGradientThatIsHeldStays) {
  for (const bool looks : {true, false}) {
    expect_parity_of_putting("held", [&](Net& net, const PuttingLoop& loop) {
      loop.backward(0);
      loop.step();
      std::vector<at::Tensor> held;
      for (const at::Tensor& parameter : net.parameters()) held.push_back(parameter.grad());
      net.zero_grad();
      loop.put(net);
      if (looks) loop.look();
      loop.put(net);
      loop.step();
      loop.backward(1);
      loop.step();
    });
  }
}

/// A pass would add to it where it was put behind the clear, and not where it was put before.
TEST(ZeroPlainLoop, APassThatMayAddToWhatWasClearedIsRefusedByName) {
  for (const bool before : {true, false}) {
    for (const bool looks : {true, false}) {
      run_ranks(2, [&](World& world) {
        Net net, other;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 1}), expected(other, {.shard = world.group()}, {.stage = 1});
        const auto parts = zero.updated();
        const auto pass = [&](Net& of) { backward(of, part_of(whole_batch(samples), 2, world.rank())); };
        const auto put = [&] {
          for (const auto& part : parts) at::Tensor(part.tensor).mutable_grad() = at::ones_like(part.tensor.detach());
        };
        pass(net);
        std::vector<at::Tensor> held;
        for (const at::Tensor& parameter : net.parameters()) held.push_back(parameter.grad());
        if (before) put();
        net.zero_grad();
        if (!before) put();
        if (looks) (void)zero.updated();
        EXPECT_THAT(refusal([&] { pass(net); }), AllOf(HasSubstr("nobody can tell whether this pass adds to it"), HasSubstr("grad() of 'scale'")));
        held.clear();
        pass(net);
        pass(other);
        for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i].tensor.grad(), expected.updated()[i].tensor.grad())) << i;
      });
    }
  }
}

/// Between passes under no_sync() and the last one parts have no gradient, so one that is put there may mean more, or instead.
TEST(ZeroPlainLoop, AGradientThatIsPutWithinAnAccumulationIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    for (const bool looks : {true, false}) {
      run_ranks(ranks, [&](World& world) {
        Net net, other;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2}), expected(other, {.shard = world.group()}, {.stage = 2});
        const auto parts = zero.updated();
        const auto put = [&] {
          for (const auto& part : parts) at::Tensor(part.tensor).mutable_grad() = at::ones_like(part.tensor.detach());
        };
        const auto pass = [&](Net& of, int64_t i) { backward(of, part_of(whole_batch(samples, i), ranks, world.rank())); };
        {
          const Attachment local = zero.no_sync();
          pass(net, 0);
        }
        put();
        if (looks) (void)zero.updated();
        EXPECT_THAT(refusal([&] { pass(net, 1); }), AllOf(HasSubstr("a gradient was put on this rank's part of 'scale'"), HasSubstr("no_sync")));
        net.zero_grad();
        for (const auto& part : parts) at::Tensor(part.tensor).mutable_grad().reset();
        pass(net, 1);
        pass(other, 1);
        for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i].tensor.grad(), expected.updated()[i].tensor.grad())) << i;
        put();  // before the first pass it is one more
        {
          const Attachment local = zero.no_sync();
          EXPECT_NO_THROW(pass(net, 0));
        }
        EXPECT_NO_THROW(pass(net, 1));
      });
    }
  }
}

}  // namespace
}  // namespace tessera
