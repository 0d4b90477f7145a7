// The part of suite.cpp for binaries that have kernels.

#include <cstdlib>
#include <string_view>

#include <gtest/gtest.h>

#include "tests/support/sim_device/kernels.h"

namespace tessera::sim {

namespace {

class Kernels final : public ::testing::Environment {
  void SetUp() override { register_kernels(); }
};

const bool kernels_asked_for = [] {
  const char* const device = std::getenv("TESSERA_TEST_DEVICE");
  if (device && std::string_view(device) == "sim") ::testing::AddGlobalTestEnvironment(new Kernels);
  return true;
}();

}  // namespace

}  // namespace tessera::sim
