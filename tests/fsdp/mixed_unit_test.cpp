#include <gtest/gtest.h>

#include "support.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// Parameters of two dtypes, a frozen one and one without elements in one unit.
struct MixedImpl : nn::Module {
  MixedImpl() {
    narrow = register_parameter("narrow", at::empty({5, 7}));
    wide = register_parameter("wide", at::empty({7, 3}, at::kDouble));
    gain = register_parameter("gain", at::empty({7}, at::kDouble));
    still = register_parameter("still", at::empty({3}, at::kDouble), /*requires_grad=*/false);
    none = register_parameter("none", at::empty({0, 4}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(at::tanh(at::matmul(x, narrow)).to(at::kDouble) * gain, wide) + still + none.sum(); }
  at::Tensor narrow, wide, gain, still, none;
};
TESSERA_MODULE(Mixed);

TEST(FullyShard, SeveralDtypesInOneUnit) {
  Mixed whole;
  backward_of(whole, whole_batch(samples));
  const Gradients expected = named_gradients(*whole);
  for (const int ranks : {2, 3, 8}) {
    run_ranks(ranks, [&](World& world) {
      Mixed net;
      auto sharded = fully_shard(net, world.group());
      ASSERT_EQ(sharded->units().size(), 1u);
      for (int step = 0; step < 2; ++step) {
        sharded->begin_step();
        backward_of(net, part_of(whole_batch(samples), ranks, world.rank()));
        sharded->finish();
        EXPECT_LT(slice_difference(*net, expected), parity);
      }
      EXPECT_EQ(net->wide.grad().scalar_type(), at::kDouble);
    });
  }
}

}  // namespace
}  // namespace tessera
