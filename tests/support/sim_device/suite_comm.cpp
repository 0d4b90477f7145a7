// The part of suite.cpp for binaries that have comm.

#include <gtest/gtest.h>

#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/engine.h"

namespace tessera::sim {

namespace {

const bool engine_asked_for = [] {
  if (wanted() != Wanted::Nothing) register_engine();
  return true;
}();

}  // namespace

}  // namespace tessera::sim
