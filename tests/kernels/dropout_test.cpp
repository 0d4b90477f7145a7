#include "tessera/kernels/dropout.h"

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/kernels/reference.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

const uint64_t key = CounterRng(7, "layers.0.dropout").key();

at::Tensor long_range(int64_t begin, int64_t end) { return at::arange(begin, end, at::kLong); }

TEST(Dropout, EqualsTheDefinitionElementByElement) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t dim : {1, 2, 7, 64, 257}) {
      const at::Tensor x = random({5, dim}, dtype), rows = at::tensor({0, 3, 1, 1000000007, 12}, at::kLong);
      expect_same([&](const auto& in) { return dropout(in[0], 0.3, key, rows); }, [&](const auto& in) { return reference::dropout(in[0], 0.3, key, rows); },
                  {x}, tolerance(dtype));
    }
  }
}

TEST(Dropout, DropsTheShareItWasAskedFor) {
  const at::Tensor x = at::ones({500, 400});
  for (const double p : {0.1, 0.5, 0.9}) {
    const at::Tensor out = dropout(x, p, key, long_range(0, 500));
    EXPECT_NEAR((out == 0).to(at::kDouble).mean().item().toDouble(), p, 0.005);
    EXPECT_NEAR(out.max().item().toDouble(), 1 / (1 - p), 1e-5);
  }
}

TEST(Dropout, AnyBlockOfTheTensorHasTheWholeTensorsMask) {
  const int64_t samples = 6, tokens = 10, features = 21;
  const at::Tensor x = random({samples, tokens, features});
  const at::Tensor whole = dropout(x, 0.4, key, dropout_rows(long_range(0, samples), 0, tokens, tokens));
  // Samples 4, 1 (any order), tokens 3..8, features 5..16.
  const at::Tensor part = x.index_select(0, at::tensor({4, 1})).narrow(1, 3, 5).narrow(2, 5, 11);
  const at::Tensor rows = dropout_rows(at::tensor({4, 1}, at::kLong), 3, 5, tokens);
  const at::Tensor expected = whole.index_select(0, at::tensor({4, 1})).narrow(1, 3, 5).narrow(2, 5, 11);
  EXPECT_TRUE(at::equal(dropout(part, 0.4, key, rows, {.offset = 5, .total = features}), expected));
}

TEST(Dropout, OtherKeysGiveOtherMasks) {
  const at::Tensor x = at::ones({4, 64}), rows = long_range(0, 4);
  EXPECT_FALSE(at::equal(dropout(x, 0.5, key, rows), dropout(x, 0.5, CounterRng(7, "layers.1.dropout").key(), rows)));
  EXPECT_TRUE(at::equal(dropout(x, 0.5, key, rows), dropout(x, 0.5, key, rows)));
}

TEST(Dropout, ZeroIsTheIdentityAndEmptyIsEmpty) {
  const at::Tensor x = random({3, 4});
  EXPECT_TRUE(dropout(x, 0, key, long_range(0, 3)).is_same(x));
  EXPECT_EQ(dropout(random({0, 4}), 0.5, key, long_range(0, 0)).numel(), 0);
}

TEST(Dropout, Refusals) {
  const at::Tensor x = random({3, 4});
  EXPECT_THAT(message_of<ConfigError>([&] { dropout(x, 1.0, key, long_range(0, 3)); }), ::testing::HasSubstr("p = 1 must be"));
  EXPECT_THAT(message_of<ConfigError>([&] { dropout(x, 0.5, key, long_range(0, 2)); }), ::testing::HasSubstr("one int64 per row"));
  EXPECT_THAT(message_of<ConfigError>([&] { dropout(x, 0.5, key, long_range(0, 3), {.offset = 2, .total = 5}); }), ::testing::HasSubstr("do not lie"));
}

}  // namespace
}  // namespace tessera::kernels
