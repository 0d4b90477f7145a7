// Micro-batches in flight share a parameter's copy in the type of their products: the same bits, and one copy.

#include "tessera/nn/shared_casts.h"

#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

class SharedCasts : public testing::Test {
 protected:
  SharedCasts() { layer->set_compute_dtype(at::kBFloat16); }

  at::Tensor input(double of) const { return at::arange(15, at::TensorOptions(at::kFloat)).reshape({3, 5}) * of; }
  /// The gradient of the weight after two passes that are in flight together.
  at::Tensor gradient() {
    layer->zero_grad();
    const at::Tensor first = layer->forward(input(0.1)).sum(), second = layer->forward(input(-0.3)).square().sum();
    first.backward();
    second.backward();
    return layer->weight.grad().clone();
  }

  Linear layer{LinearOptions(5, 7)};
};

TEST_F(SharedCasts, OneStorageForAllThatAreInFlight) {
  const ShareCasts scope;
  at::Tensor a = cast_weight(layer->weight, at::kBFloat16), b = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_EQ(a.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(a.is_alias_of(b));
  EXPECT_NE(a.unsafeGetTensorImpl(), b.unsafeGetTensorImpl());
  EXPECT_NE(a.grad_fn(), b.grad_fn());
  EXPECT_TRUE(at::equal(a, layer->weight.detach().to(at::kBFloat16)));
}

TEST_F(SharedCasts, NobodyElseKeepsTheCopy) {
  const ShareCasts scope;
  const c10::weak_intrusive_ptr<c10::StorageImpl> copy = cast_weight(layer->weight, at::kBFloat16).storage().getWeakStorageImpl();
  EXPECT_TRUE(copy.expired());
}

TEST_F(SharedCasts, OutsideOfAScopeEachHasItsOwn) {
  const at::Tensor a = cast_weight(layer->weight, at::kBFloat16), b = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_FALSE(a.is_alias_of(b));
  EXPECT_TRUE(cast_weight(layer->weight, at::kFloat).is_same(layer->weight));
}

TEST_F(SharedCasts, AWrittenParameterIsCastAnew) {
  const ShareCasts scope;
  const at::Tensor a = cast_weight(layer->weight, at::kBFloat16);
  {
    const at::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  const at::Tensor b = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_FALSE(a.is_alias_of(b));
  EXPECT_TRUE(at::equal(b, layer->weight.detach().to(at::kBFloat16)));
}

TEST_F(SharedCasts, AnotherTypeIsAnotherCopy) {
  const ShareCasts scope;
  const at::Tensor a = cast_weight(layer->weight, at::kBFloat16), b = cast_weight(layer->weight, at::kHalf), c = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_EQ(b.scalar_type(), at::kHalf);
  EXPECT_EQ(c.scalar_type(), at::kBFloat16);
}

TEST_F(SharedCasts, GradientsHaveTheSameBits) {
  const at::Tensor apart = gradient();
  const ShareCasts scope;
  EXPECT_TRUE(at::equal(gradient(), apart));
  EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
}

TEST_F(SharedCasts, SoDoThoseOfParametersIn16Bits) {
  layer->to(at::kBFloat16);
  layer->set_compute_dtype(at::kFloat);
  const at::Tensor apart = gradient();
  const ShareCasts scope;
  EXPECT_TRUE(at::equal(gradient(), apart));
}

TEST_F(SharedCasts, AFrozenParameterHasNoGraph) {
  layer->weight.requires_grad_(false);
  const ShareCasts scope;
  const at::Tensor a = cast_weight(layer->weight, at::kBFloat16), b = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_FALSE(a.requires_grad());
  EXPECT_TRUE(a.is_alias_of(b));
}

TEST_F(SharedCasts, EvaluationKeepsNothing) {
  const ShareCasts scope;
  const at::NoGradGuard no_grad;
  const at::Tensor a = cast_weight(layer->weight, at::kBFloat16), b = cast_weight(layer->weight, at::kBFloat16);
  EXPECT_FALSE(a.is_alias_of(b));
}

}  // namespace
}  // namespace tessera::nn
