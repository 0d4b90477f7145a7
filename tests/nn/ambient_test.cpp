#include "tessera/core/ambient.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/comm/call_site.h"
#include "tessera/kernels/choice.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/saved_tensors.h"

// A CPU has no thread of its own in libtorch's engine; but passes inside of passes beyond a depth of 60 go on in another thread, as nodes of a device do.

namespace tessera::nn {
namespace {

constexpr int64_t kDeep = 70;

/// What the innermost of many passes sees.
struct Seen {
  std::thread::id thread;
  std::string site;
  uint64_t seed = 0;
  kernels::KernelChoices kernels{};
  bool recomputing = false;
  std::string own_site, site_behind_its_own;
};

struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t depth, Seen* seen) {
    context->saved_data["depth"] = depth;
    context->saved_data["seen"] = reinterpret_cast<int64_t>(seen);
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const int64_t depth = context->saved_data["depth"].toInt();
    auto* const seen = reinterpret_cast<Seen*>(context->saved_data["seen"].toInt());
    if (depth > 0) {
      const at::AutoGradMode with_graph(true);
      apply(at::ones({2}).requires_grad_(), depth - 1, seen).sum().backward();
    } else {
      *seen = {.thread = std::this_thread::get_id(),
               .site = std::string(comm::CallSite::current()),
               .seed = SampleScope::current().seed,
               .kernels = kernels::kernel_choices(),
               .recomputing = recomputing()};
      {
        const comm::CallSite own("in the pass");
        at::mm(at::ones({3, 4}), at::ones({4, 5}));
        seen->own_site = comm::CallSite::current();
      }
      seen->site_behind_its_own = comm::CallSite::current();
    }
    return {grads[0], {}, {}};
  }
};

Seen from_deep_inside(int64_t depth = kDeep) {
  Seen seen;
  Nested::apply(at::ones({2}).requires_grad_(), depth, &seen).sum().backward();
  return seen;
}

TEST(AmbientTest, FollowsABackwardPassToAnotherThread) {
  const comm::CallSite site("layers.3");
  const SampleScope sample({.seed = 77});
  const kernels::KernelChoiceGuard reference(kernels::KernelChoice::Reference);
  const RecomputingScope again;
  const Seen seen = from_deep_inside();
  ASSERT_NE(seen.thread, std::this_thread::get_id());
  EXPECT_EQ(seen.site, "layers.3");
  EXPECT_EQ(seen.seed, 77u);
  EXPECT_EQ(seen.kernels, kernels::KernelChoice::Reference);
  EXPECT_TRUE(seen.recomputing);
  EXPECT_EQ(seen.own_site, "in the pass");
  EXPECT_EQ(seen.site_behind_its_own, "layers.3");
}

TEST(AmbientTest, AThreadThatDidNotCallBackwardItselfKeepsItsOwnScopes) {
  const comm::CallSite site("layers.3");
  Seen seen;
  for (int64_t depth = 0; depth < kDeep && (depth == 0 || seen.thread == std::this_thread::get_id()); ++depth) seen = from_deep_inside(depth);
  ASSERT_NE(seen.thread, std::this_thread::get_id());
  EXPECT_EQ(seen.site, "layers.3");
  EXPECT_EQ(seen.own_site, "in the pass");
  EXPECT_EQ(seen.site_behind_its_own, "layers.3");
}

TEST(AmbientTest, IsOfTheCallerEachTime) {
  {
    const comm::CallSite site("first");
    EXPECT_EQ(from_deep_inside().site, "first");
  }
  EXPECT_EQ(from_deep_inside().site, "");
  for (int rank = 0; rank < 3; ++rank) {
    std::thread([rank] {
      const std::string name = "rank " + std::to_string(rank);
      const comm::CallSite site(name);
      EXPECT_EQ(from_deep_inside().site, name);
    }).join();
  }
}

TEST(AmbientTest, AScopeInsideAPassIsNotUndoneByOneFurtherIn) {
  const comm::CallSite site("outside");
  const Seen seen = from_deep_inside(/*depth=*/0);
  EXPECT_EQ(seen.thread, std::this_thread::get_id());
  EXPECT_EQ(seen.site, "outside");
  EXPECT_EQ(comm::CallSite::current(), "outside");
}

TEST(AmbientTest, OperatorsOfAnotherThreadAreCounted) {
  const auto counter = std::make_shared<FlopCounter>();
  {
    const OperatorScope counted(counter);
    from_deep_inside();
  }
  EXPECT_EQ(counter->flops(), 2.0 * 3 * 4 * 5);
}

struct SeesProducts : OperatorWatcher {
  int products = 0;
  void before(const c10::OperatorHandle& op, torch::jit::Stack&) override {
    if (op.schema().name() == "aten::mm") ++products;
  }
};

TEST(AmbientTest, WatchersSeeOperatorsOfAnotherThread) {
  const auto watcher = std::make_shared<SeesProducts>();
  OperatorWatch watch(watcher);
  watch.wake();
  from_deep_inside();
  EXPECT_EQ(watcher->products, 1);
}

TEST(AmbientTest, AThreadBesideTheRankSeesNothing) {
  const comm::CallSite site("of the rank");
  const CarryAmbient carried;
  const at::ThreadLocalState state;
  std::string seen = "nothing";
  std::thread([&] {
    const at::ThreadLocalStateGuard as_the_rank(state);
    seen = comm::CallSite::current();
  }).join();
  EXPECT_EQ(seen, "");
}

}  // namespace
}  // namespace tessera::nn
