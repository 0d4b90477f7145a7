#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/modulelist.h>

#include "tessera/comm/differentiable.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/fp8.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/router.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/recompute/recompute.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Attention with two heads of 4 features and a feed-forward part.
struct LayerImpl : nn::Module {
  LayerImpl() : qkv(8, 24), up(8, 32), down(32, 8) {
    register_module("qkv", qkv);
    register_module("core", core);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).unflatten(-1, {3, 2, 4}).unbind(2);
    const at::Tensor h = x + core(parts[0], parts[1], parts[2], std::nullopt, std::nullopt).flatten(-2);
    return h + down(at::gelu(up(h)));
  }
  nn::Linear qkv, up, down;
  nn::AttentionCore core;
};
TESSERA_MODULE(Layer);

struct StackImpl : nn::Module {
  explicit StackImpl(int n) {
    torch::nn::ModuleList list;
    for (int i = 0; i < n; ++i) list->push_back(layers.emplace_back().ptr());
    register_module("layers", list);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (auto& layer : layers) h = layer(h);
    return h;
  }
  std::vector<Layer> layers;
};
TESSERA_MODULE(Stack);

/// How often each operator ran.
struct Runs : nn::OperatorHooks {
  void call(nn::OperatorCall& operation) override {
    ++of[operation.name()];
    operation.run();
  }
  std::map<std::string, int> of;
};

struct Step {
  std::vector<at::Tensor> gradients;
  std::map<std::string, int> runs;
  int64_t kept = 0;  ///< bytes alive between the passes
};

Step step(Stack& stack) {
  Step result;
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  stack->zero_grad();
  const auto runs = std::make_shared<Runs>();
  const nn::OperatorScope counted(runs);
  const at::Tensor loss = stack(at::sin(at::arange(2 * 16 * 8, at::kFloat)).view({2, 16, 8})).pow(2).sum();
  result.kept = tracker.current();
  loss.backward();
  for (const auto& p : stack->parameters()) result.gradients.push_back(p.grad().clone());
  result.runs = runs->of;
  return result;
}

void expect_same(const Step& got, const Step& want) {
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < got.gradients.size(); ++i) EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i])) << i;
}

constexpr auto kAttention = "aten::_scaled_dot_product_flash_attention_for_cpu";

TEST(Selective, RecomputesTheAttentionCoresAlone) {
  Stack stack(3);
  const Step plain = step(stack);
  EXPECT_EQ(plain.runs.at(kAttention), 3);
  const auto again = recompute(stack, {.mode = RecomputeMode::Selective});
  const Step selective = step(stack);
  expect_same(selective, plain);
  EXPECT_EQ(selective.runs.at(kAttention), 6);
  EXPECT_EQ(selective.runs.at("aten::addmm"), plain.runs.at("aten::addmm"));
}

TEST(Selective, KeptOperatorsDoNotRunAgain) {
  Stack stack(3);
  const Step plain = step(stack);
  const int forward_products = 3 * 3;
  int64_t full = 0;
  {
    const auto again = recompute(stack);
    const Step all = step(stack);
    expect_same(all, plain);
    full = all.kept;
    // The last product of a block saves nothing but its input: recomputation ends before it runs.
    EXPECT_EQ(all.runs.at("aten::addmm"), plain.runs.at("aten::addmm") + forward_products - 3);
    EXPECT_EQ(all.runs.at(kAttention), 6);
  }
  {
    const auto again = recompute(stack, {.mode = RecomputeMode::Selective, .keep = {"addmm"}});
    const Step kept = step(stack);
    expect_same(kept, plain);
    EXPECT_EQ(kept.runs.at("aten::addmm"), plain.runs.at("aten::addmm"));
    EXPECT_EQ(kept.runs.at(kAttention), 6);
    EXPECT_EQ(kept.runs.at("aten::gelu"), 6);
    EXPECT_GT(kept.kept, full);
    EXPECT_LT(kept.kept, plain.kept);
  }
  const auto again = recompute(stack, {.mode = RecomputeMode::Selective, .keep = {kAttention}});
  const Step kept = step(stack);
  expect_same(kept, plain);
  EXPECT_EQ(kept.runs.at(kAttention), 3);
}

/// An fp8 product on a CPU may be made of one in fp32. Which operators are kept does not depend on that.
TEST(Selective, KeepsNothingThatAKernelCallsInside) {
  struct ProductImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) { return kernels::fp8_linear(x, x.detach(), std::nullopt, at::kFloat, kernels::Fp8Scaling::Row).exp(); }
  };
  const auto runs_with = [](const std::string& kept) {
    auto product = std::make_shared<ProductImpl>();
    const auto again = recompute(*product, {.modules = "", .mode = RecomputeMode::Selective, .keep = {kept}});
    const auto runs = std::make_shared<Runs>();
    const nn::OperatorScope counted(runs);
    const at::Tensor y = nn::call(*product, at::cos(at::arange(5 * 24, at::kFloat)).view({5, 24}).requires_grad_());
    runs->of.clear();
    y.sum().backward();
    return runs->of["aten::_scaled_mm"];
  };
  EXPECT_EQ(runs_with("mm"), 2) << "the product itself runs again, and once for the gradient";
  EXPECT_EQ(runs_with("_scaled_mm"), 1);
}

TEST(Selective, NestsInsideFull) {
  Stack stack(2);
  const Step plain = step(stack);
  const auto inner = recompute(stack, {.mode = RecomputeMode::Selective, .keep = {"addmm"}});
  const auto outer = recompute(stack, {.modules = ""});
  expect_same(step(stack), plain);
}

struct DroppingImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor q = x.view({1, 1, 3, 4});
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, q, q, /*dropout_p=*/0.5));
  }
};
TESSERA_MODULE(Dropping);

TEST(Selective, RefusesToKeepWhatDropsAtRandom) {
  Dropping module;
  module->set_path("layers.0");
  const auto again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"_scaled_dot_product_flash_attention_for_cpu"}});
  try {
    module(at::ones({3, 4}).requires_grad_());
    FAIL();
  } catch (const std::exception& e) {
    EXPECT_THAT(e.what(), HasSubstr("recompute 'layers.0': aten::_scaled_dot_product_flash_attention_for_cpu drops at random"));
  }
}

struct InPlaceImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, x).add_(1).exp(); }
};
TESSERA_MODULE(InPlace);

TEST(Selective, RefusesAnOutputThatIsChangedInPlace) {
  InPlace module;
  module->set_path("layers.0");
  const auto again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"mm"}});
  try {
    module(at::eye(3).requires_grad_());
    FAIL();
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("recompute 'layers.0': the output of aten::mm is changed in place"));
  }
}

/// Collectives write in place, too.
struct SummedImpl : nn::Module {
  explicit SummedImpl(comm::Group group) : group(std::move(group)) {}
  at::Tensor forward(const at::Tensor& x) { return comm::differentiable::all_reduce(group, x.exp()).sin(); }
  comm::Group group;
};
TESSERA_MODULE(Summed);

TEST(Selective, RefusesAnOutputThatACollectiveWrites) {
  for (const int ranks : {2, 3}) {
    comm::run_ranks(ranks, [](comm::World& world) {
      const auto refused = [&](auto& module, const char* kept, const at::Tensor& x) {
        module->set_path("layers.0");
        const auto again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = {kept}});
        EXPECT_THAT([&] { module(x.detach().requires_grad_()); },
                    ::testing::ThrowsMessage<ConfigError>(HasSubstr(detail::concat("the output of aten::", kept, " is changed in place"))));
      };
      Summed sum(world.group());
      refused(sum, "clone", at::eye(3));
      nn::Router router(nn::RouterOptions{.dim = 8, .experts = 5, .per_token = 2});
      router->set_losses({.balance = 0.5, .z = 0.25});
      router->set_peers(world.group());
      const nn::SampleScope scope({.seed = 3, .step = 1, .valid_tokens = 6});
      refused(router, "cat", at::cos(at::arange(48, at::kFloat)).view({6, 8}));

      const at::Tensor x = at::eye(3).requires_grad_();
      const auto again = recompute(sum, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"exp"}});
      sum(x).sum().backward();
      const at::Tensor kept = x.grad();
      x.mutable_grad() = at::Tensor();
      sum->forward(x).sum().backward();
      EXPECT_TRUE(at::equal(kept, x.grad()));
    });
  }
}

/// Whose rows, and whose router's choice and sums, are made in the first pass alone.
struct BesideImpl : nn::Module {
  BesideImpl() : router(nn::RouterOptions{.dim = 8, .experts = 5, .per_token = 2}) {
    register_module("router", router);
    register_module("dropout", dropout);
    router->set_losses({.balance = 0.5, .z = 0.25});
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto [weights, chosen] = router(x.flatten(0, 1));
    router->count_dropped(chosen, chosen.reshape({-1}).bincount({}, 5).clamp_max(3));
    return dropout(x.add(1)).mul(weights.sum(-1).mul(2).to(at::kDouble).view({2, 3, 1})).exp();
  }
  nn::Router router;
  nn::Dropout dropout{0.3};
};
TESSERA_MODULE(Beside);

TEST(Selective, KeepsNothingThatIsNotCalledAgain) {
  for (const kernels::KernelChoices& choice : {kernels::KernelChoices{}, kernels::KernelChoices(kernels::KernelChoice::Reference)}) {
    const kernels::KernelChoiceGuard chosen(choice);
    std::vector<at::Tensor> plain;
    for (const std::vector<std::string>& keep :
         std::vector<std::vector<std::string>>{{}, {"add"}, {"mul"}, {"_to_copy"}, {"sum", "stack"}, {"tessera::choose_experts", "sort", "topk", "mul"}}) {
      Beside module;
      {
        const at::NoGradGuard no_grad;
        module->router->weight.copy_(at::sin(at::arange(40, at::kFloat)).view({5, 8}));
      }
      Attachment again;
      if (!keep.empty()) again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = keep});
      const nn::SampleScope scope({.seed = 3, .step = 1, .valid_tokens = 6});
      const at::Tensor x = at::cos(at::arange(48, at::kFloat)).view({2, 3, 8}).requires_grad_();
      module(x).sum().backward();
      const std::vector<at::Tensor> found{x.grad(), module->router->weight.grad(), module->router->statistics()};
      if (plain.empty()) plain = found;
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], plain[i])) << i << " with " << ::testing::PrintToString(keep);
    }
  }
}

/// Reads on the host how many numbers are of a kind, and goes by what the host knows, as experts do.
struct CountingImpl : nn::Module {
  explicit CountingImpl(bool reads) : reads_(reads) {}
  at::Tensor forward(const at::Tensor& x) {
    if (reads_) (void)host_read_all(x.detach().gt(0).sum(0), 0);
    const at::Tensor order = reads_ ? at::Tensor() : at::tensor(std::vector<int64_t>{3, 1, 0}, at::TensorOptions(at::kCPU).dtype(at::kLong)).to(x.device());
    ++calls;
    return (order.defined() ? x.index_select(0, order) : x).to(at::kDouble).exp();
  }
  int calls = 0;

 private:
  bool reads_;
};
TESSERA_MODULE(Counting);

/// A dry run reads nothing, and what a run on the CPU goes by is there.
TEST(Selective, KeepsNoCopyBetweenTheHostAndADevice) {
  const auto kept = [](at::Device device, bool reads) {
    Counting module(reads);
    const Attachment again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"_to_copy"}});
    const at::Tensor x = at::cos(at::arange(48, at::kFloat)).view({6, 8}).to(device).requires_grad_();
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    const at::Tensor loss = module(x).sum();
    const int64_t bytes = tracker.current();
    loss.backward();
    EXPECT_EQ(module->calls, 2);
    return bytes;
  };
  for (const bool reads : {true, false}) EXPECT_EQ(kept(at::kCPU, reads), kept(at::kMeta, reads)) << reads;
}

/// Adds to other rows each time, of which backward needs none.
struct ChangingImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor part = x.narrow(0, 0, ++calls_).add(x.narrow(0, 0, 1));
    return x.add(x).exp().sum() + part.sum();
  }

 private:
  int64_t calls_ = 0;
};
TESSERA_MODULE(Changing);

TEST(Selective, RefusesAnotherCallInThePlaceOfTheFirst) {
  Changing module;
  module->set_path("layers.0");
  const auto again = recompute(module, {.modules = "", .mode = RecomputeMode::Selective, .keep = {"add"}});
  try {
    module(at::eye(3).requires_grad_()).backward();
    FAIL();
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(),
                HasSubstr("recompute 'layers.0': computed again, it calls aten::add of Float [2, 3], Float [1, 3] where the first forward pass called "
                          "aten::add of Float [1, 3], Float [1, 3]"));
    EXPECT_THAT(e.what(), HasSubstr("aten::add out of recompute.keep"));
  }
}

/// A forward that differentiates: an energy and its slope, as force fields have them.
struct SlopeImpl : nn::Module {
  SlopeImpl() {
    weight = register_parameter("weight", at::sin(at::arange(24, at::kFloat)).view({8, 3}));
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor energy = at::mm(at::tanh(at::mm(x, weight)), weight.t()).square().sum();
    return energy + at::mm(torch::autograd::grad({energy}, {x}, {}, true, /*create_graph=*/true)[0], weight).square().sum();
  }
  at::Tensor weight;
};
TESSERA_MODULE(Slope);

TEST(Selective, AForwardMayDifferentiate) {
  std::vector<std::vector<at::Tensor>> found;
  for (const std::vector<std::string>& keep : std::vector<std::vector<std::string>>{{}, {}, {"mm"}, {"tanh"}}) {
    Slope module;
    Attachment again;
    if (!found.empty()) again = recompute(module, {.modules = "", .mode = keep.empty() ? RecomputeMode::Full : RecomputeMode::Selective, .keep = keep});
    const at::Tensor x = at::sin(at::arange(32, at::kFloat)).view({4, 8}).requires_grad_();
    module(x).backward();
    found.push_back({x.grad(), module->weight.grad()});
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(found.back()[i], found.front()[i])) << (keep.empty() ? "nothing" : keep.front()) << " kept";
  }
}

}  // namespace
}  // namespace tessera
