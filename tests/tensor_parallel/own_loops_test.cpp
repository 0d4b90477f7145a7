#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/utils/clip_grad.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/sharing.h"
#include "tests/refusal.h"

/// What programs for one process do to a model, beside calling it, done to one that is cut.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// x + down(drop(gelu(up(norm(x))))).
struct DroppedImpl : nn::Module {
  explicit DroppedImpl(double p = 0, int64_t hidden = 12) : up(6, hidden), down(hidden, 6), drop(p), after(p) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("drop", drop);
    register_module("down", down);
    register_module("after", after);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return x + after(down(drop(at::gelu(up(norm(x)))))); }
  nn::LayerNorm norm{nn::LayerNormOptions({6})};
  nn::Linear up, down;
  nn::Dropout drop, after;
};
TESSERA_MODULE(Dropped);

ParallelPlan feed_forward_plan() { return {{"up", ColumnParallel{}}, {"down", RowParallel{}}}; }

/// Values of libtorch's generator, the same on all ranks.
Dropped drawn() {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  torch::manual_seed(1);
  return Dropped();
}

TEST(OwnLoopOfParts, DrawsIntoPartsAreRefusedByName) {
  run_ranks(2, [](World& world) {
    const auto refused =
        AllOf(HasSubstr("parallelize_module: "), HasSubstr("'up.weight', of which each rank has a slice"), HasSubstr("before parallelize_module"));
    Dropped net = drawn();
    {
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      EXPECT_THAT(testing_support::refusal([&] { net->up->reset_parameters(); }), refused);
      EXPECT_THAT(testing_support::refusal([&] { torch::nn::init::normal_(net->up->weight); }), refused);
      EXPECT_THAT(testing_support::refusal([&] { torch::nn::init::orthogonal_(net->up->weight); }), refused);
      for (const at::Tensor& whole : {net->norm->weight, net->down->bias}) torch::nn::init::ones_(whole);
      torch::nn::init::zeros_(net->up->weight);
      net->up->weight.detach().normal_();  // what the program means to be this rank's
      net(at::ones({2, 6}));
    }
    torch::nn::init::normal_(net->up->weight);
  });
}

TEST(OwnLoopOfParts, OneRanksPartsThatAreBroadcastAreRefused) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](World& world) {
      const at::Tensor x = at::arange(12, at::kFloat).view({2, 6}).sin();
      const auto cut = [&](Dropped& net) { return parallelize_module(net, world.group(), feed_forward_plan()); };
      const auto send = [&](const at::Tensor& parameter) {
        const at::Tensor handle = parameter.data();
        comm::broadcast(world.group(), handle, 0);
      };
      Dropped net = drawn();
      const auto tensor = cut(net);
      for (const at::Tensor& parameter : net->parameters()) send(parameter);
      EXPECT_THAT(testing_support::refusal([&] { net(x); }),
                  AllOf(HasSubstr("'up.weight' and all other parts have the same values on every rank"), HasSubstr("were written since they were cut")));
      for (const bool trains : {false, true}) {  // what is each rank's own, or the same of a purpose
        const at::AutoGradMode mode(trains);
        Dropped averaged = drawn();
        const auto of_average = cut(averaged);
        for (const at::Tensor& parameter : averaged->parameters()) parameter.detach().mul_(0.5);
        EXPECT_NO_THROW(averaged(x));
        Dropped constant = drawn();
        const auto of_constant = cut(constant);
        for (const at::Tensor& parameter : constant->parameters()) parameter.detach().fill_(0.5);
        EXPECT_NO_THROW(constant(x));
        Dropped repeated = drawn();
        {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& parameter : {repeated->up->weight, repeated->up->bias}) parameter.copy_(parameter[0].expand_as(parameter));
          repeated->down->weight.copy_(repeated->down->weight.narrow(1, 0, 1).expand_as(repeated->down->weight));
        }
        const auto of_repeated = cut(repeated);
        EXPECT_NO_THROW(repeated(x));
      }
    });
  }
}

/// The norm of a rank's parts would scale by another factor on each.
TEST(OwnLoopOfParts, LibtorchsClippingIsRefused) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](World& world) {
      Dropped net = drawn();
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      net(at::ones({2, 6})).square().sum().backward();
      nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
      const auto refused = AllOf(HasSubstr("parallelize_module: aten::"), HasSubstr("tessera::clip_grad_norm(model, max_norm)"));
      for (const double norm : {2.0, std::numeric_limits<double>::infinity()}) {
        EXPECT_THAT(testing_support::refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1, norm); }), refused);
      }
      for (const at::Tensor& whole : net->norm->parameters()) EXPECT_GE(whole.grad().norm().item<double>(), 0);
      EXPECT_GE(net->up->weight.norm().item<double>(), 0);
    });
  }
}

/// Of module by module: the masks of one process, wherever a dropout lies.
TEST(OwnLoopOfParts, MasksOfFeaturesAreThoseOfOneDevice) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  for (const int64_t hidden : {12, 13}) {  // with 12 on two ranks a part is as wide as the stream
    for (const bool stated : {true, false}) {
      const auto build = [&] {
        Dropped net = on_meta([&] { return Dropped(0.5, hidden); });
        return net;
      };
      std::mutex one_at_a_time;  // libtorch's generator is all ranks'
      const auto pass = [&](Dropped& net, const at::Tensor& in) {
        const std::lock_guard lock(one_at_a_time);
        torch::manual_seed(4);
        std::optional<nn::SampleScope> samples;
        if (stated) samples.emplace(nn::SampleContext{.seed = 7, .step = 1, .first_sample = 3, .seq_len = 5});
        return net->drop(at::gelu(net->up(net->norm(in))));
      };
      Dropped one = build();
      materialize(one, 3);
      const at::Tensor want = pass(one, x).detach();
      const nn::SampleScope samples({.seed = 7, .step = 1, .first_sample = 3, .seq_len = 5});
      const at::Tensor result = one(x).detach();
      for (const int ranks : {2, 3}) {
        run_ranks(ranks, [&](World& world) {
          Dropped net = build();
          const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
          materialize(net, 3);
          for (const bool learns : {true, false}) {
            for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(learns);
            const at::Tensor part = pass(net, x).detach();
            const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
            EXPECT_LT((part - want.narrow(2, held.offset[0], held.size[0])).abs().max().item<double>(), 1e-5) << learns;
            const nn::SampleScope here({.seed = 7, .step = 1, .first_sample = 3, .seq_len = 5});
            net->down(part.clone());
            EXPECT_LT((net(x).detach() - result).abs().max().item<double>(), 1e-5) << learns;
          }
        });
      }
    }
  }
}

/// Around one dropout of attention's output, in two forms.
struct HeadsImpl : nn::Module {
  explicit HeadsImpl(bool flat) : flat(flat) {
    register_module("wq", wq);
    register_module("wk", wk);
    register_module("wv", wv);
    register_module("wo", wo);
    register_module("core", core);
    register_module("drop", drop);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [](const at::Tensor& t) { return t.unflatten(-1, {-1, 2}); };
    at::Tensor y = core(heads(wq(x)), heads(wk(x)), heads(wv(x)), std::nullopt, std::nullopt);
    y = flat ? drop(y.flatten(-2)) : drop(y).flatten(-2);
    return wo(y);
  }
  bool flat;
  nn::Linear wq{6, 12}, wk{6, 4}, wv{6, 4}, wo{12, 6};
  nn::AttentionCore core;
  nn::Dropout drop{0.5};
};
TESSERA_MODULE(Heads);

ParallelPlan heads_plan() {
  const auto queries = FeatureCut::query_heads(6, 2), keys = FeatureCut::key_value_heads(6, 2);
  return {
      {"wq", ColumnParallel{.cut = queries}}, {"wk", ColumnParallel{.cut = keys}}, {"wv", ColumnParallel{.cut = keys}}, {"wo", RowParallel{.cut = queries}}};
}

TEST(OwnLoopOfParts, MasksOfHeadsAreThoseOfOneDeviceOrRefused) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const auto build = [](bool flat) {
    Heads net = on_meta([&] { return Heads(flat); });
    return net;
  };
  const auto pass = [&](Heads& net) {
    const nn::SampleScope samples({.seed = 7, .step = 1});
    return net(x);
  };
  Heads one = build(true);
  materialize(one, 3);
  const at::Tensor want = pass(one).detach();
  for (const int ranks : {2, 3}) {  // two of three share keys
    run_ranks(ranks, [&](World& world) {
      Heads net = build(true);
      const auto tensor = parallelize_module(net, world.group(), heads_plan());
      materialize(net, 3);
      EXPECT_LT((pass(net).detach() - want).abs().max().item<double>(), 1e-5);
      Heads apart = build(false);
      const auto of_apart = parallelize_module(apart, world.group(), heads_plan());
      materialize(apart, 3);
      EXPECT_THAT(testing_support::refusal([&] { pass(apart); }),
                  AllOf(HasSubstr("Dropout 'drop'"), HasSubstr("part of some features"), HasSubstr("flatten(-2)")));
      apart(x);  // of no stated step
    });
  }
}

TEST(OwnLoopOfParts, TheCheckTakesADropoutOfFeatures) {
  const auto x = at::empty({3, 8, 6}, at::TensorOptions().device(at::kMeta));
  Dropped net = on_meta([] { return Dropped(0.5); });
  EXPECT_NO_THROW(check_parallel_plan(*net, 2, feed_forward_plan(), [&] { net(x); }));
  Heads apart = on_meta([] { return Heads(false); });
  ParallelPlan plan = heads_plan();
  plan.emplace_back("core", Gives{.layout = TensorLayout::Features, .cut = FeatureCut::query_heads(6, 2), .dim = 2});
  EXPECT_THAT(testing_support::refusal([&] { check_parallel_plan(*apart, 2, plan, [&] { apart(x); }); }), HasSubstr("flatten(-2) of heads"));
}

/// A norm and a dropout, in a container.
struct StemImpl : nn::Module {
  StemImpl() {
    register_module("norm", norm);
    register_module("drop", drop);
  }
  at::Tensor forward(const at::Tensor& x) { return drop(norm(x)); }
  nn::LayerNorm norm{nn::LayerNormOptions({6})};
  nn::Dropout drop{0.5};
};
TESSERA_MODULE(Stem);

struct StemmedImpl : nn::Module {
  StemmedImpl() {
    register_module("stem", stem);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return stem(x); }
  Stem stem;
};
TESSERA_MODULE(Stemmed);

TEST(OwnLoopOfParts, MasksOfNestedRegionsAreThoseOfOneDevice) {
  const auto stream = TensorLayout::Sequence, whole = TensorLayout::Replicated;
  const auto build = [] {
    Stemmed net = on_meta([] { return Stemmed(); });
    return net;
  };
  const auto pass = [](Stemmed& net, const at::Tensor& x) {
    const nn::SampleScope samples({.seed = 7, .step = 1, .first_sample = 2});
    return net(x).detach();
  };
  Stemmed one = build();
  materialize(one, 3);
  const at::Tensor rows = at::ones({7, 6}) * at::arange(6, at::kFloat), x = rows.expand({3, 7, 6});
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      for (const char* pattern : {"stem.*", "**"}) {
        Stemmed net = build();
        const auto tensor = parallelize_module(
            net, world.group(),
            {{pattern, SequenceParallel{}}, {"stem", PrepareInput{.from = whole, .to = stream}}, {"stem", PrepareOutput{.from = stream, .to = whole}}});
        materialize(net, 3);
        for (const at::Tensor& in : {x, x.narrow(1, 0, 5), rows}) {
          EXPECT_TRUE(at::equal(pass(net, in).eq(0), pass(one, in).eq(0))) << pattern << ' ' << in.sizes();
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera
