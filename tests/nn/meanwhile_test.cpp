#include "tessera/nn/meanwhile.h"

#include <memory>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tessera/nn/saved_tensors.h"

namespace tessera::nn {
namespace {

/// A call within which somebody keeps books of what is saved for backward is not mixed with another's.
TEST(Meanwhile, RunsOnceForWhoeverWaitsAndNotWithinAnothersBooks) {
  struct Hooks : SavedTensorHooks {
    std::unique_ptr<SavedTensor> pack(const at::Tensor&) override { return nullptr; }
  };
  int64_t runs = 0;
  Meanwhile beside([&] {
    ++runs;
    return at::ones({1});
  });
  {
    const SavedTensorScope books(std::make_shared<Hooks>());
    EXPECT_FALSE(Meanwhile::any());
    Meanwhile::run();
    EXPECT_EQ(runs, 0);
  }
  EXPECT_TRUE(Meanwhile::any());
  {
    Meanwhile inner([] { return at::zeros({1}); });
    EXPECT_EQ(inner.value().item<float>(), 0);
    EXPECT_FALSE(Meanwhile::any());
  }
  Meanwhile::run();
  EXPECT_FALSE(Meanwhile::any());
  EXPECT_EQ(beside.value().item<float>(), 1);
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace tessera::nn
