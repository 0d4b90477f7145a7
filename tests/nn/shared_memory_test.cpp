#include "tessera/nn/shared_memory.h"

#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/refusal.h"

namespace tessera::nn {
namespace {

using namespace testing_support;
using ::testing::AllOf;
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

void move(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  parameter.set_data(parameter.detach().clone());
}

/// Calls `use` with what `view` made of a parameter before it moved, on a thread of its own, with which the watch ends.
void use_behind_the_move(const std::function<at::Tensor(const at::Tensor&)>& view, const std::function<void(const at::Tensor&)>& use, bool frozen = false) {
  std::thread([&] {
    torch::nn::Module module;
    const at::Tensor parameter = module.register_parameter("weight", at::ones({6, 8}), /*requires_grad=*/!frozen);
    const at::Tensor kept = view(parameter);
    FormerMemory former("sharding", unique_parameters(module));
    move(parameter);
    former.refuse_use();
    EXPECT_NO_THROW(parameter.t().sum());
    use(kept);
  }).join();
}

TEST(FormerMemory, AViewThatIsUsedBehindTheMoveIsRefusedByName) {
  const auto refused = [](const at::Tensor& kept) {
    EXPECT_THAT(refusal([&] { (void)kept.sum(); }), AllOf(HasSubstr("sharding: aten::sum was given a view of 'weight'"), HasSubstr("in forward")));
    EXPECT_THAT(refusal([&] { (void)at::cat({at::ones({5}), kept.view(-1)}); }), HasSubstr("a view of 'weight'"));
  };
  use_behind_the_move([](const at::Tensor& w) { return w.view(-1); }, refused);
  use_behind_the_move([](const at::Tensor& w) { return w.t().narrow(1, 0, 1); }, refused);
  use_behind_the_move([](const at::Tensor& w) { return w.select(1, 3); }, refused);
  use_behind_the_move([](const at::Tensor& w) { return w.detach(); }, refused);
}

TEST(FormerMemory, WhatIsHeldAndNotUsedIsFine) {
  const auto sum = [](const at::Tensor& kept) { EXPECT_NO_THROW(kept.sum()); };
  const auto product = [](const at::Tensor& w) { return at::matmul(at::ones({2, 8}).requires_grad_(), w.t()).relu(); };  // its graph holds a view of the weight
  use_behind_the_move([](const at::Tensor& w) { return w.detach().clone(); }, sum);
  use_behind_the_move(product, sum);
  use_behind_the_move(product, [](const at::Tensor& y) { EXPECT_NO_THROW(y.sum().backward()); });
  use_behind_the_move([](const at::Tensor& w) { return w.t(); }, sum, /*frozen=*/true);
}

TEST(FormerMemory, NeighboursInOneStorageMayStay) {
  std::thread([] {
    const at::Tensor table = at::ones({6, 8});
    torch::nn::Module module;
    const at::Tensor left = module.register_parameter("left", table.narrow(1, 0, 3)), right = table.narrow(1, 3, 5);
    FormerMemory former("sharding", unique_parameters(module));
    move(left);
    former.refuse_use();
    EXPECT_NO_THROW(right.sum());
    EXPECT_THAT(refusal([&] { (void)table.sum(); }), HasSubstr("'left'"));
  }).join();
}

}  // namespace
}  // namespace tessera::nn
