#include <functional>
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
#include "tessera/comm/differentiable.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/kept_memory.h"
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
      EXPECT_THAT(testing_support::refusal([&] { torch::nn::init::eye_(net->up->weight); }), AllOf(refused, HasSubstr("an identity of its own")));
      {
        const at::NoGradGuard no_grad;
        at::Tensor out = net->up->weight;  // the parameter itself
        EXPECT_THAT(testing_support::refusal([&] { at::normal_out(out, 0, 1, out.sizes()); }), refused);
        EXPECT_THAT(testing_support::refusal([&] { at::randn_out(out, out.sizes()); }), refused);
        torch::nn::init::eye_(net->norm->weight.detach().unsqueeze(0));
      }
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

/// Where nobody has seen the parts written: they were cut on meta, and loaded since.
TEST(OwnLoopOfParts, OneRanksPartsOfUnknownHistoryAreRefused) {
  enum class Way { Materialized, Loaded, AWholeOneGiven };
  const at::Tensor x = at::arange(12, at::kFloat).view({2, 6}).sin();
  using Init = std::function<void(nn::LinearImpl&)>;
  const auto built = [](const Init& init) {
    return on_meta([] { return Dropped(); },
                   [&](torch::nn::Module& module) {
                     if (auto* const linear = dynamic_cast<nn::LinearImpl*>(&module)) init(*linear);
                   });
  };
  const auto as_drawn = [](nn::LinearImpl&) {};
  for (const int ranks : {2, 3}) {
    for (const Way way : {Way::Materialized, Way::Loaded, Way::AWholeOneGiven}) {
      run_ranks(ranks, [&](World& world) {
        SCOPED_TRACE(static_cast<int>(way));
        Dropped net = way == Way::Materialized ? built(as_drawn) : drawn();
        const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
        if (way == Way::Materialized) materialize(net, 3);
        if (way == Way::Loaded) {
          for (const auto& parameter : nn::unique_parameters(*net)) nn::note_loaded(parameter.tensor);
        }
        for (const at::Tensor& parameter : net->parameters()) {
          const at::Tensor handle = parameter.data();
          comm::broadcast(world.group(), handle, 0);
        }
        if (way == Way::AWholeOneGiven) net->norm->weight.set_data(net->norm->weight.detach().clone());
        EXPECT_THAT(testing_support::refusal([&] { net(x); }), HasSubstr("'up.weight' and all other parts have the same values on every rank"));
      });
    }
    // What each rank has of its own, or is alike of a purpose.
    for (const auto& init :
         std::vector<Init>{as_drawn, [](nn::LinearImpl& layer) { torch::nn::init::constant_(layer.weight, 0.5), torch::nn::init::zeros_(layer.bias); },
                           [](nn::LinearImpl& layer) {
                             const at::NoGradGuard no_grad;
                             const int64_t cut = layer.options.in_features() == 6 ? 0 : 1;
                             layer.weight.copy_(at::arange(6, at::kFloat).unsqueeze(cut).expand(layer.weight.sizes()));
                             torch::nn::init::zeros_(layer.bias);
                           }}) {
      run_ranks(ranks, [&](World& world) {
        Dropped net = built(init);
        const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
        materialize(net, 3);
        for (int pass = 0; pass < 3; ++pass) EXPECT_NO_THROW(net(x));
        Dropped loaded = built(init);
        materialize(loaded, 3);
        const auto of_loaded = parallelize_module(loaded, world.group(), feed_forward_plan());
        for (const auto& parameter : nn::unique_parameters(*loaded)) {
          parameter.tensor.detach().mul_(0.5);
          nn::note_loaded(parameter.tensor);
        }
        for (int pass = 0; pass < 3; ++pass) EXPECT_NO_THROW(loaded(x));
      });
    }
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
      const at::Tensor bucket = at::ones({1000});  // as data parallelism lays them, parts and whole ones
      int64_t begin = 0;
      for (at::Tensor& parameter : net->parameters()) {
        parameter.mutable_grad() = bucket.narrow(0, begin, parameter.numel()).view(parameter.sizes());
        begin += parameter.numel();
      }
      torch::nn::utils::clip_grad_norm_({net->norm->weight, net->norm->bias, net->down->bias}, 0.1);
      EXPECT_THAT(testing_support::refusal([&] { (void)net->up->bias.grad().norm(); }), refused);
      EXPECT_THAT(testing_support::refusal([&] { (void)bucket.norm(); }), refused);
    });
  }
}

/// Penalties of a weight that are no sums over its elements, by what tensor-parallel.md says of them.
TEST(OwnLoopOfParts, PenaltiesOfWholeWeightsAreThoseOfOneDevice) {
  Dropped whole = drawn();
  const at::Tensor x = at::ones({1, 6});
  const auto gram = [](const at::Tensor& products) { return (products - at::eye(6)).square().sum(); };
  (whole(x).sum() + whole->up->weight.norm() + gram(whole->up->weight.t().matmul(whole->up->weight)) +
   gram(whole->down->weight.matmul(whole->down->weight.t())))
      .backward();
  for (const int ranks : {2, 5}) {
    run_ranks(ranks, [&](World& world) {
      Dropped net = drawn();
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      const at::Tensor up = net->up->weight, down = net->down->weight;
      const auto all = [&](const at::Tensor& terms) { return comm::differentiable::all_reduce(world.group(), terms); };
      (net(x).sum() + all(up.square().sum()).sqrt() + gram(all(up.t().matmul(up))) + gram(all(down.matmul(down.t())))).backward();
      EXPECT_TRUE(at::allclose(up.grad(), take(whole->up->weight.grad(), nn::slice_of(up)), 1e-5, 1e-6)) << world.rank() << " of " << ranks;
      EXPECT_TRUE(at::allclose(down.grad(), take(whole->down->weight.grad(), nn::slice_of(down)), 1e-5, 1e-6)) << world.rank() << " of " << ranks;
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
      for (const auto& [ranks, overlap] : std::vector<std::pair<int, bool>>{{2, false}, {3, false}, {2, true}, {3, true}}) {
        run_ranks(ranks, [&, overlap = overlap](World& world) {
          Dropped net = build();
          const auto tensor = parallelize_module(net, world.group(), feed_forward_plan(), {.overlap = overlap});
          materialize(net, 3);
          net->down(at::ones({1, net->down->weight.size(1)}));  // ranks meet in the first call
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

/// A collective that a program has written itself, of which autograd knows no more than that it is a function.
struct OwnGather : torch::autograd::Function<OwnGather> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const comm::Group& group) {
    const at::Tensor parts = at::empty({group.size() * x.size(0), x.size(1), x.size(2)}, x.options());
    comm::all_gather(group, parts, x.contiguous());
    return parts;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// x + after(down(h)), where the program itself brings the ranks' features together for a whole layer.
struct ClosedByHandImpl : nn::Module {
  enum class Closing { Gather, OwnGather, Sum };
  ClosedByHandImpl() {
    register_module("up", up);
    register_module("down", down);
    register_module("after", after);
    nn::assign_paths(*this);
  }
  at::Tensor product(const at::Tensor& h) {
    using comm::differentiable::Gradient;
    if (!group) return down(h);
    const int64_t own = h.size(-1);
    if (closing == Closing::Gather) return down(comm::differentiable::all_gather(*group, h, h.dim() - 1, 12, Gradient::Replicated));
    if (closing == Closing::OwnGather) return down(at::cat(OwnGather::apply(h, *group).chunk(group->size()), -1));
    return comm::differentiable::all_reduce(*group, at::linear(h, down->weight.narrow(1, group->rank() * own, own))) + down->bias;
  }
  at::Tensor before(const at::Tensor& x) { return product(at::gelu(up(x))); }
  at::Tensor forward(const at::Tensor& x) { return x + after(before(x)); }
  std::optional<comm::Group> group;
  Closing closing = Closing::Gather;
  nn::Linear up{6, 12}, down{12, 6};
  nn::Dropout after{0.5};
};
TESSERA_MODULE(ClosedByHand);

TEST(OwnLoopOfParts, MasksBehindFeaturesThatAProgramHasBroughtTogetherAreAllRanks) {
  using enum ClosedByHandImpl::Closing;
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const auto build = [] {
    ClosedByHand net = on_meta([] { return ClosedByHand(); });
    return net;
  };
  std::mutex one_at_a_time;  // libtorch's generator is all ranks'
  const auto dropped = [&](ClosedByHand& net, bool stated) {
    const at::Tensor h = net->before(x);
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(4);
    const nn::SampleScope samples({.seed = 7, .step = stated ? 1 : 0});
    return net->after(h).detach();
  };
  ClosedByHand one = build();
  materialize(one, 3);
  for (const bool stated : {true, false}) {
    const at::Tensor want = dropped(one, stated);
    for (const int ranks : {2, 3}) {
      for (const auto closing : {Gather, OwnGather, Sum}) {
        run_ranks(ranks, [&](World& world) {
          ClosedByHand net = build();
          const auto tensor = parallelize_module(net, world.group(), {{"up", ColumnParallel{}}});
          materialize(net, 3);
          net->group = world.group();
          net->closing = closing;
          EXPECT_LT((dropped(net, stated) - want).abs().max().item<double>(), 1e-5) << ranks << ' ' << stated << ' ' << static_cast<int>(closing);
        });
      }
    }
  }
}

/// Brought together for a norm over all, each rank takes its own again; or pooled rows are brought together.
TEST(OwnLoopOfParts, MasksOfAPartThatIsTakenAgainAreThoseOfOneDevice) {
  using comm::differentiable::Gradient;
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const auto pass = [&](Dropped& net, const std::function<at::Tensor(const at::Tensor&)>& map) {
    const nn::SampleScope samples({.seed = 7, .step = 1});
    return net->drop(map(at::gelu(net->up(x)))).detach();
  };
  const auto centered = [](const at::Tensor& h) { return h - h.mean(-1, true); };
  Dropped one = on_meta([] { return Dropped(0.5); });
  materialize(one, 3);
  const at::Tensor want = pass(one, centered), pooled = pass(one, [](const at::Tensor& h) { return h.mean(1, true); }), triangle = at::ones({6, 12}).tril();
  const at::Tensor both = pass(one, [&](const at::Tensor& h) { return one->down(h) + at::linear(h, triangle); });
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Dropped net = on_meta([] { return Dropped(0.5); });
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan(), {.overlap = ranks == 3});
      materialize(net, 3);
      const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
      const auto gathered = [&](const at::Tensor& h) { return comm::differentiable::all_gather(world.group(), h, 2, want.size(-1), Gradient::Replicated); };
      const at::Tensor own = want.narrow(-1, held.offset[0], held.size[0]);
      const auto split = [&](const at::Tensor& h) { return comm::differentiable::split(world.group(), centered(gathered(h)), 2); };
      EXPECT_LT((pass(net, split) - own).abs().max().item<double>(), 1e-5);
      EXPECT_LT((pass(net, [&](const at::Tensor& h) { return centered(gathered(h)); }) - want).abs().max().item<double>(), 1e-5);
      const auto of_few = [&](const at::Tensor& h) { return at::cat(OwnGather::apply(h.mean(1, true), world.group()).chunk(ranks), -1); };
      EXPECT_LT((pass(net, of_few) - pooled).abs().max().item<double>(), 1e-5);
      EXPECT_LT((pass(net, [&](const at::Tensor& h) { return net->down(h) + at::linear(gathered(h), triangle); }) - both).abs().max().item<double>(), 1e-5);
    });
  }
}

/// Takes some features, by a function of the program's own.
struct OwnNarrow : torch::autograd::Function<OwnNarrow> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t first, int64_t size) {
    context->saved_data["around"] = std::vector<int64_t>{first, x.size(-1) - first - size};
    return x.narrow(-1, first, size).clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    return {at::constant_pad_nd(gradients[0], context->saved_data["around"].toIntVector()), at::Tensor(), at::Tensor()};
  }
};

/// As much of what was brought together as a rank has: its own part, or what all ranks take alike.
TEST(OwnLoopOfParts, MasksOfWhatMayBeAPartAreRefused) {
  using comm::differentiable::Gradient;
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  std::mutex one_at_a_time;
  using Map = std::function<at::Tensor(const at::Tensor&)>;
  const auto pass = [&](Dropped& net, const Map& map, bool stated = true) {
    const at::Tensor h = map(at::gelu(net->up(x)));
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(4);
    const nn::SampleScope samples({.seed = 7, .step = stated ? 1 : 0});
    return net->drop(h).detach();
  };
  const auto mixed = [](const at::Tensor& h) { return at::matmul(at::ones({6, 6}).tril(), h.unflatten(-1, {6, 2})); };  // talking heads
  const auto gated = [](const at::Tensor& h) { return h.chunk(2, -1)[0] * h.chunk(2, -1)[1].sigmoid(); };
  const auto half = [](const at::Tensor& h) { return at::linear(h, at::ones({6, 12}).tril()).unflatten(1, {5, 1}).narrow(-1, 0, 3); };
  Dropped one = on_meta([] { return Dropped(0.5); });
  materialize(one, 3);
  const at::Tensor want = pass(one, [&](const at::Tensor& h) { return mixed(h).flatten(-2); });
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Dropped net = on_meta([] { return Dropped(0.5); });
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      materialize(net, 3);
      const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
      const int64_t first = held.offset[0], size = held.size[0];
      const auto whole = [&](const at::Tensor& h) { return comm::differentiable::all_gather(world.group(), h, 2, 12, Gradient::Replicated); };
      for (const Map& map : std::vector<Map>{[&](const at::Tensor& h) { return whole(h).narrow(-1, first, size); },  // the same run on all, as far as is known
                                             [&](const at::Tensor& h) { return mixed(whole(h)).narrow(2, first / 2, size / 2).flatten(-2); },
                                             [&](const at::Tensor& h) { return mixed(whole(h)).narrow(2, first / 2, size / 2); },
                                             [&](const at::Tensor& h) { return whole(h).view({2, 5, ranks, -1}).select(2, world.rank()); },
                                             [&](const at::Tensor& h) { return whole(h).index_select(-1, at::arange(first, first + size)); },
                                             [&](const at::Tensor& h) { return OwnNarrow::apply(whole(h), first, size); }}) {
        EXPECT_THAT(testing_support::refusal([&] { pass(net, map); }),
                    AllOf(HasSubstr("Dropout 'drop'"), HasSubstr("behind 'up'"), HasSubstr("comm::differentiable::split")));
        pass(net, map, /*stated=*/false);
      }
      const auto split = [&](const at::Tensor& h) { return comm::differentiable::split(world.group(), mixed(whole(h)), 2).flatten(-2); };
      EXPECT_LT((pass(net, split) - want.narrow(-1, first, size)).abs().max().item<double>(), 1e-5);
      if (ranks == 2) EXPECT_THAT(testing_support::refusal([&] { pass(net, [&](const at::Tensor& h) { return gated(whole(h)); }); }), HasSubstr("'up'"));
      if (ranks == 3) EXPECT_LT((pass(net, [&](const at::Tensor& h) { return gated(whole(h)); }) - pass(one, gated)).abs().max().item<double>(), 1e-5);
      // Of what was made of all: rows, and features of another layer.
      for (const Map& map :
           std::vector<Map>{half, [&](const at::Tensor& h) { return h.narrow(1, 0, 5).narrow(0, 0, 1); }, [](const at::Tensor& h) { return h.select(1, 0); }}) {
        EXPECT_LT((pass(net, [&](const at::Tensor& h) { return map(whole(h)); }) - pass(one, map)).abs().max().item<double>(), 1e-5);
      }
    });
  }
}

/// What is made of a rank's features and has them still: fewer rows, or rows one after the other.
TEST(OwnLoopOfParts, MasksOfPooledFeaturesAreThoseOfOneDevice) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  using Map = at::Tensor (*)(const at::Tensor&);
  const std::vector<Map> maps{[](const at::Tensor& h) { return h.mean(1); }, [](const at::Tensor& h) { return h.narrow(1, 1, 4); },
                              [](const at::Tensor& h) { return h.flatten(0, 1); }, [](const at::Tensor& h) { return h.transpose(0, 1); },
                              [](const at::Tensor& h) { return h.reshape({5, 2, -1}); }};
  const auto pass = [&](Dropped& net, Map map) {
    const nn::SampleScope samples({.seed = 7, .step = 1});
    return net->drop(map(at::gelu(net->up(x)))).detach();
  };
  Dropped one = on_meta([] { return Dropped(0.5); });
  materialize(one, 3);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Dropped net = on_meta([] { return Dropped(0.5); });
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      materialize(net, 3);
      const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
      for (const Map map : maps) EXPECT_LT((pass(net, map) - pass(one, map).narrow(-1, held.offset[0], held.size[0])).abs().max().item<double>(), 1e-5);
    });
  }
}

/// Attention in plain operators, with dropout of its weights, of three or four dimensions.
struct WeightsImpl : nn::Module {
  WeightsImpl(int64_t head_dim, int64_t kv_heads, bool flat)
      : head_dim(head_dim), kv_heads(kv_heads), flat(flat), wq(8, 8), wk(8, head_dim * kv_heads), wv(8, head_dim * kv_heads) {
    register_module("wq", wq);
    register_module("wk", wk);
    register_module("wv", wv);
    register_module("wo", wo);
    register_module("drop", drop);
    nn::assign_paths(*this);
  }
  at::Tensor weights(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& t) { return t.unflatten(-1, {-1, head_dim}).transpose(1, 2); };
    at::Tensor k = heads(wk(x));
    const at::Tensor q = heads(wq(x));
    k = k.repeat_interleave(q.size(1) / k.size(1), 1);
    const at::Tensor scores = flat ? at::bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) : at::matmul(q, k.transpose(-1, -2));
    return drop(q.size(1) == 1 ? scores.softmax(-1) : scores.softmax(-1) * 2);  // of several heads the shape tells
  }
  int64_t head_dim, kv_heads;
  bool flat;
  nn::Linear wq, wk, wv, wo{8, 8};
  nn::Dropout drop{0.5};
};
TESSERA_MODULE(Weights);

/// Whatever the length of the sequence: as many positions as a rank has features, or all have, make none of them.
TEST(OwnLoopOfParts, WeightsOfAttentionAreNotTakenForFeatures) {
  for (const auto& [head_dim, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{2, 4}, {2, 1}, {4, 2}}) {  // of {2, 1} ranks share keys; {4, 2}: one head each
    for (const int64_t length : {5, 4, 8}) {
      for (const bool flat : {true, false}) {
        const at::Tensor x = at::arange(length * 8, at::kFloat).view({1, length, 8}).sin();
        std::mutex one_at_a_time;
        run_ranks(2, [&](World& world) {
          Weights net = on_meta([&] { return Weights(head_dim, kv_heads, flat); });
          const auto queries = FeatureCut::query_heads(8 / head_dim, kv_heads), keys = FeatureCut::key_value_heads(8 / head_dim, kv_heads);
          const auto tensor = parallelize_module(net, world.group(),
                                                 {{"wq", ColumnParallel{.cut = queries}},
                                                  {"wk", ColumnParallel{.cut = keys}},
                                                  {"wv", ColumnParallel{.cut = keys}},
                                                  {"wo", RowParallel{.cut = queries}}});
          materialize(net, 3);
          for (const int64_t stated : {int64_t{0}, length}) {
            EXPECT_THAT(testing_support::refusal([&] {
                          const nn::SampleScope samples({.seed = 7, .step = 1, .seq_len = stated});
                          (void)net->weights(x);
                        }),
                        AllOf(HasSubstr("Dropout 'drop'"), HasSubstr("part of some features")))
                << length << ' ' << flat;
          }
          at::Tensor mask;
          {
            const std::lock_guard lock(one_at_a_time);
            torch::manual_seed(4);
            mask = net->weights(x).detach().eq(0).to(at::kFloat);
          }
          const at::Tensor all = at::empty({2, mask.numel()});
          comm::all_gather(world.group(), all, mask.view({1, -1}));
          EXPECT_FALSE(all[0].equal(all[1])) << length << ' ' << flat << ", other masks on each";
        });
      }
    }
  }
}

/// Keys without a gradient: what is as wide as all features is no gather of the queries.
TEST(OwnLoopOfParts, WeightsOfAttentionWithFrozenKeysAreNotTakenForAllFeatures) {
  const at::Tensor x = at::arange(12 * 6, at::kFloat).view({1, 12, 6}).sin();
  for (const bool flat : {false, true}) {
    run_ranks(2, [&](World& world) {
      Dropped net = on_meta([] { return Dropped(0.5); });
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
      materialize(net, 3);
      net->down(at::ones({1, 6}));
      const nn::SampleScope samples({.seed = 7, .step = 1});
      const auto scores = [&](const at::Tensor& q) { return flat ? at::mm(q[0], x[0].t()).unsqueeze(0) : at::bmm(q, x.transpose(1, 2)); };
      EXPECT_THAT(testing_support::refusal([&] { net->drop(scores(net->up(x)).softmax(-1)); }), HasSubstr("part of some features"));
    });
  }
}

/// Frozen layers of what has no gradient record no graph.
TEST(OwnLoopOfParts, MasksWithoutAGraphAreThoseOfOneDeviceOrRefused) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const nn::SampleContext stated{.seed = 7, .step = 1};
  run_ranks(2, [&](World& world) {
    ClosedByHand net = on_meta([] { return ClosedByHand(); });
    const auto of_net = parallelize_module(net, world.group(), {{"up", ColumnParallel{}}});
    materialize(net, 3);
    net->group = world.group();
    for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
    {
      const nn::SampleScope samples(stated);
      EXPECT_THAT(testing_support::refusal([&] { net(x); }), AllOf(HasSubstr("Dropout 'after'"), HasSubstr("behind 'up'"), HasSubstr("RowParallel")));
      const at::Tensor rows = net->after(at::ones({2, 8, 12})), of_both = at::empty({4, 8, 12});  // more than up gave, as behind a prompt
      comm::all_gather(world.group(), of_both, rows);
      EXPECT_TRUE(of_both.narrow(0, 0, 2).equal(of_both.narrow(0, 2, 2)));
    }
    net->after(net->before(x));

    Dropped apart = on_meta([] { return Dropped(0.5); });
    const auto of_apart = parallelize_module(apart, world.group(), feed_forward_plan());
    materialize(apart, 3);
    apart->down(at::ones({1, 6}));
    for (const at::Tensor& parameter : apart->parameters()) parameter.set_requires_grad(false);
    const nn::SampleScope samples(stated);
    const at::Tensor h = apart->up(x);
    for (const at::Tensor& inside : {h.unflatten(-1, {-1, 2}), at::ones({6, 5, 5})}) {
      EXPECT_THAT(testing_support::refusal([&] { apart->drop(inside); }), AllOf(HasSubstr("Dropout 'drop'"), HasSubstr("part of some features")));
    }
    const at::Tensor stream = at::ones({2, 5, 9}), dropped = apart->drop(stream), of_all = at::empty({4, 5, 9});
    comm::all_gather(world.group(), of_all, dropped);
    EXPECT_TRUE(of_all.narrow(0, 0, 2).equal(of_all.narrow(0, 2, 2))) << "of the stream, of which another layer is about to be given some";
    apart->down(h);
  });
}

/// What is in memory of its own, or a view, or a view of what is in memory of another.
TEST(OwnLoopOfParts, MasksOfFeaturesThatAreWrittenInPlaceAreThoseOfOneDevice) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  using Write = void (*)(const at::Tensor&);
  const std::vector<Write> writes{[](const at::Tensor& h) { h.relu_(); }, [](const at::Tensor& h) { h.narrow(1, 0, 1).mul_(0); },
                                  [](const at::Tensor& h) { h.flatten(0, 1).relu_(); }};
  const auto pass = [&](Dropped& net, Write write) {
    const nn::SampleScope samples({.seed = 7, .step = 1});
    const at::Tensor h = net->up(x);
    write(h);
    return net->drop(h).detach();
  };
  Dropped one = on_meta([] { return Dropped(0.5); });
  materialize(one, 3);
  for (const auto& [ranks, overlap] : std::vector<std::pair<int, bool>>{{2, false}, {3, false}, {2, true}, {3, true}}) {
    run_ranks(ranks, [&, overlap = overlap](World& world) {
      Dropped net = on_meta([] { return Dropped(0.5); });
      const auto tensor = parallelize_module(net, world.group(), feed_forward_plan(), {.overlap = overlap});
      materialize(net, 3);
      net->down(at::ones({1, net->down->weight.size(1)}));
      const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
      for (const Write write : writes) {
        EXPECT_LT((pass(net, write) - pass(one, write).narrow(2, held.offset[0], held.size[0])).abs().max().item<double>(), 1e-5) << overlap;
      }
    });
  }
}

/// w2(silu(w1(x)) * w3(drop(x))), of which the plan prepares x for w1.
struct GatedDropImpl : nn::Module {
  explicit GatedDropImpl(int64_t hidden) : w1(6, hidden), w3(6, hidden), w2(hidden, 6) {
    register_module("w1", w1);
    register_module("w3", w3);
    register_module("w2", w2);
    register_module("drop", drop);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor a = w1(x);
    return w2(at::silu(a) * w3(drop(x)));
  }
  nn::Linear w1, w3, w2;
  nn::Dropout drop{0.5};
};
TESSERA_MODULE(GatedDrop);

struct AroundGatedDropImpl : nn::Module {
  explicit AroundGatedDropImpl(int64_t hidden) : in(6, 6), gated(hidden) {
    register_module("in", in);
    register_module("gated", gated);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return gated(in(x)); }
  nn::Linear in;
  GatedDrop gated;
};
TESSERA_MODULE(AroundGatedDrop);

TEST(OwnLoopOfParts, TheStreamIsNotTakenForFeaturesThatAreMadeOfIt) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const nn::SampleScope samples({.seed = 7, .step = 1});
  const TensorLayout copied = TensorLayout::Copied;
  const ParallelPlan plan{{"gated", PrepareInput{.from = TensorLayout::Replicated, .to = copied, .layers = {"w1"}}},
                          {"gated.w1", ColumnParallel{.input = copied}},
                          {"gated.w3", ColumnParallel{.input = copied}},
                          {"gated.w2", RowParallel{}}};
  for (const int64_t hidden : {12, 18, 24}) {  // with 12 on two ranks and 18 on three a part is as wide as the stream
    AroundGatedDrop one = on_meta([&] { return AroundGatedDrop(hidden); });
    materialize(one, 3);
    const at::Tensor want = one(x).detach();
    for (const auto& [ranks, overlap] : std::vector<std::pair<int, bool>>{{2, false}, {3, false}, {2, true}, {3, true}}) {
      run_ranks(ranks, [&, overlap = overlap](World& world) {
        const nn::SampleScope here({.seed = 7, .step = 1});
        AroundGatedDrop net = on_meta([&] { return AroundGatedDrop(hidden); });
        const auto tensor = parallelize_module(net, world.group(), plan, {.overlap = overlap});
        materialize(net, 3);
        for (const bool learns : {true, false}) {
          for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(learns);
          EXPECT_LT((net(x).detach() - want).abs().max().item<double>(), 1e-5) << hidden << ' ' << overlap << ' ' << learns;
        }
      });
    }
  }
}

/// Two feed-forward layers.
struct PairsImpl : nn::Module {
  PairsImpl() {
    register_module("up", up);
    register_module("down", down);
    register_module("up2", up2);
    register_module("down2", down2);
    register_module("drop", drop);
    nn::assign_paths(*this);
  }
  nn::Linear up{6, 12}, down{12, 6}, up2{6, 12}, down2{12, 6};
  nn::Dropout drop{0.5};
};
TESSERA_MODULE(Pairs);

ParallelPlan pairs_plan() { return {{"up*", ColumnParallel{}}, {"down*", RowParallel{}}}; }

/// A row-wise layer has been called since; or the graph ends before the layer.
TEST(OwnLoopOfParts, MasksOfFeaturesThatAreUsedLaterAreThoseOfOneDeviceOrRefused) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  enum class Mask { Part, Whole, Refused };
  struct Program {
    bool learns;
    Mask mask;
    at::Tensor (*run)(PairsImpl&, const at::Tensor& x);  // what is dropped
  };
  const std::vector<Program> programs{
      {true, Mask::Part,
       [](PairsImpl& net, const at::Tensor& x) {
         const at::Tensor h = at::gelu(net.up(x)), y = net.down(h);
         net.down2(at::gelu(net.up2(y)));
         return h;
       }},
      {true, Mask::Refused,
       [](PairsImpl& net, const at::Tensor& x) {
         const at::Tensor h = at::gelu(net.up(x)), y = net.down(h);
         return h.detach();
       }},
      {true, Mask::Refused, [](PairsImpl& net, const at::Tensor& x) { return at::gelu(net.up(x)).detach().requires_grad_(); }},
      {true, Mask::Refused, [](PairsImpl& net, const at::Tensor& x) { return at::gelu(net.up(x).detach().requires_grad_()); }},
      {false, Mask::Refused,
       [](PairsImpl& net, const at::Tensor& x) {
         const at::Tensor h = at::gelu(net.up(x)), y = net.down(h);
         return h;
       }},
      {false, Mask::Refused,
       [](PairsImpl& net, const at::Tensor& x) {
         const at::Tensor h = at::gelu(net.up(x)), y = net.down2(h * 0);
         return h;
       }},
      {true, Mask::Whole, [](PairsImpl& net, const at::Tensor& x) { return x + 0.5 * net.down(at::gelu(net.up(x))); }},
      {true, Mask::Whole, [](PairsImpl& net, const at::Tensor& x) { return net.down(at::gelu(net.up(x))).detach(); }},
      {false, Mask::Whole, [](PairsImpl& net, const at::Tensor& x) { return net.down(at::gelu(net.up(x))); }},
  };
  const auto pass = [&](Pairs& net, const Program& program) {
    const nn::SampleScope samples({.seed = 7, .step = 1});
    for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(program.learns);
    const at::Tensor given = program.run(*net, x);
    return net->drop(given).detach();
  };
  Pairs one = on_meta([] { return Pairs(); });
  materialize(one, 3);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      for (size_t i = 0; i < programs.size(); ++i) {
        SCOPED_TRACE(i);
        Pairs net = on_meta([] { return Pairs(); });
        const auto tensor = parallelize_module(net, world.group(), pairs_plan());
        materialize(net, 3);
        net->down(at::ones({1, net->down->weight.size(1)}));
        const Box& held = nn::slice_of(net->up->weight).boxes.at(0);
        if (programs[i].mask == Mask::Refused) {
          EXPECT_THAT(testing_support::refusal([&] { pass(net, programs[i]); }),
                      AllOf(HasSubstr("Dropout 'drop'"), HasSubstr("behind 'up'"), HasSubstr("Gives{.layout = TensorLayout::Replicated}")));
          continue;
        }
        at::Tensor want;
        {
          static std::mutex one_at_a_time;
          const std::lock_guard lock(one_at_a_time);
          want = pass(one, programs[i]);
        }
        if (programs[i].mask == Mask::Part) want = want.narrow(2, held.offset[0], held.size[0]);
        EXPECT_LT((pass(net, programs[i]) - want).abs().max().item<double>(), 1e-5);
      }
      // Of another pass nothing is left; and a plan may say what nobody can tell.
      Pairs net = on_meta([] { return Pairs(); });
      ParallelPlan plan = pairs_plan();
      const auto tensor = parallelize_module(net, world.group(), plan);
      materialize(net, 3);
      for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
      for (const int64_t step : {1, 2}) {
        const nn::SampleScope samples({.seed = 7, .step = step});
        EXPECT_NO_THROW(net->down(at::gelu(net->up(net->drop(x * 2)))));
      }
      Pairs said = on_meta([] { return Pairs(); });
      plan.emplace_back("drop", Gives{.layout = TensorLayout::Replicated});
      const auto of_said = parallelize_module(said, world.group(), plan);
      materialize(said, 3);
      const Program sum{false, Mask::Whole, [](PairsImpl& net, const at::Tensor& x) { return x + net.down(at::gelu(net.up(x))); }};
      EXPECT_NO_THROW(pass(said, sum));
      if (ranks == 2) EXPECT_THAT(testing_support::refusal([&] { pass(net, sum); }), HasSubstr("behind 'up'"));
      if (ranks == 3) return;
      Dropped uneven = on_meta([] { return Dropped(0.5, 13); });  // 7 and 6
      const auto of_uneven = parallelize_module(uneven, world.group(), feed_forward_plan());
      materialize(uneven, 3);
      for (const at::Tensor& parameter : uneven->parameters()) parameter.set_requires_grad(false);
      const nn::SampleScope samples({.seed = 7, .step = 1});
      const at::Tensor y = uneven->down(at::gelu(uneven->up(x)));
      EXPECT_THAT(testing_support::refusal([&] { uneven->after(x + y); }), HasSubstr("behind 'up'")) << "on every rank";
    });
  }
}

/// As pipeline::split records the pass, and gives a stage what has no graph.
TEST(OwnLoopOfParts, MasksOfWhatAStageIsGivenAreThoseOfItsRecording) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  const nn::SampleContext stated{.seed = 7, .step = 1};
  Dropped one = on_meta([] { return Dropped(0.5); });
  materialize(one, 3);
  at::Tensor h, y, dropped_h, dropped_y;
  {
    const nn::SampleScope samples(stated);
    h = one->up(x).detach(), y = one->down(at::gelu(h)).detach();
    dropped_h = one->drop(at::gelu(h)), dropped_y = one->after(y);
  }
  for (const int ranks : {2, 3}) {
    for (const bool learns : {true, false}) {
      run_ranks(ranks, [&](World& world) {
        const nn::SampleScope samples(stated);
        Dropped recorded = on_meta([] { return Dropped(0.5); });
        const auto of_recorded = parallelize_module(recorded, world.group(), feed_forward_plan());
        for (const at::Tensor& parameter : recorded->parameters()) parameter.set_requires_grad(learns);
        const Box held = nn::slice_of(recorded->up->weight).boxes.at(0);
        const auto own = [&](const at::Tensor& all) { return all.narrow(2, held.offset[0], held.size[0]); };
        const comm::ShapesAlone shapes_alone;
        const at::Tensor shape = at::empty({2, 5, 6}, at::kMeta);
        for (int recording = 0; recording < 2; ++recording) {
          recorded->after(shape);
          recorded->down(recorded->drop(at::gelu(recorded->up(shape))));
        }
        const auto leaf = [&](const at::Tensor& sent) { return sent.clone().set_requires_grad(learns); };
        EXPECT_TRUE(at::equal(recorded->drop(leaf(own(at::gelu(h)))), own(dropped_h)));
        EXPECT_TRUE(at::equal(recorded->drop(at::gelu(leaf(own(h)))), own(dropped_h)));
        EXPECT_TRUE(at::equal(recorded->after(leaf(y)), dropped_y));
        {
          const nn::SampleScope elsewhere({.seed = 7, .step = 2});
          recorded->drop(shape);  // of the stream
        }
        EXPECT_THAT(testing_support::refusal([&] { recorded->drop(leaf(own(h))); }), HasSubstr("nobody can tell"));
      });
    }
  }
}

TEST(OwnLoopOfParts, RepeatedFeaturesAreNotTakenForAll) {
  const at::Tensor x = at::arange(2 * 5 * 6, at::kFloat).view({2, 5, 6}).sin();
  run_ranks(2, [&](World& world) {
    Dropped net = on_meta([] { return Dropped(0.5); });
    const auto tensor = parallelize_module(net, world.group(), feed_forward_plan());
    materialize(net, 3);
    const nn::SampleScope samples({.seed = 7, .step = 1});
    const at::Tensor h = net->up(x);
    for (const at::Tensor& repeated : {h.repeat_interleave(2, -1), at::cat({h, h}, -1), h.repeat({1, 1, 2})}) {
      EXPECT_THAT(testing_support::refusal([&] { net->drop(repeated); }), HasSubstr("part of some features"));
    }
    // A gather of the program's own, whose result is arranged by views.
    const at::Tensor all = OwnGather::apply(h, world.group()).unflatten(0, {2, 2}).permute({1, 2, 0, 3}).reshape({2, 5, 12});
    const at::Tensor rows = net->drop(all).detach(), of_both = at::empty({4, 5, 12});
    comm::all_gather(world.group(), of_both, rows.contiguous());
    EXPECT_TRUE(of_both.narrow(0, 0, 2).equal(of_both.narrow(0, 2, 2)));
  });
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
