#include "tessera/offload/disk_speed.h"

#include <gtest/gtest.h>

#include "tests/file_limit.h"

namespace tessera {
namespace {

TEST(DiskSpeedTest, IsMeasuredWhereAFileFits) {
  const auto folder = std::filesystem::temp_directory_path();
  for (const int64_t bytes : {1, 4097, 9 << 20}) {
    const auto speed = measure_disk(folder, bytes);
    ASSERT_TRUE(speed) << bytes;
    EXPECT_GT(speed->write, 0);
    EXPECT_GT(speed->read, 0);
  }
  EXPECT_FALSE(measure_disk(folder / "tessera-is-not-there", 1000));
  const FileLimit limit(4096);
  EXPECT_FALSE(measure_disk(folder, 8192));
}

}  // namespace
}  // namespace tessera
