#include <cmath>
#include <functional>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
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

/// Of libtorch's kind; moves nothing.
struct StillBackend final : c10d::Backend {
  using Backend::Backend;
  const std::string getBackendName() const override { return "still"; }
  comm::Work broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override { return comm::completed_work(); }
  comm::Work allgather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override {
    return comm::completed_work();
  }
};

/// One of libtorch's own, too, where its dispatcher sees it.
TEST(FullyShardSlices, WhatACollectiveOfLibtorchsHasWrittenIsTheWhole) {
  run_ranks(2, [](World& world) {
    HeadedImpl net(2);
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), world.rank(), 2);
    group->setBackend(test_device().type(), c10d::ProcessGroup::CUSTOM, c10::make_intrusive<StillBackend>(world.rank(), 2));
    const at::Tensor mine = net.gain.detach(), kept = mine.clone();
    std::vector<at::Tensor> sent{mine.numel() == 0 ? at::zeros({}) : mine.clone()}, own{mine};
    group->broadcast(sent)->wait();
    std::vector<std::vector<at::Tensor>> parts{{at::zeros_like(kept), at::zeros_like(kept)}};
    group->allgather(parts, own)->wait();
    const at::Tensor loss = net.forward(input()).square().sum();
    EXPECT_NO_THROW((void)(net.gain + sent[0]));
    EXPECT_NO_THROW((void)(loss * sent[0]));
    EXPECT_NO_THROW((void)(loss * parts[0][1]));
    EXPECT_THAT(refusal([&] { (void)(loss * kept); }), HasSubstr("all of it"));
    EXPECT_THAT(refusal([&] { (void)(net.gain.exp() - mine); }), HasSubstr("'gain'"));
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

/// A table of a row for each rank, and a scale that one of them has.
struct RowEachImpl : torch::nn::Module {
  explicit RowEachImpl(int rows, uint64_t seed = 1) : table(torch::nn::LinearOptions(4, rows).bias(false)) {
    gain = register_parameter("gain", at::empty({}));
    register_module("in", in);
    register_module("table", table);
    fill_parameters(*this, seed);
  }
  at::Tensor forward(const at::Tensor& x) { return table(at::tanh(in(x))) * gain; }
  at::Tensor gain;
  torch::nn::Linear in{3, 4}, table;
};

/// What holds a parameter to what was taken of it, by name.
using Penalty = std::function<at::Tensor(const at::Tensor& p, const at::Tensor& anchor)>;

const std::vector<std::pair<std::string, Penalty>>& penalties() {
  static const std::vector<std::pair<std::string, Penalty>> all{
      {"a function of each", [](auto& p, auto& a) { return p.exp() - a.exp(); }},
      {"a product", [](auto& p, auto& a) { return p * 1. - a; }},
      {"a loss", [](auto& p, auto& a) { return at::mse_loss(p * 2., a * 2.); }},
      {"in place", [](auto& p, auto& a) { return (p * 1.).sub_(a); }},
      {"stretched before", [](auto& p, auto& a) { return p * 1. - a * at::ones({p.dim() == 0 ? 1 : p.size(0), 1}); }},
      {"stacked", [](auto& p, auto& a) { return at::stack({p, p * 2.}) - at::stack({a, a * 2.}); }},
      {"a dimension more", [](auto& p, auto& a) { return p.unsqueeze(0) - a.unsqueeze(0); }},
      {"turned", [](auto& p, auto& a) { return p.t() - a.t().contiguous(); }},
      {"in lists", [](auto& p, auto& a) { return at::_foreach_sub({p * 1.}, {a})[0]; }},
      {"written by a view",
       [](auto& p, auto& a) {
         const at::Tensor twice = a.clone();
         twice.view(-1).mul_(2);
         return p - twice;
       }},
      {"computed in a layer", [](auto& p, auto& a) { return at::linear(at::ones({1, 1}), p.reshape({-1, 1})).sum() - a; }}};
  return all;
}

TEST(FullyShardSlices, WhatIsComputedOfAWholeBesideThemIsRefusedOnEveryRank) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      RowEachImpl net(ranks);
      const auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
      ASSERT_EQ(nn::slice_of(net.table->weight).local_shape(), (std::vector<int64_t>{1, 4}));
      for (const auto& [name, parameter] : {std::pair("'gain'", net.gain), std::pair("'table.weight'", net.table->weight)}) {
        const at::Tensor handle = parameter.detach(), anchor = handle.clone();
        for (const auto& [kind, penalty] : penalties()) {
          SCOPED_TRACE(::testing::Message() << name << ", " << kind);
          const at::Tensor loss = net.forward(input()).square().sum();
          EXPECT_THAT(refusal([&] { (void)penalty(parameter, anchor); }), AllOf(HasSubstr(name), HasSubstr("before fully_shard")));
          EXPECT_THAT(refusal([&] { (void)penalty(parameter, handle); }), HasSubstr(name));
        }
      }
    });
  }
}

/// Of which the student's wrapper knows nothing.
TEST(FullyShardSlices, ThoseOfAnotherWrapperAreRefusedBesideWholesToo) {
  for (const int ranks : {2, 3}) {
    for (const bool teacher_first : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        RowEachImpl net(ranks), teacher(ranks, /*seed=*/2);
        const at::Tensor expected = net.table->weight.detach() - teacher.table->weight.detach();
        for (const at::Tensor& p : teacher.parameters()) p.set_requires_grad(false);
        const auto wrap = [&](RowEachImpl& one) { return fully_shard(one, world.group(), {.wrap = "*", .average = true}); };
        const auto first = wrap(teacher_first ? teacher : net), second = wrap(teacher_first ? net : teacher);
        for (const bool copied : {false, true}) {
          for (const auto& [kind, penalty] : penalties()) {
            SCOPED_TRACE(::testing::Message() << kind << ", copied: " << copied << ", teacher first: " << teacher_first);
            const at::Tensor scale = copied ? teacher.gain.detach().clone() : teacher.gain.detach();
            const at::Tensor rows = copied ? teacher.table->weight.detach().clone() : teacher.table->weight.detach();
            const at::Tensor loss = net.forward(input()).square().sum();
            EXPECT_THAT(refusal([&] { (void)penalty(net.gain, scale); }), HasSubstr("'gain'"));
            EXPECT_THAT(refusal([&] { (void)penalty(net.table->weight, rows); }), HasSubstr("'table.weight'"));
          }
        }
        const at::Tensor loss = net.forward(input()).square().sum(), between = net.table->weight - teacher.table->weight;
        EXPECT_TRUE(at::equal(between, expected)) << "the way out";
        (loss + between.square().sum()).backward();
      });
    }
  }
}

/// Elements, one after the other, each a unit; then a layer whose weight is seen through a view.
struct ByElementsImpl : torch::nn::Module {
  struct Times : torch::nn::Module {
    Times(int64_t rows, bool adds) : adds(adds) { table = register_parameter("table", at::empty({rows, 4})); }
    at::Tensor forward(const at::Tensor& x) { return adds ? x + table : x * table; }
    at::Tensor table;
    bool adds;
  };
  explicit ByElementsImpl(int64_t rows, uint64_t seed = 1) : scale(std::make_shared<Times>(rows, false)), shift(std::make_shared<Times>(rows, true)) {
    register_module("scale", scale);
    register_module("shift", shift);
    weight = register_parameter("weight", at::empty({rows, 4}));
    fill_parameters(*this, seed);
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(shift->forward(scale->forward(x)), weight.t()); }
  std::shared_ptr<Times> scale, shift;
  at::Tensor weight;
};

/// What the program puts in a parameter's place it has made of slices, which another wrapper of the thread is told, too: a parameter is one all the same.
TEST(FullyShardSlices, AParameterIsNoneOfThemWhateverWasPutInItsPlace) {
  for (const int ranks : {2, 3}) {
    for (const bool other_first : {false, true}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, the other first: " << other_first);
      const auto train = [&](ByElementsImpl& net, std::vector<at::Tensor>& seen) {
        const at::Tensor x = at::linspace(-1, 1, 4 * ranks).view({ranks, 4});
        for (int step = 0; step < 3; ++step) {
          net.zero_grad();
          net.forward(x).square().mean().backward();
          for (const at::Tensor& p : net.parameters()) p.set_data(p.data() - 0.1 * p.grad());
          const at::NoGradGuard no_grad;
          seen.push_back(net.forward(x));
          net.eval();
          std::vector<at::Tensor> kept;
          for (const at::Tensor& p : net.parameters()) {
            kept.push_back(p.data());
            p.set_data(p.detach() * 0.9);
          }
          seen.push_back(net.forward(x));
          net.train();
          for (size_t i = 0; i < kept.size(); ++i) net.parameters()[i].set_data(kept[i]);
        }
      };
      ByElementsImpl whole(ranks);
      std::vector<at::Tensor> expected;
      train(whole, expected);
      run_ranks(ranks, [&](World& world) {
        ByElementsImpl net(ranks), other(ranks, /*seed=*/2);
        const auto wrap = [&](ByElementsImpl& one) { return fully_shard(one, world.group(), {.wrap = "*", .average = true}); };
        const auto first = wrap(other_first ? other : net), second = wrap(other_first ? net : other);
        std::vector<at::Tensor> seen;
        train(net, seen);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_LT((seen[i] - expected[i]).abs().max().item<double>(), 20 * parity * expected[i].abs().max().item<double>()) << i;
      });
    }
  }
}

TEST(FullyShardSlices, RowsOfAWrapperThatIsGoneAreRowsStill) {
  run_ranks(2, [](World& world) {
    RowEachImpl net(2);
    auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
    const at::Tensor anchor = net.table->weight.detach().clone();
    unshard(net);
    sharded.reset();
    sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
    const at::Tensor loss = net.forward(input()).square().sum();
    EXPECT_THAT(refusal([&] { (void)(net.table->weight.exp() - anchor.exp()); }), HasSubstr("'table.weight'"));
  });
}

/// Sums over the ranks, where there are several.
using Sum = std::function<void(const at::Tensor& part)>;
using Program = std::function<void(RowEachImpl& net, const Sum& sum)>;

/// A right program is one process's, rank by rank.
void expect_like_one_process(const Program& program) {
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks");
    RowEachImpl whole(ranks);
    program(whole, [](const at::Tensor&) {});
    run_ranks(ranks, [&](World& world) {
      RowEachImpl net(ranks);
      const auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
      program(net, [&](const at::Tensor& part) { comm::all_reduce(world.group(), part); });
      EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 20 * parity);
    });
  }
}

std::vector<at::Tensor> copies_of(const RowEachImpl& net) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& p : net.parameters()) copies.push_back(p.detach().clone());
  return copies;
}

/// Averages, weight decay, a step to sharper weights and back, and a pull to anchors that is added to gradients.
TEST(FullyShardSlices, UpdatesByRowsGoOn) {
  expect_like_one_process([](RowEachImpl& net, const Sum&) {
    std::vector<at::Tensor> average = copies_of(net);
    const std::vector<at::Tensor> anchors = copies_of(net), p = net.parameters();
    for (int step = 0; step < 3; ++step) {
      const auto pass = [&] {
        net.zero_grad();
        net.forward(input()).square().mean().backward();
      };
      pass();
      std::vector<at::Tensor> moved;
      for (size_t i = 0; i < p.size(); ++i) {
        const at::NoGradGuard no_grad;
        p[i].add_(moved.emplace_back(p[i].grad() * 0.1));
      }
      pass();
      for (size_t i = 0; i < p.size(); ++i) p[i].mutable_grad().add_((p[i].detach() - moved[i] - anchors[i]) * at::ones({}), 0.1);
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < p.size(); ++i) {
        p[i].sub_(moved[i]).mul_(0.99);
        p[i].sub_(p[i].grad(), 0.05);
        average[i] = average[i] * 0.9 + p[i].detach() * 0.1;
      }
      at::_foreach_lerp_(average, p, 0.01);
    }
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < p.size(); ++i) p[i].copy_(average[i]);
  });
}

/// What becomes one number of this rank's rows is a number, and may stand in a loss.
TEST(FullyShardSlices, NumbersForALogMayStandBesideALoss) {
  expect_like_one_process([](RowEachImpl& net, const Sum& sum) {
    const std::vector<at::Tensor> anchors = copies_of(net);
    torch::optim::SGD sgd(net.parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      const std::vector<at::Tensor> now = copies_of(net);
      at::Tensor drift = at::zeros({});
      for (size_t i = 0; i < now.size(); ++i) drift = drift + (now[i] - anchors[i]).square().sum() + at::mse_loss(now[i], anchors[i], at::Reduction::Sum);
      const at::Tensor norm = at::stack(at::_foreach_norm(now)).square().sum();
      sum(drift);
      sgd.zero_grad();
      const at::Tensor loss = net.forward(input()).square().mean();
      (loss * (1 + drift) + at::l1_loss(now[0], anchors[0], at::Reduction::Sum) + loss.detach() * norm).backward();
      sgd.step();
    }
  });
}

TEST(FullyShardSlices, PenaltiesOnGradientsGoOn) {
  expect_like_one_process([](RowEachImpl& net, const Sum&) {
    torch::optim::SGD sgd(net.parameters(), 0.05);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor loss = net.forward(input()).square().mean();
      const at::Tensor along = at::ones_like(net.table->weight) * net.table->weight.detach(), scale = net.gain.detach() * 1;
      const auto slopes = torch::autograd::grad({loss}, {net.gain, net.table->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      sgd.zero_grad();
      (loss + slopes[0].square() + (slopes[1] * along * at::ones_like(slopes[1])).sum() + (net.gain * slopes[0] - scale).square()).backward();
      sgd.step();
    }
  });
}

/// A learned rate of the program's own is of no wrapper: what it does with rows is this rank's part of a sum.
TEST(FullyShardSlices, RowsBesideWhatTheProgramLearnsByItselfAreItsOwn) {
  expect_like_one_process([](RowEachImpl& net, const Sum& sum) {
    const at::Tensor rate = at::full({}, 0.1).requires_grad_();
    const std::vector<at::Tensor> anchors = copies_of(net);
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      rate.mutable_grad() = at::Tensor();
      net.forward(input()).square().mean().backward();
      at::Tensor far = at::zeros({});
      for (size_t i = 0; i < anchors.size(); ++i) {
        const at::Tensor p = net.parameters()[i];
        const at::Tensor mask = at::full_like(p.detach(), 0.5).requires_grad_();
        far = far + ((p.detach() - rate.exp() * p.grad()) * mask - anchors[i]).square().sum();
      }
      far.backward();
      sum(rate.grad());
      const at::NoGradGuard no_grad;
      rate.sub_(rate.grad(), 0.01);
      for (const at::Tensor& p : net.parameters()) p.sub_(p.grad() * rate.detach());
    }
  });
}

/// And follows its student by handles.
TEST(FullyShardSlices, ATeacherTeachesByWhatItReturns) {
  for (const int ranks : {2, 3}) {
    const auto train = [](RowEachImpl& net, RowEachImpl& teacher) {
      torch::optim::SGD sgd(net.parameters(), 0.05);
      for (int step = 0; step < 3; ++step) {
        at::Tensor target;
        {
          const at::NoGradGuard no_grad;
          target = teacher.forward(input());
        }
        sgd.zero_grad();
        const at::Tensor out = net.forward(input());
        at::mse_loss(out * 1.5, target * 1.5).backward();
        sgd.step();
        for (size_t i = 0; i < teacher.parameters().size(); ++i) {
          teacher.parameters()[i].data().mul_(0.9).add_(net.parameters()[i].detach() * 0.1);
        }
      }
    };
    RowEachImpl whole(ranks), whole_teacher(ranks, /*seed=*/2);
    train(whole, whole_teacher);
    run_ranks(ranks, [&](World& world) {
      RowEachImpl net(ranks), teacher(ranks, /*seed=*/2);
      const auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
      const auto taught = fully_shard(teacher, world.group(), {.wrap = "*", .average = true});
      train(net, teacher);
      EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 20 * parity);
      EXPECT_LT(slice_difference(teacher, named_values(whole_teacher), /*values=*/true), 20 * parity);
    });
  }
}

/// However a program came to them: from before, by hand, of the module made whole.
TEST(FullyShardSlices, WholeAnchorsAreRight) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      RowEachImpl net(ranks), other(ranks);
      const at::Tensor before = net.table->weight.detach().clone();
      const auto beside = fully_shard(other, world.group(), {.wrap = "*"});
      auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
      const at::Tensor rows = net.table->weight.detach();
      const at::Tensor gathered = at::empty({ranks, 4});
      comm::all_gather(world.group(), gathered, rows);
      std::vector<at::Tensor> sent;
      for (int rank = 0; rank < ranks; ++rank) {
        const at::Tensor& part = sent.emplace_back(rank == world.rank() ? rows.clone() : at::empty_like(rows));
        comm::broadcast_async(world.group(), part, rank).wait();
      }
      const at::Tensor by_hand = at::cat(sent);
      unshard(net);
      const at::Tensor unsharded = net.table->weight.detach().clone();
      sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
      const at::Tensor loss = net.forward(input()).square().sum();
      for (const at::Tensor& anchor : {before, gathered, by_hand, unsharded}) {
        EXPECT_TRUE(at::equal(anchor, before));
        EXPECT_EQ((net.table->weight.exp() - anchor.exp()).square().sum().item<float>(), 0);
        EXPECT_EQ((net.table->weight - anchor).square().sum().item<float>(), 0);
      }
      loss.backward();
    });
  }
}

/// Nor does it make of the whole's memory anything else.
TEST(FullyShardSlices, WhatIsLaidOutAsTheyAreIsNotMadeOfThem) {
  run_ranks(2, [&](World& world) {
    RowEachImpl net(2);
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const at::Tensor rows = net.table->weight.detach().clone(), mask = at::full({4}, 2.);
    (void)mask.view_as(rows);
    (void)mask.expand_as(rows);
    (void)mask.to(rows);
    const at::Tensor loss = net.forward(input()).square().sum();
    EXPECT_EQ((net.table->weight * mask).sizes(), (at::IntArrayRef{2, 4}));
    EXPECT_EQ((net.table->weight.exp() * mask).sizes(), (at::IntArrayRef{2, 4}));
    loss.backward();
  });
}

}  // namespace
}  // namespace tessera
