// The part of suite.cpp for binaries that have comm.

#include <cstdlib>
#include <string_view>

#include <gtest/gtest.h>

#include "tests/support/sim_device/engine.h"

namespace tessera::sim {

namespace {

const bool engine_asked_for = [] {
  const char* const device = std::getenv("TESSERA_TEST_DEVICE");
  if (device && std::string_view(device) == "sim") register_engine();
  return true;
}();

}  // namespace

}  // namespace tessera::sim
