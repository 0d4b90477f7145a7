#include "tessera/comm/clock_offset.h"

#include <array>
#include <chrono>
#include <cmath>

#include <gtest/gtest.h>

#include "tessera/comm/testing.h"

namespace tessera::comm {
namespace {

double steady() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

TEST(ClockOffset, RanksOfOneClockKeepIt) {
  for (const int n : {1, 2, 5}) {
    run_ranks(n, [](World& world) { EXPECT_EQ(clock_offset(world.group(), steady), 0); });
  }
}

// Clocks that began at other times, as hosts' do: what each rank adds makes all read the first one's.
TEST(ClockOffset, IsWhatAClockLacksOfTheFirstRanks) {
  run_ranks(3, [](World& world) {
    const double ahead = 1000.0 * world.rank();
    EXPECT_NEAR(clock_offset(world.group(), [&] { return steady() + ahead; }), -ahead, 0.05);
  });
}

// The question that came back soonest counts: an answer that was long on its way says little.
TEST(ClockOffset, SlowAnswersDoNotCount) {
  run_ranks(2, [](World& world) {
    double now = 0;
    int readings = 0;
    const auto clock = [&] {  // rank 1 is 100 ahead; its answers take 2, 0.2 and 3, all of it on the way back
      if (world.rank() == 0) return now++;
      constexpr std::array way{2.0, 0.2, 3.0};
      const auto question = static_cast<size_t>(readings / 2);
      return 100.0 + static_cast<double>(question) + (readings++ % 2 == 0 ? 0 : way[question]);
    };
    const double offset = clock_offset(world.group(), clock, 3);
    if (world.rank() == 1) EXPECT_NEAR(offset, -100.1, 1e-9);
  });
}

}  // namespace
}  // namespace tessera::comm
