#include "tessera/core/hash_tensor.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(HashOfValues, IsOfTheValuesHoweverTheyLie) {
  const at::Tensor values = at::arange(12, at::kFloat).view({3, 4});
  const uint64_t hash = hash_of_values(values);
  EXPECT_EQ(hash_of_values(values.t().contiguous().t()), hash);
  EXPECT_EQ(hash_of_values(values.clone().requires_grad_()), hash);
  EXPECT_NE(hash_of_values(values.t()), hash);
  EXPECT_NE(hash_of_values(values.flip(0)), hash) << "as large a sum, in another order";
  EXPECT_NO_THROW(hash_of_values(at::empty({0})));
}

TEST(HashOfValues, SeesEachPiece) {
  const at::Tensor bytes = at::zeros({(int64_t{3} << 20) + 5}, at::kByte);  // several pieces, and the rest of one
  const uint64_t hash = hash_of_values(bytes);
  for (const int64_t at : {int64_t{0}, (int64_t{1} << 20) - 1, int64_t{1} << 20, int64_t{5} << 19, bytes.numel() - 1}) {
    at::Tensor changed = bytes.clone();
    changed[at] = 1;
    EXPECT_NE(hash_of_values(changed), hash) << at;
  }
  EXPECT_NE(hash_of_values(bytes.slice(0, 0, bytes.numel() - 1)), hash);
}

}  // namespace
}  // namespace tessera
