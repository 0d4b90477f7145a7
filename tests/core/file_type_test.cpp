#include "tessera/core/file_type.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/refusal.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

TEST(FileType, TellsWhatIsThereFromWhatCannotBeAsked) {
  const fs::path folder = fs::path(testing::TempDir()) / "tessera_file_type";
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::ofstream(folder / "file") << "text";
  fs::create_symlink("loop", folder / "loop");
  fs::create_symlink("nowhere", folder / "dangling");

  EXPECT_TRUE(is_there(folder) && is_folder(folder));
  EXPECT_TRUE(is_there(folder / "file") && !is_folder(folder / "file"));
  for (const char* name : {"nothing", "dangling", "file/below"}) EXPECT_FALSE(is_there(folder / name) || is_folder(folder / name)) << name;
  EXPECT_EQ(std::distance(entries_of(folder), fs::directory_iterator()), 3);

  const auto loop = AllOf(HasSubstr("tessera_file_type/loop: Too many levels of symbolic links"), HasSubstr("name a path"));
  EXPECT_THAT(testing_support::refusal([&] { is_there(folder / "loop"); }), loop);
  EXPECT_THAT(testing_support::refusal([&] { is_folder(folder / "loop"); }), loop);
  EXPECT_THAT(testing_support::refusal([&] { entries_of(folder / "loop"); }), loop);
  EXPECT_THAT(testing_support::refusal([&] { is_there(folder / std::string(300, 'n')); }), HasSubstr("File name too long"));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace tessera
