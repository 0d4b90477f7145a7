#include "tessera/optim/clip_grad_norm.h"

#include <cmath>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>

#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/cut_parameter.h"
#include "tessera/nn/sharing.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using namespace testing_support;

TEST(ClipGradNorm, IsLibtorchsForAModelWithoutAWrapper) {
  for (const double max_norm : {0.1, 100.0}) {
    Net net, reference;
    backward(net, whole_batch(samples));
    backward(reference, whole_batch(samples));
    const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), max_norm);
    EXPECT_NEAR(clip_grad_norm(net, max_norm).item<double>(), expected, 1e-5 * expected);
    EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
  }
}

TEST(ClipGradNorm, CountsTiedParametersOnceAndSkipsThoseWithoutAGradient) {
  torch::nn::Module module("Tied");
  const at::Tensor tied = module.register_parameter("a", at::ones({4}));
  module.register_parameter("b", tied);
  module.register_parameter("frozen", at::ones({4}), /*requires_grad=*/false);
  module.register_parameter("counter", at::ones({4}, at::kLong), /*requires_grad=*/false);
  (tied * 3).sum().backward();
  EXPECT_NEAR(clip_grad_norm(module, 3.0).item<double>(), 6.0, 1e-9);
  EXPECT_TRUE(at::allclose(tied.grad(), at::full({4}, 1.5)));
}

TEST(ClipGradNorm, CountsPartsThatWereGivenOtherData) {
  comm::run_ranks(2, [](comm::World& world) {
    torch::nn::Module module("Experts");
    const at::Tensor part = module.register_parameter("w1", at::ones({4, 3}));
    nn::assign_paths(module);
    nn::cut_parameter(part, 0, 2 * world.rank(), 2);
    nn::note_dealt(part, {.group = world.group(), .first = world.rank(), .by = "a test"});
    module.to(at::kDouble);
    part.mutable_grad() = at::full({2, 3}, 1.0 + world.rank(), at::kDouble);
    EXPECT_NEAR(clip_grad_norm(module, 100.0).item<double>(), std::sqrt(6 * 1 + 6 * 4), 1e-6);
  });
}

TEST(ClipGradNorm, RefusesWhatItDoesNotSee) {
  Net net;
  Slice half = Slice::whole("scale", {14});
  half.boxes.front().size = {7};
  nn::set_slice(net.scale, half);
  backward(net, whole_batch(samples));
  EXPECT_THAT(refusal([&] { clip_grad_norm(net, 1.0); }), HasSubstr("'scale' is cut, and nothing says over which ranks"));
  EXPECT_THAT(refusal([&] { clip_grad_norm(*net.first, 0.0); }), HasSubstr("max_norm = 0"));
  EXPECT_THAT(refusal([&] { clip_grad_norm(torch::nn::Module("Empty"), 1.0); }), HasSubstr("'Empty' has no parameters"));
}

}  // namespace
}  // namespace tessera
