#include "tessera/kernels/bias_activation.h"

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/embedding_gradient.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

TEST(BiasActivation, EqualsTheReferenceInDoublePrecision) {
  for (const auto activation : {Activation::Silu, Activation::Gelu}) {
    const auto fused = [=](const std::vector<at::Tensor>& in) { return bias_activation(in[0], in[1], activation); };
    const auto plain = [=](const std::vector<at::Tensor>& in) { return reference::bias_activation(in[0], in[1], activation); };
    for (const auto x : {at::kFloat, at::kBFloat16}) {
      for (const auto bias : {at::kFloat, at::kBFloat16}) {
        for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 67, 33}, {130, 1}, {5}, {0, 4}}) {
          expect_same(fused, plain, {random(shape, x) * 3, random({shape.back()}, bias, 2)}, std::max(tolerance(x), tolerance(bias)));
        }
      }
    }
  }
}

TEST(BiasActivation, WithoutABiasIsTheActivation) {
  for (const auto activation : {Activation::Silu, Activation::Gelu}) {
    const auto fused = [=](const std::vector<at::Tensor>& in) { return activate(in[0], activation); };
    const auto plain = [=](const std::vector<at::Tensor>& in) { return activation == Activation::Silu ? at::silu(in[0]) : at::gelu(in[0], "tanh"); };
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 67, 33}, {130, 1}, {5}, {0, 4}, {4, 0}}) {
        expect_same(fused, plain, {random(shape, dtype) * 3}, std::max(2e-6, tolerance(dtype)));
      }
    }
  }
}

TEST(BiasActivation, BitsDoNotDependOnThreads) {
  const at::Tensor x = random({700, 96}), bias = random({96}, at::kFloat, 2), cotangent = random({700, 96}, at::kFloat, 3);
  expect_thread_independent([&] {
    const auto e = evaluate([](const auto& in) { return bias_activation(in[0], in[1], Activation::Gelu); }, {x, bias}, cotangent);
    return std::vector<at::Tensor>{e.result, e.gradients[0], e.gradients[1]};
  });
}

TEST(BiasActivation, RefusesABiasOfAnotherSize) {
  EXPECT_THAT(message_of<ConfigError>([] { bias_activation(random({4, 8}), random({7}), Activation::Gelu); }), ::testing::HasSubstr("one entry per feature"));
}

TEST(GeGlu, EqualsTheReferenceInDoublePrecision) {
  const auto fused = [](const std::vector<at::Tensor>& in) { return geglu(in[0], in[1]); };
  const auto plain = [](const std::vector<at::Tensor>& in) { return reference::geglu(in[0], in[1]); };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 257}, {257, 1}, {0, 4}}) {
      expect_same(fused, plain, {random(shape, dtype) * 3, random(shape, dtype, 2)}, tolerance(dtype));
    }
  }
  const at::Tensor extremes = at::tensor({-1000.0f, -20.0f, 0.0f, 20.0f, 1000.0f});
  expect_close(geglu(extremes, at::ones({5})), at::gelu(extremes, "tanh"), 1e-6, "extremes");
}

TEST(EmbeddingGradient, AddsRowsUpInOrder) {
  const at::Tensor ids = at::tensor({4, 0, 4, 6, 4, 1}, at::kLong);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t dim : {1, 65, 300}) {
      const at::Tensor rows = random({2, 3, dim}, dtype), begun = random({7, dim}, at::kFloat, 2);
      for (const int64_t padding : {-1, 4}) {
        const at::Tensor expected = begun.clone();
        for (int64_t n = 0; n < 6; ++n) {
          if (ids[n].item<int64_t>() != padding) expected[ids[n].item<int64_t>()].add_(rows.view({6, dim})[n].to(at::kFloat));
        }
        const at::Tensor sum = begun.clone();
        add_embedding_gradient_(sum, rows, ids.view({2, 3}), padding);
        EXPECT_TRUE(at::equal(sum, expected)) << dim << " " << padding;
        const KernelChoiceGuard guard(KernelChoice::Reference);
        const at::Tensor plain = begun.clone();
        add_embedding_gradient_(plain, rows, ids.view({2, 3}), padding);
        EXPECT_TRUE(at::equal(plain, expected)) << dim << " " << padding;
      }
    }
  }
  // A sum in 16 bits is rounded when all rows are in it.
  const at::Tensor begun = random({7, 65}, at::kBFloat16, 2), rows = random({6, 65}, at::kBFloat16);
  const at::Tensor expected = begun.to(at::kFloat).index_add(0, ids, rows.to(at::kFloat)).to(at::kBFloat16);
  for (const auto choice : {KernelChoice::Auto, KernelChoice::Reference}) {
    const KernelChoiceGuard guard(choice);
    const at::Tensor sum = begun.clone();
    add_embedding_gradient_(sum, rows, ids, -1);
    EXPECT_TRUE(at::equal(sum, expected));
  }
}

TEST(EmbeddingGradient, RefusesIdsThatAreNoRow) {
  if (asserts_on_device()) GTEST_SKIP() << "CUDA's kernels assert it";
  for (const int64_t id : {6, -1}) {
    const at::Tensor ids = at::tensor({int64_t{4}, id}, at::kLong);
    EXPECT_THAT(message_of<std::exception>([&] { add_embedding_gradient_(at::zeros({6, 2}), random({2, 2}), ids, -2); }),
                ::testing::HasSubstr(of_kernel("no row of 6")));
  }
}

TEST(EmbeddingGradient, BitsDoNotDependOnThreads) {
  const at::Tensor ids = at::arange(4000).remainder(7), rows = random({4000, 200});
  expect_thread_independent([&] {
    const at::Tensor sum = at::zeros({7, 200});
    add_embedding_gradient_(sum, rows, ids, -1);
    return std::vector<at::Tensor>{sum};
  });
}

}  // namespace
}  // namespace tessera::kernels
