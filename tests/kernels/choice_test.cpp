// run.kernels by kernel: which operators run, by name, tells whether a choice is of one kernel and of no other.

#include "tessera/kernels/choice.h"

#include <map>
#include <set>

#include <ATen/record_function.h>

#include "tessera/kernels/attention.h"
#include "tessera/kernels/bias_activation.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/embedding_gradient.h"
#include "tessera/kernels/layer_norm.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

/// Operators that `run` calls, and how often each.
std::map<std::string, int> calls_of(const std::function<void()>& run) {
  static thread_local std::map<std::string, int> calls;
  calls.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& ran) -> std::unique_ptr<at::ObserverContext> {
                                                   ++calls[ran.name()];
                                                   return nullptr;
                                                 }).scopes({at::RecordScope::FUNCTION}));
  run();
  at::removeCallback(handle);
  return calls;
}

std::map<Kernel, std::function<void()>> calls_by_kernel() {
  const at::Tensor x = random({6, 8}), like = random({6, 8}, at::kFloat, 2), row = random({8}, at::kFloat, 3), labels = at::arange(6);
  const at::Tensor heads = random({1, 2, 6, 4}), table = random({6, 2});
  const Dispatch where = dispatch(labels.view({6, 1}), 6);
  return {
      {Kernel::attention, [=] { flash_attention(heads, heads, heads, true); }},
      {Kernel::bias_activation, [=] { bias_activation(x, row, Activation::Gelu); }},
      {Kernel::choose_experts, [=] { choose_experts(x, 2); }},
      {Kernel::combine_rows, [=] { combine_rows(x, at::ones({6, 1}), where); }},
      {Kernel::cross_entropy, [=] { cross_entropy_sum(x, labels); }},
      {Kernel::dispatch, [=] { dispatch(labels.view({6, 1}), 6); }},
      {Kernel::dropout, [=] { dropout(x, 0.5, 1, labels); }},
      {Kernel::embedding_gradient, [=] { add_embedding_gradient_(at::zeros({7, 8}), x, labels, -1); }},
      {Kernel::gather_rows, [=] { gather_rows(x, where); }},
      {Kernel::geglu, [=] { geglu(x, like); }},
      {Kernel::layer_norm,
       [=] {
         layer_norm(x, row, row, 1e-5);
         add_layer_norm(x, like, row, row, 1e-5);
       }},
      {Kernel::linear_cross_entropy, [=] { linear_cross_entropy(x, like, labels); }},
      {Kernel::rms_norm,
       [=] {
         rms_norm(x, row, 1e-5);
         add_rms_norm(x, like, row, 1e-5);
       }},
      {Kernel::rope, [=] { rope(heads, table.narrow(0, 0, 2), table.narrow(0, 0, 2)); }},
      {Kernel::swiglu, [=] { swiglu(x, like); }},
  };
}

TEST(KernelChoices, AreOfOneKernelAndOfNoOther) {
  const auto runs = calls_by_kernel();
  EXPECT_EQ(runs.size() + 1, static_cast<size_t>(Kernel::count)) << "each but fp32_products, which is libtorch's operator";
  for (const auto& [kernel, run] : runs) {
    SCOPED_TRACE(static_cast<int>(kernel));
    const auto fused = calls_of(run);
    const auto plain = [&, &run = run] {
      const KernelChoiceGuard all(KernelChoice::Reference);
      return calls_of(run);
    }();
    EXPECT_NE(fused, plain);
    for (const auto& [name, count] : plain) EXPECT_FALSE(name.starts_with("tessera::")) << name;
    for (const auto& [other, ignored] : runs) {
      const KernelChoiceGuard one(KernelChoices().set(other, KernelChoice::Reference));
      EXPECT_EQ(calls_of(run), other == kernel ? plain : fused) << static_cast<int>(other);
      const KernelChoiceGuard rest(KernelChoices(KernelChoice::Reference).set(other, KernelChoice::Auto));
      EXPECT_EQ(calls_of(run), other == kernel ? fused : plain) << static_cast<int>(other);
    }
  }
}

TEST(KernelChoices, AreNamed) {
  EXPECT_EQ(kernel_named("rms_norm"), Kernel::rms_norm);
  EXPECT_EQ(kernel_named("attention"), Kernel::attention);
  EXPECT_EQ(kernel_named("swiglu"), Kernel::swiglu);
  EXPECT_EQ(kernel_named("rms"), std::nullopt);
}

}  // namespace
}  // namespace tessera::kernels
