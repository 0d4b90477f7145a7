#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/flight_record/reader.h"
#include "tessera/core/error.h"
#include "tests/comm/flight_record_files.h"

namespace tessera::comm {
namespace {

using testing::HasSubstr;

std::string refusal_to_read(const std::filesystem::path& path) {
  try {
    flight::read_records(path);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST_F(FlightRecords, ThatAreDamagedAreRefusedByOffset) {
  const auto path = FlightRecord::file_of(dir, 0);
  const auto damaged = [&](size_t offset, auto value) {
    {
      FlightRecord record(dir, rank_of(0, 2), 10);
      record.enter(record.add_group(world_of(0, 2)).value(), {.op = Operation::Barrier});
    }
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    file.write(reinterpret_cast<const char*>(&value), sizeof value);
    file.close();
    return refusal_to_read(dir);
  };
  constexpr size_t groups = 4096, entries = 4096 + 65536 + 4096;
  EXPECT_EQ(damaged(0, 'T'), "accepted");
  EXPECT_THAT(damaged(0, 'x'), HasSubstr("rank_0.bin: not a flight record, or damaged: offset 0: does not begin with TSRFLGHT"));
  EXPECT_THAT(damaged(8, uint32_t{3}), HasSubstr("offset 8: version 3; this build reads 1 and 2"));
  EXPECT_EQ(damaged(8, uint32_t{1}), "accepted");
  EXPECT_THAT(damaged(12, uint32_t{192}), HasSubstr("offset 12: entries of 192 bytes"));
  EXPECT_THAT(damaged(offsetof(flight::Header, capacity), uint64_t{1} << 60), HasSubstr("offset 16: a ring of"));
  EXPECT_THAT(damaged(offsetof(flight::Header, entries_offset), ~uint64_t{0}), HasSubstr("the file ends inside the ring of entries"));
  EXPECT_THAT(damaged(offsetof(flight::Header, rank), int32_t{2}), HasSubstr("offset 48: rank 2 of 2"));
  EXPECT_THAT(damaged(offsetof(flight::Header, groups_used), ~uint64_t{0}), HasSubstr("bytes used of"));
  EXPECT_THAT(damaged(groups, uint32_t{0}), HasSubstr("offset 4096: a group of 0 bytes"));
  EXPECT_THAT(damaged(groups + offsetof(flight::GroupHeader, members), uint32_t{1000}), HasSubstr("offset 4096: a group of 1000 members"));
  EXPECT_THAT(damaged(groups + offsetof(flight::GroupHeader, size), int32_t{3}), HasSubstr("a group of 3 in a world of 2"));
  EXPECT_THAT(damaged(entries + offsetof(flight::Entry, group), uint32_t{1}), HasSubstr("group 1 of 1"));
  EXPECT_THAT(damaged(entries + offsetof(flight::Entry, state), uint32_t{9}), HasSubstr("state 9"));
  EXPECT_THAT(damaged(entries + offsetof(flight::Entry, peer), int32_t{2}), HasSubstr("peer 2 in a group of 2"));
  EXPECT_EQ(damaged(entries, uint64_t{0}), "accepted");  // being written when its process ended
  EXPECT_TRUE(read(0).calls.empty());
}

/// A group of all ranks takes 32 bytes in the file, whatever the size of the world: many of them must not fill the memory.
TEST_F(FlightRecords, WithMoreMembersThanAnyRunHasAreRefused) {
  const int world_size = 1 << 20;
  FlightRecord record(dir, rank_of(0, world_size), 10);
  for (int i = 0; i < 17; ++i) record.add_group({.name = "g" + std::to_string(i), .rank = 0, .size = world_size});
  EXPECT_THAT(refusal_to_read(dir), HasSubstr("more than 16777216 members of groups"));
}

TEST_F(FlightRecords, OfAFolderAreRefused) {
  std::filesystem::create_directory(FlightRecord::file_of(dir, 0));
  EXPECT_THAT(refusal_to_read(dir), HasSubstr("rank_0.bin: cannot be read"));
}

TEST_F(FlightRecords, ThatAreCutShortOrAbsentAreRefused) {
  const auto path = FlightRecord::file_of(dir, 0);
  for (const size_t bytes : {0, 100, 319, 320, 5000, 70000}) {
    FlightRecord(dir, rank_of(0, 2), 10);
    std::filesystem::resize_file(path, bytes);
    EXPECT_THAT(refusal_to_read(dir), HasSubstr("rank_0.bin: not a flight record, or damaged: offset " + std::to_string(bytes))) << bytes;
    EXPECT_TRUE(flight::read_records(dir, flight::Damage::LeaveOut).ranks.empty());
  }
  std::filesystem::remove(path);
  EXPECT_THAT(refusal_to_read(dir), HasSubstr("holds no flight record (rank_*.bin)"));
  EXPECT_THAT(refusal_to_read(dir / "none"), HasSubstr("No such file or directory; give the folder"));
}

}  // namespace
}  // namespace tessera::comm
