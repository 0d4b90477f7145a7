// With TESSERA_TEST_DEVICE=cuda a test binary of a build with CUDA runs on its device: whatever its tests make without naming one lies there (tests/cuda/run
// says which of them it runs so). Ranks as threads would wait for each other in autograd, which keeps one thread for a device: only tests of one rank can.

#include <cstdlib>
#include <iostream>
#include <string_view>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "tests/support/default_device.h"

namespace tessera::testing_support {

namespace {

class RealDevice final : public ::testing::Environment {
  void SetUp() override {
    const auto* const guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].load();
    if (guard == nullptr || guard->deviceCount() == 0) {
      std::cerr << "TESSERA_TEST_DEVICE = cuda: there is no CUDA device here, or none in this build; leave it out, or set it to sim" << std::endl;
      std::quick_exit(2);
    }
    make_default_device(c10::kCUDA);
  }
};

const bool asked_for = [] {
  const char* const device = std::getenv("TESSERA_TEST_DEVICE");
  if (device != nullptr && std::string_view(device) == "cuda") ::testing::AddGlobalTestEnvironment(new RealDevice);
  return true;
}();

}  // namespace

}  // namespace tessera::testing_support
