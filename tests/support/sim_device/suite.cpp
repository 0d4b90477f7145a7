// With TESSERA_TEST_DEVICE=sim, or sim_private, a test binary runs on simulated devices: whatever its tests make without naming a device lies there, each rank
// has its own, and what the detector reports fails the test that it happened in.

#include <cstring>

#include <gtest/gtest.h>

#include "tests/support/default_device.h"
#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/happens_before.h"
#include "tests/support/sim_device/memory.h"
#include "tests/support/sim_device/operators.h"

namespace tessera::sim {

namespace {

class Reports final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { forget_test(); }
  void OnTestEnd(const ::testing::TestInfo&) override {
    close_opened_pages();
    const auto reports = HappensBefore::get().take_reports();
    constexpr size_t shown = 3;
    for (size_t i = 0; i < std::min(shown, reports.size()); ++i) ADD_FAILURE() << reports[i].text;
    if (reports.size() > shown) ADD_FAILURE() << reports.size() - shown << " more reports";
    forget_test();
  }
};

class Devices final : public ::testing::Environment {
  void SetUp() override {
    install(kMaxDevices);
    testing_support::make_default_device(sim_type(), [] { return std::strcmp(Running::now(), "the host") != 0; });
    let_operators_read_other_devices();
    ::testing::UnitTest::GetInstance()->listeners().Append(new Reports);
  }
};

const bool asked_for = [] {
  if (wanted() == Wanted::Nothing) return false;
  ::testing::AddGlobalTestEnvironment(new Devices);
  return true;
}();

}  // namespace

}  // namespace tessera::sim
