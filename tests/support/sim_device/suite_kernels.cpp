// The part of suite.cpp for binaries that have kernels.

#include <gtest/gtest.h>

#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/kernels.h"

namespace tessera::sim {

namespace {

class Kernels final : public ::testing::Environment {
  void SetUp() override { register_kernels(); }
};

const bool kernels_asked_for = [] {
  if (wanted() != Wanted::Nothing) ::testing::AddGlobalTestEnvironment(new Kernels);
  return true;
}();

}  // namespace

}  // namespace tessera::sim
