#pragma once

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

namespace tessera::comm::testing_support {

/// What `rank` sends: small integers, so that sums are exact in any order.
inline at::Tensor values(int rank, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return (at::arange(c10::multiply_integers(shape), at::kLong) % 7 + rank).reshape(shape).to(dtype);
}

inline at::Tensor sum_over(int n, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  auto sum = values(0, shape, dtype);
  for (int rank = 1; rank < n; ++rank) sum = sum + values(rank, shape, dtype);
  return sum;
}

/// The same bits.
inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  if (actual.numel() == 0) return;
  EXPECT_TRUE(actual.view(-1).view(at::kByte).equal(expected.contiguous().view(-1).view(at::kByte)))
      << actual.view(-1).narrow(0, 0, std::min<int64_t>(actual.numel(), 20)) << "\nexpected\n"
      << expected.reshape(-1).narrow(0, 0, std::min<int64_t>(actual.numel(), 20));
}

}  // namespace tessera::comm::testing_support
