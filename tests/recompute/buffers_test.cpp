// Buffers that a recomputed forward writes: the second pass finds what the first one found, and leaves them as they were.

#include <functional>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tessera/recompute/recompute.h"
#include "tests/recompute/net.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Advances u by a step of a power iteration, and scales by it (spectral norm).
struct PowerImpl : nn::Module {
  explicit PowerImpl(at::Tensor given = {}) : a(8, 8) {
    register_module("a", a);
    u = register_buffer("u", given.defined() ? given : at::ones({8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      u.copy_(at::mv(a->weight.detach(), u));
      u.div_(u.norm() + 1e-6);
    }
    if (fails && nn::recomputing()) throw std::runtime_error("out of luck");
    const at::Tensor y = x + a((x * u.clone()).sin());
    if (follows) {
      const at::NoGradGuard no_grad;
      u.mul_(1.5);
    }
    return follows ? y.sin() : y;
  }
  nn::Linear a;
  at::Tensor u;
  bool fails = false, follows = false;
};
TESSERA_MODULE(Power);

/// libtorch's BatchNorm counts no write of its statistics, ours does.
struct NormedImpl : nn::Module {
  NormedImpl() : a(8, 8), plain(8), cumulative(torch::nn::BatchNormOptions(8).momentum(std::nullopt)), ours(torch::nn::BatchNormOptions(8)) {
    register_module("a", a);
    register_module("plain", plain);
    register_module("cumulative", cumulative);
    register_module("ours", ours);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + plain->forward(a(cumulative->forward(ours(x)).sin())).sin();
  }
  nn::Linear a;
  torch::nn::BatchNorm1d plain, cumulative;
  nn::SyncBatchNorm ours;
  int calls = 0;
};
TESSERA_MODULE(Normed);

/// Gives its buffer other memory.
struct ReplacingImpl : nn::Module {
  ReplacingImpl() : a(8, 8) {
    register_module("a", a);
    u = register_buffer("u", at::ones({8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    u.set_data(u * 0.75 + 0.5);
    const at::Tensor y = (a(x) * u.clone()).sin();
    {
      const at::NoGradGuard no_grad;
      u.add_(0.125);
    }
    return x + (y * u.clone()).sin();
  }
  nn::Linear a;
  at::Tensor u;
};
TESSERA_MODULE(Replacing);

/// Two buffers that change places: what one found is the other's memory, which another pass writes. With `lends`, the second is nobody's buffer.
/// `clears`: what u was is written in the same call; else the next call writes it.
template <bool lends, bool clears>
struct AlternatingImpl : nn::Module {
  AlternatingImpl() : a(8, 8) {
    register_module("a", a);
    u = register_buffer("u", at::ones({8}));
    spare = lends ? at::zeros({8}) : register_buffer("spare", at::zeros({8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      spare.copy_(u * 0.75 + 0.5);
      const at::Tensor one = u.data(), other = spare.data();
      u.set_data(other);
      spare.set_data(one);
    }
    const at::Tensor y = (a(x) * u.clone()).sin();
    if (clears) {
      const at::NoGradGuard no_grad;
      spare.zero_();  // what u was
    }
    return x + y;
  }
  nn::Linear a;
  at::Tensor u, spare;
};
template <bool lends, bool clears = true>
struct Alternating : torch::nn::ModuleHolder<AlternatingImpl<lends, clears>> {
  using torch::nn::ModuleHolder<AlternatingImpl<lends, clears>>::ModuleHolder;
  at::Tensor operator()(const at::Tensor& x) { return nn::call(*this->get(), x); }
};

template <class Layer>
struct RowImpl : nn::Module {
  explicit RowImpl(int count) {
    torch::nn::ModuleList list;
    for (int i = 0; i < count; ++i) list->push_back(layers.emplace_back().ptr());
    register_module("layers", list);
    nn::assign_paths(*this);
    int64_t n = 0;
    const at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(at::sin(at::arange(p.numel(), at::kFloat) + static_cast<double>(++n)).view_as(p) * 0.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (auto& layer : layers) h = layer(h);
    return h;
  }
  std::vector<Layer> layers;
};
template <class Layer>
struct Row : torch::nn::ModuleHolder<RowImpl<Layer>> {
  using torch::nn::ModuleHolder<RowImpl<Layer>>::ModuleHolder;
  at::Tensor operator()(const at::Tensor& x) { return nn::call(*this->get(), x); }
};

struct State {
  std::vector<at::Tensor> values;  ///< gradients, then buffers
  std::vector<int64_t> versions;   ///< of buffers
};

State state_of(torch::nn::Module& net) {
  State state;
  for (const auto& p : net.parameters()) state.values.push_back(p.grad().clone());
  for (const auto& b : net.buffers()) {
    state.values.push_back(b.clone());
    state.versions.push_back(b._version());
  }
  return state;
}

void expect_same_state(const State& got, const State& want) {
  ASSERT_EQ(got.values.size(), want.values.size());
  for (size_t i = 0; i < got.values.size(); ++i) EXPECT_TRUE(at::equal(got.values[i], want.values[i])) << i;
  EXPECT_EQ(got.versions, want.versions);
}

/// Two steps of three micro-batches whose graphs are alive together; one of the graphs is kept for another backward.
template <class Layer>
State train(const std::vector<RecomputeOptions>& again) {
  Row<Layer> net(4);
  Attachment attached;
  for (const auto& options : again) attached.add(recompute(*net, options));
  for (int step = 0; step < 2; ++step) {
    std::vector<at::Tensor> losses;
    for (int64_t rows = 2; rows <= 4; ++rows) losses.push_back(net(input(rows)).pow(2).sum());
    losses[1].backward({}, /*retain_graph=*/true);
    losses[0].backward();
    losses[1].backward();
    losses[2].backward();
  }
  return state_of(*net);
}

template <class Layer>
void expect_no_difference() {
  const State plain = train<Layer>({});
  const RecomputeOptions keep{.mode = RecomputeMode::Selective, .keep = {"mm", "addmm", "clone", "native_batch_norm"}};
  const std::map<std::string, std::vector<RecomputeOptions>> cases{{"full", {{}}},
                                                                   {"segment", {{.segment = 2}}},
                                                                   {"keep", {keep}},
                                                                   {"nested", {{}, {.modules = ""}}},
                                                                   {"nested, keep", {keep, {.modules = ""}}},
                                                                   {"whole", {{.modules = ""}}}};
  for (const auto& [name, options] : cases) {
    SCOPED_TRACE(name);
    expect_same_state(train<Layer>(options), plain);
  }
}

TEST(RecomputeBuffers, APowerIterationIsThatOfTheFirstPass) { expect_no_difference<Power>(); }
TEST(RecomputeBuffers, RunningStatisticsAreUpdatedOnce) { expect_no_difference<Normed>(); }
TEST(RecomputeBuffers, ABufferThatIsGivenOtherMemory) { expect_no_difference<Replacing>(); }
TEST(RecomputeBuffers, BuffersThatChangePlaces) {
  expect_no_difference<Alternating</*lends=*/false>>();
  expect_no_difference<Alternating</*lends=*/false, /*clears=*/false>>();
}
TEST(RecomputeBuffers, ABufferThatChangesPlacesWithWhatIsNone) {
  expect_no_difference<Alternating</*lends=*/true>>();
  const auto from_the_last = [](bool again) {
    Row<Alternating</*lends=*/true>> net(2);
    const Attachment attached = again ? recompute(*net) : Attachment();
    for (int step = 0; step < 2; ++step) {
      std::vector<at::Tensor> losses;
      for (int64_t rows = 2; rows <= 4; ++rows) losses.push_back(net(input(rows)).pow(2).sum());
      while (!losses.empty()) {
        losses.back().backward();
        losses.pop_back();
      }
    }
    return state_of(*net);
  };
  expect_same_state(from_the_last(true), from_the_last(false));
}

TEST(RecomputeBuffers, AKeptOutputStandsInForTheWriteOfItsOperator) {
  Normed net;
  const auto again = recompute(net, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"native_batch_norm"}});
  net(input()).sum().backward();
  EXPECT_EQ(net->calls, 2);
  EXPECT_EQ(net->plain->num_batches_tracked.item<int64_t>(), 1);
}

TEST(RecomputeBuffers, RunningStatisticsOfRanks) {
  for (const int world : {2, 3}) {
    comm::run_ranks(world, [&](comm::World& ranks) {
      const comm::Group group = ranks.group();
      const auto pass = [&](bool recomputed) {
        Row<Normed> net(2);
        nn::synchronize_batch_norms(*net, group);
        const Attachment attached = recomputed ? recompute(*net) : Attachment();
        for (int step = 0; step < 2; ++step) net(input(2 + group.rank()) * (step + 1.0)).pow(2).sum().backward();
        return state_of(*net);
      };
      const State plain = pass(false);
      expect_same_state(pass(true), plain);
    });
  }
}

TEST(RecomputeBuffers, ASecondPassThatFailsLeavesThemAsTheyWere) {
  Power power;
  const auto again = recompute(power, {.modules = ""});
  const at::Tensor x = input().requires_grad_();
  const at::Tensor loss = power(x).sum();
  power(x);
  const at::Tensor before = power->u.clone();
  const int64_t version = power->u._version();
  power->fails = true;
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_TRUE(at::equal(power->u, before));
  EXPECT_EQ(power->u._version(), version);
  power->fails = false;
  loss.backward();
  EXPECT_TRUE(at::equal(power->u, before));
}

/// Of two modules on one buffer: what a graph beside them has saved of it stays good, for it is written back.
TEST(RecomputeBuffers, OnesThatModulesShareAndThatAnotherGraphHolds) {
  const auto pass = [](bool recomputed, bool view) {
    const at::Tensor whole = at::arange(16, at::kFloat).mul(0.1).cos();
    const at::Tensor u = whole.narrow(0, 0, 8);
    Power first(u), second(view ? whole.narrow(0, 0, 8) : u);
    Attachment attached;
    if (recomputed) {
      attached.add(recompute(first, {.modules = ""}));
      attached.add(recompute(second, {.modules = ""}));
    }
    State state;
    const at::NoGradGuard no_grad;
    for (auto* power : {&first, &second}) {
      for (auto& p : (*power)->parameters()) p.copy_(at::sin(at::arange(p.numel(), at::kFloat)).view_as(p));
    }
    const at::AutoGradMode on(true);
    const at::Tensor x = input().requires_grad_();
    const at::Tensor beside = x * whole.clone().narrow(0, 0, 8);
    const at::Tensor y = second(first(x));
    const at::Tensor saved = x * whole.narrow(0, 8, 8);
    (y.pow(2).sum() + beside.sum()).backward();
    saved.sum().backward();
    state.values = {x.grad(), whole.clone(), first->a->weight.grad(), second->a->weight.grad()};
    state.versions = {whole._version()};
    return state;
  };
  for (const bool view : {false, true}) expect_same_state(pass(true, view), pass(false, view));
}

/// Writes its buffer when it is told to.
struct ConditionalImpl : nn::Module {
  ConditionalImpl() { table = register_buffer("table", at::zeros({8})); }
  at::Tensor forward(const at::Tensor& x) {
    if (writes()) {
      const at::NoGradGuard no_grad;
      replaces ? table.set_data(at::full({8}, 0.7)) : static_cast<void>(table.fill_(0.7));
    }
    ++calls;
    return (x * table.clone()).sin();
  }
  at::Tensor table;
  std::function<bool()> writes;
  bool replaces = false;
  int calls = 0;
};
TESSERA_MODULE(Conditional);

TEST(RecomputeBuffers, ATableThatIsMadeOnceIsFoundMade) {
  for (const bool replaces : {false, true}) {
    Conditional module;
    module->replaces = replaces;
    const auto* const impl = module.get();
    module->writes = [impl] { return impl->calls == 0; };
    const auto again = recompute(module, {.modules = ""});
    const at::Tensor x = input().requires_grad_();
    const at::Tensor loss = module(x).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor want = (x.detach() * 0.7).cos() * 0.7;
    EXPECT_TRUE(at::allclose(x.grad(), want));
    x.mutable_grad().reset();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(at::allclose(x.grad(), want));
    EXPECT_TRUE(at::equal(module->table, at::full({8}, 0.7)));
    module->table.zero_();
    EXPECT_THAT(refusal([&] { loss.backward(); }), AllOf(HasSubstr("does not write buffer 'table'"), HasSubstr("written again since")));
  }
}

TEST(RecomputeBuffers, ATableThatIsMadeOnceIsFoundMadeWithinAnotherPass) {
  struct AroundImpl : nn::Module {
    AroundImpl() { register_module("inner", inner); }
    at::Tensor forward(const at::Tensor& x) { return inner(x).tanh(); }
    Conditional inner;
  };
  const auto module = std::make_shared<AroundImpl>();
  const auto* const impl = module->inner.get();
  module->inner->writes = [impl] { return impl->calls == 0; };
  const auto within = recompute(*module, {.modules = "inner"}), around = recompute(*module, {.modules = ""});
  const at::Tensor x = input().requires_grad_();
  nn::call(*module, x).sum().backward();
  const at::Tensor y = x.detach().clone().requires_grad_();
  (y * 0.7).sin().tanh().sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), y.grad()));
}

TEST(RecomputeBuffers, AWriteBehindTheCounterIsSeenAndOneOfTheProgramsBetweenThePassesDoesNoHarm) {
  struct BehindImpl : nn::Module {
    BehindImpl() { u = register_buffer("u", at::ones({8})); }
    at::Tensor forward(const at::Tensor& x) {
      u.data().mul_(0.5);
      return (x * u.clone()).sin();
    }
    at::Tensor u;
  };
  const auto module = std::make_shared<BehindImpl>();
  const auto again = recompute(*module, {.modules = ""});
  const at::Tensor x = input().requires_grad_();
  const at::Tensor loss = nn::call(*module, x).sum();
  module->u.fill_(3);
  loss.backward();
  EXPECT_TRUE(at::allclose(x.grad(), (x.detach() * 0.5).cos() * 0.5));
  EXPECT_TRUE(at::equal(module->u, at::full({8}, 3.0)));
}

TEST(RecomputeBuffers, RefusesAWriteThatTheFirstPassDidNotMake) {
  Conditional module;
  module->set_path("layers.3");
  module->writes = [] { return nn::recomputing(); };
  const auto again = recompute(module, {.modules = ""});
  const at::Tensor loss = module(input().requires_grad_()).sum();
  EXPECT_THAT(refusal([&] { loss.backward(); }),
              AllOf(HasSubstr("recompute 'layers.3'"), HasSubstr("writes buffer 'table', which the first forward pass did not write")));
  EXPECT_TRUE(at::equal(module->table, at::zeros({8})));
}

TEST(RecomputeBuffers, RefusesAWriteOfWhichTheFormerValueIsLost) {
  comm::run_ranks(2, [](comm::World& ranks) {
    struct SummingImpl : nn::Module {
      explicit SummingImpl(const comm::Group& group) : group(group) { sum = register_buffer("sum", at::ones({8})); }
      at::Tensor forward(const at::Tensor& x) {
        comm::all_reduce(group, sum);
        return (x * sum.clone()).sin();
      }
      comm::Group group;
      at::Tensor sum;
    };
    const auto module = std::make_shared<SummingImpl>(ranks.group());
    const auto again = recompute(*module, {.modules = ""});
    EXPECT_THAT(refusal([&] { nn::call(*module, input().requires_grad_()); }), HasSubstr("writes buffer 'sum' past libtorch's operators"));
  });
}

TEST(RecomputeBuffers, OnlyFormerValuesOfWrittenOnesAreKeptAndAPlanCountsThem) {
  struct WideImpl : nn::Module {
    explicit WideImpl(at::Device device) {
      written = register_buffer("written", at::zeros({1024}, device));
      read = register_buffer("read", at::ones({4096}, device));
    }
    at::Tensor forward(const at::Tensor& x) {
      if (writes) {
        const at::NoGradGuard no_grad;
        written.add_(1);
      }
      return (x * read.sum() * written.sum()).exp();
    }
    at::Tensor written, read;
    bool writes = true;
  };
  const auto kept = [](at::Device device, bool writes, bool trains) {
    MemoryTracker tracker;
    const auto module = std::make_shared<WideImpl>(device);
    module->writes = writes;
    module->train(trains);
    const auto again = recompute(*module, {.modules = ""});
    const TrackMemory track(tracker);
    const at::Tensor x = at::ones({4}, device).requires_grad_();
    const at::Tensor y = nn::call(*module, x);
    const int64_t between = tracker.current(MemoryCategory::Activations), most = tracker.peak();
    y.sum().backward();
    return std::make_tuple(between, most, tracker.peak(), tracker.current(MemoryCategory::Activations));
  };
  const auto [between, most, peak, after] = kept(at::kCPU, true, true);
  EXPECT_EQ(between, 4096);
  EXPECT_LT(most, 2 * 4096);
  EXPECT_EQ(after, 0);
  EXPECT_EQ(kept(at::kMeta, true, true), std::make_tuple(between, most, peak, after));
  EXPECT_EQ(std::get<0>(kept(at::kCPU, false, true)), 0);
  EXPECT_EQ(std::get<0>(kept(at::kCPU, true, false)), 0);
}

}  // namespace
}  // namespace tessera
