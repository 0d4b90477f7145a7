#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/happens_before.h"
#include "tests/support/sim_device/memory.h"

/// Tests of the simulated devices themselves: they take the reports that they provoke.
namespace tessera::sim {

class SimDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    install(4);
    forget_test();
  }
  void TearDown() override {
    close_opened_pages();
    for (const auto& report : reports()) ADD_FAILURE() << report.text;
  }

  static std::vector<Report> reports() { return HappensBefore::get().take_reports(); }
  static std::vector<Report::Kind> kinds() {
    std::vector<Report::Kind> kinds;
    for (const auto& report : reports()) kinds.push_back(report.kind);
    return kinds;
  }
  static c10::Stream side() { return c10::impl::VirtualGuardImpl(sim_type()).getNewStream(first); }
  static c10::Stream own() { return current_stream(0); }
  static at::Tensor pinned(int64_t size) { return at::ones({size}, at::TensorOptions(at::kCPU).pinned_memory(true)); }

  static inline const at::Device first{sim_type(), 0}, second{sim_type(), 1};
};

}  // namespace tessera::sim
