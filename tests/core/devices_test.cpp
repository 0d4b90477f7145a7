#include "tessera/core/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

std::string refusal(const std::string& wanted, LocalRank local = {}) {
  try {
    return "it gives " + resolve_device(wanted, local).str();
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Devices, TheCpuIsAlwaysThere) {
  EXPECT_EQ(num_devices(at::kCPU), 1);
  EXPECT_TRUE(supports_device(at::kCPU));
  EXPECT_TRUE(supports_device(at::kMeta));
  EXPECT_EQ(resolve_device("cpu", {.rank = 3, .ranks = 4}), at::Device(at::kCPU));
}

TEST(Devices, WhatIsNoDeviceIsRefused) {
  for (const char* wanted : {"gpu", "", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "cuda:99999999999", "cuda0", "CUDA", "meta", "cpu:0"}) {
    EXPECT_THAT(refusal(wanted), AllOf(HasSubstr(std::string("run.device = ") + wanted + ":"), HasSubstr("set it to auto, cpu, cuda or cuda:N"))) << wanted;
  }
}

TEST(Devices, ARefusalNamesTheKnobThatWasTurned) {
  EXPECT_THAT([] { resolve_device("gpu", {}, "--device"); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("--device = gpu: there is no such device")));
  if (num_devices(at::kCUDA) > 0) GTEST_SKIP() << "this machine has CUDA";
  EXPECT_THAT([] { resolve_device("cuda", {}, "--device"); }, ::testing::ThrowsMessage<ConfigError>(EndsWith("or set --device = cpu")));
}

TEST(Devices, WithoutCudaAutoIsTheCpuAndCudaIsRefusedWithTheWayOut) {
  if (num_devices(at::kCUDA) > 0) GTEST_SKIP() << "this machine has CUDA";
  EXPECT_EQ(resolve_device("auto", {.rank = 3, .ranks = 4}), at::Device(at::kCPU));
  const bool torch_has_it = c10::impl::hasDeviceGuardImpl(at::kCUDA);
  const char* why = torch_has_it && supports_device(at::kCUDA) ? "sees no CUDA device" : torch_has_it ? "has no CUDA kernels" : "this torch has no CUDA";
  for (const char* wanted : {"cuda", "cuda:0"}) EXPECT_THAT(refusal(wanted), AllOf(HasSubstr(why), EndsWith("or set run.device = cpu")));
}

/// Shows so many CUDA devices while it lives, of which nothing but their number is there.
class Shown final : public c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
 public:
  explicit Shown(int devices) : devices_(devices) { slot() = this; }
  ~Shown() override { slot() = before_; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices_); }

 private:
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& slot() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)]; }
  const int devices_;
  const c10::impl::DeviceGuardImplInterface* const before_ = slot().load();
};

TEST(Devices, EachRankOfAHostTakesTheDeviceOfItsNumber) {
  const Shown two(2);
  EXPECT_EQ(num_devices(at::kCUDA), 2);
  if (!supports_device(at::kCUDA)) {  // as this build then only sees them
    EXPECT_EQ(resolve_device("auto"), at::Device(at::kCPU));
    EXPECT_THAT(refusal("cuda"), HasSubstr("this build of tessera has no CUDA kernels; build the preset cuda"));
    add_supported_device(at::kCUDA);
  }
  for (const char* wanted : {"auto", "cuda"}) {
    EXPECT_EQ(resolve_device(wanted), at::Device(at::kCUDA, 0));
    EXPECT_EQ(resolve_device(wanted, {.rank = 1, .ranks = 2}), at::Device(at::kCUDA, 1));
    EXPECT_THAT(refusal(wanted, {.rank = 0, .ranks = 3}),
                AllOf(HasSubstr("3 ranks of this host see 2 CUDA devices; start 2 on a host"), HasSubstr("cuda:0"), EndsWith("or set run.device = cpu")));
  }
  EXPECT_EQ(resolve_device("cuda:1", {.rank = 0, .ranks = 8}), at::Device(at::kCUDA, 1)) << "which all ranks share";
  EXPECT_THAT(refusal("cuda:2"), HasSubstr("this process sees 2 CUDA devices, cuda:0 to cuda:1; name one of them"));
  EXPECT_EQ(resolve_device("cpu", {.rank = 0, .ranks = 3}), at::Device(at::kCPU));
  const Shown none(0);
  EXPECT_EQ(resolve_device("auto"), at::Device(at::kCPU));
  EXPECT_THAT(refusal("cuda"), HasSubstr("this process sees no CUDA device; look at what nvidia-smi and CUDA_VISIBLE_DEVICES say"));
}

}  // namespace
}  // namespace tessera
