#include "tessera/kernels/routines.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/kernels/bias_activation.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/layer_norm.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

/// As in a program that works on cuda:1 without making it the current device.
TEST(Routines, RunOnTheDeviceOfTheirTensors) {
  const at::Device here = test_device();
  const c10::impl::VirtualGuardImpl devices(here.type());
  if (devices.deviceCount() < 2) GTEST_SKIP() << "there is one device";
  const at::Device there(here.type(), here.index() == 0 ? 1 : 0);
  const at::Tensor x = random({6, 8}), weight = random({8}, at::kFloat, 2), numbers = at::arange(6, at::kLong);
  const std::pair<const char*, Operator> operators[] = {
      {"rms_norm", [](const auto& in) { return rms_norm(in[0], in[1], 1e-5); }},
      {"layer_norm", [](const auto& in) { return layer_norm(in[0], in[1], in[1], 1e-5); }},
      {"swiglu", [](const auto& in) { return swiglu(in[0], in[0]); }},
      {"bias_activation", [](const auto& in) { return bias_activation(in[0], in[1], Activation::Silu); }},
      {"rope", [](const auto& in) { return rope(in[0].view({1, 6, 1, 8}), in[0].narrow(1, 0, 4), in[0].narrow(1, 4, 4)); }},
      {"dropout", [](const auto& in) { return dropout(in[0], 0.5, 1, in[2]); }},
      {"cross_entropy_sum", [](const auto& in) { return cross_entropy_sum(in[0], in[2]); }},
      {"dispatch", [](const auto& in) { return gather_rows(in[0], dispatch(choose_experts(in[0], 2), 8)); }},
  };
  for (const auto& [name, run] : operators) {
    const at::Tensor want = run({x, weight, numbers}), got = run({x.to(there), weight.to(there), numbers.to(there)});
    EXPECT_EQ(got.device(), there) << name;
    EXPECT_TRUE(at::equal(got.cpu(), want.cpu())) << name;
    EXPECT_EQ(devices.getDevice(), here) << name;
  }
}

}  // namespace
}  // namespace tessera::kernels
