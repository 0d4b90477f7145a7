#include "tessera/comm/backends/device_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A rank's place as `tessera` makes it: process `rank` of `machine` is shown devices from `first_shown` on, and computes on number `index` among them.
std::string place(const std::string& machine, int first_shown, int index, bool has_bus_ids = true) {
  const std::string bus_id = has_bus_ids ? "0000:" + std::to_string(first_shown + index) + ":00.0" : "";
  return device_place(machine, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)), bus_id);
}

TEST(DevicePlaces, RanksThatSeeAllDevicesOfAHostMeet) {
  std::vector<std::string> places;
  for (int rank = 0; rank < 8; ++rank) places.push_back(place("a", 0, rank));
  EXPECT_TRUE(meet_on_devices(places).possible());
  EXPECT_THAT(meet_on_devices(places).members, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

// Slurm's one device a task, and CUDA_VISIBLE_DEVICES of each process: number 0 is another one everywhere.
TEST(DevicePlaces, RanksThatAreEachShownOneOfTheirOwnMeet) {
  std::vector<std::string> places;
  for (int rank = 0; rank < 4; ++rank) places.push_back(place("a", rank, 0));
  EXPECT_TRUE(meet_on_devices(places).possible());
}

TEST(DevicePlaces, HostsWithADeviceEachMeet) {
  std::vector<std::string> places;
  for (const char* host : {"a", "b", "c", "d", "e", "f", "g", "h"}) places.push_back(place(host, 0, 0));
  EXPECT_TRUE(meet_on_devices(places).possible());
}

TEST(DevicePlaces, RanksThatShareADeviceDoNot) {
  const DeviceMeeting all = meet_on_devices({place("a", 0, 0), place("a", 0, 0), place("a", 0, 0)});
  EXPECT_FALSE(all.possible());
  EXPECT_THAT(all.sharing, ElementsAre(0, 1, 2));
  // one by number 1 of two, the other shown that one alone
  const DeviceMeeting masked = meet_on_devices({place("a", 0, 0), place("b", 1, 0), place("a", 0, 1), place("b", 0, 1)});
  EXPECT_FALSE(masked.possible());
  EXPECT_THAT(masked.sharing, ElementsAre(1, 3));
}

TEST(DevicePlaces, TheFirstThatIsSharedIsNamed) {
  const DeviceMeeting meeting = meet_on_devices({place("z", 0, 0), place("b", 0, 0), place("z", 0, 0), place("b", 0, 0)});
  EXPECT_THAT(meeting.sharing, ElementsAre(0, 2));
}

TEST(DevicePlaces, SomeWithADeviceAndSomeWithoutDoNotMeet) {
  const DeviceMeeting meeting = meet_on_devices({place("a", 0, 0), "", place("a", 0, 1), ""});
  EXPECT_FALSE(meeting.possible());
  EXPECT_THAT(meeting.without, ElementsAre(1, 3));
  EXPECT_THAT(meeting.members, ElementsAre(0, 2));
  EXPECT_THAT(meeting.sharing, IsEmpty());
}

TEST(DevicePlaces, WithoutAnyNobodyMeets) {
  const DeviceMeeting meeting = meet_on_devices({"", ""});
  EXPECT_FALSE(meeting.possible());
  EXPECT_THAT(meeting.members, IsEmpty());
}

// Better by way of the host than a group that the engine refuses.
TEST(DevicePlaces, WhereNobodyKnowsBusIdsNumbersCount) {
  EXPECT_TRUE(meet_on_devices({place("a", 0, 0, false), place("a", 0, 1, false), place("b", 0, 0, false)}).possible());
  EXPECT_THAT(meet_on_devices({place("a", 0, 0, false), place("a", 1, 0, false)}).sharing, ElementsAre(0, 1));
}

TEST(DevicePlaces, EveryMemberDecidesAlikeFromTheTexts) {
  const std::vector<Whereabouts> said{{.host = "host a/net:1", .devices = {{"cuda", place("a", 0, 0)}, {"xpu", "a/xpu:0"}}}, {.host = "b", .devices = {}}};
  for (const auto& one : said) {
    const Whereabouts read = Whereabouts::read(one.text());
    EXPECT_EQ(read.host, one.host);
    EXPECT_EQ(read.devices, one.devices);
  }
}

}  // namespace
}  // namespace tessera::comm
