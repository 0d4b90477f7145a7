#include "tessera/offload/mapped_file.h"

#include <filesystem>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tests/file_limit.h"

namespace tessera {
namespace {

const at::TensorOptions kHost = at::device(at::kCPU);

class MappedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera-mapped-" + std::to_string(getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
};

at::Tensor copied(FiledTensor& filed) {
  const at::Tensor copy = at::empty(filed.tensor().sizes(), filed.tensor().options());
  filed.begin_copy(copy);
  filed.await_copy();
  return copy;
}

TEST_F(MappedFileTest, IsMemoryThatIsReadAsAFile) {
  const DiskBytes disk;
  const auto file = make_mapped_file(folder_ / "made", disk);
  std::vector<std::unique_ptr<FiledTensor>> all;
  std::vector<at::Tensor> values;
  for (const int64_t size : {0, 1, 1023, 1024, 1025, 77777}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      all.push_back(file->make(size, dtype));
      values.push_back(at::arange(size, kHost.dtype(at::kFloat)).add_(static_cast<double>(values.size())).to(dtype));
      all.back()->tensor().copy_(values.back());
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(at::equal(copied(*all[i]), values[i])) << i;
    all[i]->let_go();
    EXPECT_TRUE(at::equal(all[i]->tensor(), values[i])) << "what is dropped is the file's";
    all[i]->tensor().add_(1);
    EXPECT_TRUE(at::equal(copied(*all[i]), values[i].add(1))) << i;
  }
  EXPECT_GE(disk.value(), (1 + 1023 + 1024 + 1025 + 77777) * (4 + 2 + 8));
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "made")) << "it has no name";
}

TEST_F(MappedFileTest, LivesForAsLongAsAView) {
  at::Tensor view;
  {
    auto filed = make_mapped_file(folder_)->make(1000, at::kFloat);
    filed->tensor().fill_(3);
    view = filed->tensor().narrow(0, 990, 10);
  }
  EXPECT_EQ(view.sum().item<float>(), 30);
}

TEST_F(MappedFileTest, AFullDiskIsToldOfWhenRoomIsTaken) {
  const auto file = make_mapped_file(folder_);
  const FileLimit limit(1 << 16);
  const auto fits = file->make(1 << 12, at::kFloat);
  try {
    file->make(1 << 16, at::kFloat);
    FAIL() << "there was no room";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(what.find("offload.dir = " + folder_.string() + ": reserving 262144 bytes failed: "), 0) << what;
    EXPECT_NE(what.find("; name a folder with more space"), std::string::npos) << what;
  }
}

TEST_F(MappedFileTest, ADryOneKnowsWhatItWouldTake) {
  const DiskBytes real, dry;
  const auto file = make_mapped_file(folder_, real), none = make_mapped_file(folder_ / "none", dry, /*dry=*/true);
  for (const int64_t size : {0, 5, 4097}) {
    const auto there = file->make(size, at::kFloat), nowhere = none->make(size, at::kFloat);
    EXPECT_TRUE(nowhere->tensor().is_meta());
    EXPECT_EQ(nowhere->tensor().sizes(), there->tensor().sizes());
    nowhere->begin_copy(at::empty({size}, at::device(at::kMeta)));
    nowhere->await_copy();
    nowhere->let_go();
    EXPECT_EQ(dry.value(), real.value());
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
}

}  // namespace
}  // namespace tessera
