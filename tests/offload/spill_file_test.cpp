// What waits on disk comes back as it was, leaves nothing behind, and a disk that is full says so.

#include "tessera/offload/spill_file.h"

#include <filesystem>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tests/file_limit.h"

namespace tessera::offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SpillFileTest : public ::testing::Test {
 protected:
  void SetUp() override { folder_ = std::filesystem::temp_directory_path() / ("tessera-spill-" + std::to_string(getpid())); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  static at::Tensor numbers(int64_t n, int64_t from) { return at::arange(from, from + n, at::TensorOptions(at::kCPU).dtype(at::kInt)); }
  static at::Tensor room(int64_t n) { return at::empty({n}, at::TensorOptions(at::kCPU).dtype(at::kInt)); }

  std::filesystem::path folder_;
};

TEST_F(SpillFileTest, GivesBackWhatItGotAndHasNoName) {
  SpillFile file(folder_ / "made", "offload.dir");
  std::vector<std::shared_ptr<SpillFile::Extent>> extents;
  std::vector<at::Tensor> back;
  for (int64_t i = 0; i < 7; ++i) {
    extents.push_back(file.take((1000 + 77 * i) * 4));
    file.write(extents.back(), numbers(1000 + 77 * i, i));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "made"));
  SpillFile::Ticket last = 0;
  for (int64_t i = 0; i < 7; ++i) last = file.read(extents[i], back.emplace_back(room(1000 + 77 * i)));
  file.wait(last);
  for (int64_t i = 0; i < 7; ++i) EXPECT_TRUE(at::equal(back[i], numbers(1000 + 77 * i, i))) << i;
}

TEST_F(SpillFileTest, RangesThatAreGivenBackAreUsedAgain) {
  SpillFile file(folder_, "offload.dir");
  const FileLimit limit(5 * SpillFile::kAlignment);
  for (int round = 0; round < 9; ++round) {  // 3 + 2 blocks each time, freed in another order
    auto a = file.take(2 * SpillFile::kAlignment + 1), b = file.take(SpillFile::kAlignment + 4);
    file.write(a, numbers(2049, round));
    file.write(b, numbers(1025, -round));
    const at::Tensor first = room(2049), second = room(1025);
    file.read(a, first);
    file.wait(file.read(b, second));
    EXPECT_TRUE(at::equal(first, numbers(2049, round)));
    EXPECT_TRUE(at::equal(second, numbers(1025, -round)));
    (round % 2 == 0 ? a : b).reset();
  }
}

TEST_F(SpillFileTest, AFullDiskIsOneSentence) {
  SpillFile file(folder_, "offload.dir");
  const FileLimit limit(SpillFile::kAlignment);
  const auto extent = file.take(4 * SpillFile::kAlignment);
  const auto ticket = file.write(extent, numbers(4096, 0));
  try {
    file.wait(ticket);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("offload.dir = " + folder_.string()), HasSubstr("writing 16384 bytes failed"), HasSubstr("more space")));
  }
  EXPECT_THROW(file.wait(file.read(extent, room(4096))), Error) << "and says so again";
}

TEST_F(SpillFileTest, ADryOneTouchesNothing) {
  SpillFile file(folder_, "offload.dir", {}, /*dry=*/true);
  file.wait(file.write(file.take(12), numbers(3, 0)));
  EXPECT_FALSE(std::filesystem::exists(folder_));
}

}  // namespace
}  // namespace tessera::offload
