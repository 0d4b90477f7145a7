#include <cmath>
#include <functional>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/nn/operator_watch.h"

/// What was made of slices, beside parameters: known by that, not by its shape.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// A scale that one rank has, and a head of any number of rows.
struct HeadedImpl : torch::nn::Module {
  explicit HeadedImpl(int64_t rows) : head(4, rows) {
    gain = register_parameter("gain", at::empty({}));
    register_module("in", in);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(at::tanh(in(x))) * gain; }
  at::Tensor gain;
  torch::nn::Linear in{3, 4}, head;
};

/// The same of modules whose calls trigger.
struct CalledImpl : nn::Module {
  CalledImpl() : in(3, 4) {
    gain = register_parameter("gain", at::empty({}));
    register_module("in", in);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = in(x)*gain;
    return anchor.defined() ? h + (gain - anchor).square() : h;
  }
  at::Tensor gain, anchor;
  nn::Linear in;
};
TESSERA_MODULE(Called);

void each_world(const std::function<void(int ranks, const std::string& wrap)>& body) {
  for (const int ranks : {2, 3}) {
    for (const std::string wrap : {"", "*"}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, wrap '" << wrap << "'");
      body(ranks, wrap);
    }
  }
}

const at::Tensor& input() {
  static const at::Tensor x = random_tensor({6, 3}, "x");
  return x;
}

/// On a rank without rows libtorch takes the whole for nothing; of one row it stretches what is this rank's.
TEST(FullyShardSlices, AWholeBesideThemIsRefusedOnEveryRank) {
  each_world([](int ranks, const std::string& wrap) {
    for (const int64_t rows : {1, 2, 6}) {
      run_ranks(ranks, [&](World& world) {
        HeadedImpl net(rows);
        const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
        const at::Tensor &gain = net.gain, &weight = net.head->weight;
        EXPECT_THAT(refusal([&] { (void)(gain - at::ones_like(gain)); }), HasSubstr("'gain'"));
        EXPECT_THAT(refusal([&] { (void)at::mse_loss(weight, at::zeros_like(weight)); }), HasSubstr("'head.weight'"));
        const at::Tensor scale = gain.detach().clone() * 2, anchor = at::zeros_like(weight.detach());
        anchor.mul_(0.5).add_(weight.detach(), 0.5);
        const at::Tensor loss = net.forward(input()).square().sum();
        EXPECT_THAT(refusal([&] { (void)(gain - scale); }), AllOf(HasSubstr("aten::sub was given 'gain', all of it"), HasSubstr("before fully_shard")));
        EXPECT_THAT(refusal([&] { (void)(weight - anchor).square(); }), HasSubstr("'head.weight', all of it"));
        EXPECT_EQ(at::l1_loss(gain, at::zeros_like(gain)).item<float>(), std::abs(gain.item<float>())) << "the way out";
        loss.backward();
        {
          const nn::Unwatched as_clipping_does;
          weight.mutable_grad().mul_(0.5);
        }
        EXPECT_THAT(refusal([&] { (void)(weight * weight.grad()); }), HasSubstr("'head.weight'")) << "with gradients recorded";
        const at::NoGradGuard no_grad;
        EXPECT_EQ((weight * weight.grad()).sizes(), weight.sizes()) << "this rank's rows";
      });
    }
  });
}

TEST(FullyShardSlices, AWholeBesideThemIsRefusedInACallToo) {
  each_world([](int ranks, const std::string& wrap) {
    run_ranks(ranks, [&](World& world) {
      Called net;
      const auto sharded = fully_shard(*net, world.group(), {.wrap = wrap, .average = true, .trigger = ShardTrigger::Calls});
      net->anchor = net->gain.detach().clone();
      EXPECT_THAT(refusal([&] { (void)net(input()); }), HasSubstr("'gain', all of it"));
    });
  });
}

/// A rank that has all of a parameter sees two of one shape there, too.
TEST(FullyShardSlices, ATensorOfTheirShapeThatIsNotMadeOfThemIsTheForwards) {
  const auto train = [](HeadedImpl& net, const at::Tensor& x) {
    torch::optim::SGD sgd(net.parameters(), 0.05);
    for (int step = 0; step < 2; ++step) {
      sgd.zero_grad();
      const at::Tensor factor = net.gain * (1 - net.gain) * at::full({}, 2.0), out = net.forward(x).square().mean();
      (out * factor + net.gain * out.detach() + (net.head->weight - at::ones({1, 4})).square().sum()).backward();
      sgd.step();
    }
  };
  HeadedImpl whole(2);
  train(whole, input());
  each_world([&](int ranks, const std::string& wrap) {
    run_ranks(ranks, [&](World& world) {
      HeadedImpl net(2);
      const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
      train(net, input());
      EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
    });
  });
}

/// A collective has brought together what ranks had.
TEST(FullyShardSlices, WhatACollectiveHasWrittenIsTheWhole) {
  each_world([](int ranks, const std::string& wrap) {
    run_ranks(ranks, [&](World& world) {
      HeadedImpl net(2);
      const float expected = net.gain.item<float>();
      const auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
      const at::Tensor mine = net.gain.detach(), all = mine.numel() == 0 ? at::zeros({}) : mine * 1;
      comm::all_reduce(world.group(), all);
      const at::Tensor loss = net.forward(input()).square().sum();
      EXPECT_EQ((net.gain + all).item<float>(), 2 * expected);
      loss.backward();
    });
  });
}

/// How far parameters have come, between a forward and its backward.
TEST(FullyShardSlices, WithoutGradientsAParameterBesideThemIsThisRanksRowsInAStepToo) {
  for (const int64_t rows : {1, 2, 6}) {
    const auto train = [&](HeadedImpl& net, const std::function<void(const at::Tensor&)>& sum) {
      std::vector<at::Tensor> seen;
      torch::optim::SGD sgd(net.parameters(), 0.05);
      const at::Tensor anchor = net.head->weight.detach() * 2, scale = net.gain.detach().clone();
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = net.forward(input()).square().mean();
        {
          const at::NoGradGuard no_grad;
          seen.push_back((net.head->weight - anchor).square().sum() + (net.gain - scale).square().sum());
          sum(seen.back());
        }
        sgd.zero_grad();
        loss.backward();
        sgd.step();
      }
      return at::stack(seen);
    };
    HeadedImpl whole(rows);
    const at::Tensor expected = train(whole, [](const at::Tensor&) {});
    each_world([&](int ranks, const std::string& wrap) {
      run_ranks(ranks, [&](World& world) {
        HeadedImpl net(rows);
        const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
        const at::Tensor seen = train(net, [&](const at::Tensor& part) { comm::all_reduce(world.group(), part); });
        EXPECT_TRUE(at::allclose(seen, expected, 1e-4, 1e-6)) << rows << " rows: " << seen << expected;
        EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
      });
    });
  }
}

/// Which the rank that has all rows would not: it goes on, and the others say why it is left alone.
TEST(FullyShardSlices, ATensorOfTheirShapeEndsNoForwardWhereOneRankHasAllRows) {
  run_ranks(2, [&](World& world) {
    HeadedImpl net(2);
    const auto sharded = fully_shard(net, world.group(), {.average = true});
    const std::vector<int64_t> rows = nn::slice_of(net.head->weight).local_shape();
    const at::Tensor made = at::zeros(rows);
    ASSERT_TRUE(rows[0] == 0 || rows[0] == 2) << "on one rank";
    const at::Tensor loss = net.forward(input()).square().mean();
    {
      const at::NoGradGuard no_grad;
      if (rows[0] == 0) {
        EXPECT_THAT(refusal([&] { (void)(net.head->weight - made); }), HasSubstr("'head.weight'"));
      } else {
        EXPECT_TRUE(at::equal(net.head->weight - made, net.head->weight));
      }
    }
    loss.backward();
  });
}

/// Two tables of one size, of which ranks have other rows.
struct Tables : torch::nn::Module {
  Tables() {
    a = register_parameter("a", at::empty({6, 4}));
    b = register_parameter("b", at::empty({6, 4}));
    fill_parameters(*this);
  }
  at::Tensor a, b;
};

TEST(FullyShardSlices, AnEvaluationMayBeginWithTwoParameters) {
  for (const int ranks : {2, 3, 4}) {
    const Tables whole;
    run_ranks(ranks, [&](World& world) {
      Tables net;
      const auto sharded = fully_shard(net, world.group());
      const at::NoGradGuard no_grad;
      if (ranks == 3) {  // one has as many rows of each
        EXPECT_THAT(refusal([&] { (void)(net.a + net.b); }), HasSubstr("eval()"));
      } else {
        EXPECT_TRUE(at::equal(net.a + net.b, whole.a + whole.b)) << "in training mode, on " << ranks;
      }
      net.eval();
      EXPECT_TRUE(at::equal(net.a + net.b, whole.a + whole.b)) << ranks;
      EXPECT_TRUE(at::equal(at::where(at::ones({1, 1}, at::kBool), net.a, net.b), whole.a)) << ranks;
    });
  }
}

/// Rules of a program's own, behind a line for the log that ran a forward. The first write ends that, so each parameter comes first once.
TEST(FullyShardSlices, UpdatesOutOfPlaceAreOfThisRanksRowsWhereOneRankHasAll) {
  using Rule = std::function<void(const at::Tensor& p, at::Tensor& slow)>;
  const std::vector<Rule> rules{[](auto& p, auto&) { p.sub_(p.grad().mul(0.5).add(p, 0.1), 0.05); },
                                [](auto& p, auto& slow) {
                                  p.sub_(p.grad(), 0.05);
                                  slow.add_(p - slow, 0.5);
                                  p.copy_(slow);
                                },
                                [](auto& p, auto& slow) {
                                  slow = slow.lerp(p - 0.05 * p.grad(), at::full({}, 0.5f));
                                  p.copy_(at::addcmul(slow, p.grad(), at::full({}, -0.01f)));
                                }};
  for (const Rule& rule : rules) {
    const auto train = [&](HeadedImpl& net) {
      std::vector<at::Tensor> slow;
      for (const at::Tensor& p : net.parameters()) slow.push_back(p.detach().clone());
      for (size_t first = 0; first < slow.size(); ++first) {
        net.zero_grad();
        net.forward(input()).square().mean().backward();
        const at::NoGradGuard no_grad;
        (void)net.forward(input());
        for (size_t i = 0; i < slow.size(); ++i) {
          const size_t at = (first + i) % slow.size();
          rule(net.parameters()[at], slow[at]);
        }
      }
    };
    HeadedImpl whole(2);
    train(whole);
    each_world([&](int ranks, const std::string& wrap) {
      run_ranks(ranks, [&](World& world) {
        HeadedImpl net(2);
        const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
        train(net);
        EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
      });
    });
  }
}

/// Looks, without gradients, at how far its weight is from values in 32 bits, and then at the weight alone.
struct Drifting : torch::nn::Module {
  Drifting() {
    register_module("in", in);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = in(x);
    const at::NoGradGuard no_grad;
    drift = (anchor - in->weight).norm();
    norm = in->weight.norm();
    return h;
  }
  torch::nn::Linear in{3, 4};
  at::Tensor anchor = random_tensor({4, 3}, "anchor"), drift, norm;
};

TEST(FullyShardSlices, WhatFollowsKeptParametersEndsNoForwardOfOneShard) {
  run_ranks(2, [&](World& world) {
    for (const bool replicas : {false, true}) {
      Drifting net;
      FullyShardOptions options{.param_dtype = at::kBFloat16};
      if (replicas) options.replicate = world.group();
      const auto sharded = fully_shard(net, comm::Group::self(), options);
      const at::Tensor x = input().to(at::kBFloat16);
      torch::optim::SGD sgd(net.parameters(), 0.05);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor kept = net.in->weight.detach().clone();
        const auto expect = [&] {
          EXPECT_TRUE(at::equal(net.drift, (net.anchor - kept).norm()));
          EXPECT_TRUE(at::equal(net.norm, kept.to(at::kBFloat16).norm()));
        };
        sgd.zero_grad();
        const at::Tensor loss = net.forward(x).square().mean();
        expect();
        loss.backward();
        net.eval();
        {
          const at::NoGradGuard no_grad;
          (void)net.forward(x);
        }
        expect();
        net.train();
        sgd.step();
        EXPECT_FALSE(at::equal(net.in->weight.detach(), kept));
      }
    }
  });
}

/// A step of an inner loop, between calls.
TEST(FullyShardSlices, AnInnerStepBetweenCallsIsOfTheWholeThatIsGathered) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      Called net;
      const auto sharded = fully_shard(*net, world.group(), {.param_dtype = at::kBFloat16, .trigger = ShardTrigger::Calls});
      const at::Tensor x = input(), &weight = net->in->weight;
      const at::Tensor loss = net(x).to(at::kFloat).square().mean();
      const at::Tensor slope = torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      const at::Tensor inner = weight - 0.1 * slope;
      EXPECT_EQ(inner.scalar_type(), at::kBFloat16) << ranks;
      (at::matmul(x.to(at::kBFloat16), inner.t()).square().mean() + 0 * loss).backward();
      EXPECT_EQ(weight.grad().sizes(), weight.sizes());
    });
  }
}

}  // namespace
}  // namespace tessera
