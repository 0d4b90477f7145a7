#include "tessera/nn/shared_memory.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/refusal.h"

namespace tessera::nn {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

void check(const torch::nn::Module& module) { refuse_shared_memory("sharding", module, unique_parameters(module)); }

TEST(SharedMemory, OfTwoParametersIsRefusedByName) {
  const at::Tensor table = at::ones({6, 8});
  for (const at::Tensor& other : {table, table.t(), table.narrow(0, 2, 3), table.narrow(1, 2, 3), table.view(-1).narrow(0, 47, 1)}) {
    torch::nn::Module module;
    module.register_parameter("a", table);
    module.register_parameter("b", other.detach());
    EXPECT_THAT(refusal([&] { check(module); }), HasSubstr("sharding: parameters 'a' and 'b' share memory"));
  }
}

TEST(SharedMemory, OfAParameterAndABufferIsRefusedByName) {
  const at::Tensor table = at::ones({6, 8});
  torch::nn::Module module;
  module.register_buffer("shadow", table.t());
  module.register_parameter("weight", table);
  EXPECT_THAT(refusal([&] { check(module); }), HasSubstr("sharding: parameter 'weight' and buffer 'shadow' share memory"));
}

TEST(SharedMemory, NeighboursAndBuffersOfOneStorageAreFine) {
  const at::Tensor table = at::ones({6, 8}), buffer = at::ones({4});
  torch::nn::Module module;
  module.register_parameter("left", table.narrow(1, 0, 3));
  module.register_parameter("right", table.narrow(1, 3, 5));  // columns: each lies in the other's gaps
  module.register_parameter("empty", at::ones({0, 3}));
  module.register_parameter("tied", module.named_parameters()["left"]);
  module.register_buffer("whole", buffer);
  module.register_buffer("part", buffer.narrow(0, 1, 2));
  module.register_buffer("none", at::Tensor());
  EXPECT_NO_THROW(check(module));
}

}  // namespace
}  // namespace tessera::nn
