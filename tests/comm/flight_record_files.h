#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/comm/flight_record/reader.h"

namespace tessera::comm {

/// A folder for the records of a test.
class FlightRecords : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "flightXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir); }

  flight::RankRecord read(int rank) const { return flight::read_record(FlightRecord::file_of(dir, rank)); }

  std::filesystem::path dir;
};

inline Environment rank_of(int rank, int size) { return {.rank = rank, .size = size}; }
inline GroupInfo world_of(int rank, int size) { return {.name = "world", .rank = rank, .size = size}; }

}  // namespace tessera::comm
