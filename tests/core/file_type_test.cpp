#include "tessera/core/file_type.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/refusal.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

TEST(FileType, PutsAFileWhereItsNameLeadsAndInPlaceOfFilesAlone) {
  const fs::path folder = fs::path(testing::TempDir()) / "tessera_output_place";
  fs::remove_all(folder);
  fs::create_directories(folder / "inner");
  std::ofstream(folder / "file") << "text";
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink("inner/new", folder / "to_nothing");
  fs::create_symlink("to_nothing", folder / "twice");
  fs::create_symlink(folder / "file", folder / "absolute");
  fs::create_symlink("pipe", folder / "to_pipe");
  fs::create_symlink("none/new", folder / "to_no_folder");

  for (const char* name : {"file", "new"}) EXPECT_EQ(output_place(folder / name, "--output"), folder / name);
  for (const char* name : {"to_nothing", "twice"}) {
    EXPECT_EQ(output_place(folder / name, "--output"), folder / "inner" / "new");
    EXPECT_EQ(target_of(folder / name), folder / "inner" / "new");
  }
  EXPECT_EQ(output_place(folder / "absolute", "--output"), folder / "file");
  const auto refusal = [&](const char* name) { return testing_support::refusal([&] { output_place(folder / name, "--output"); }); };
  for (const char* name : {"pipe", "to_pipe"}) EXPECT_THAT(refusal(name), AllOf(HasSubstr("--output = "), HasSubstr("a pipe"))) << name;
  for (const char* name : {"inner", "inner/"}) EXPECT_THAT(refusal(name), HasSubstr("is a folder")) << name;
  for (const char* name : {"none/new", "to_no_folder"}) EXPECT_THAT(refusal(name), HasSubstr("there is no folder")) << name;

  // As /dev/stdout is, which may lead to a regular file, too: whoever has that open would see nothing of another one in its place.
  const int open = ::open((folder / "file").c_str(), O_RDONLY);
  fs::create_symlink("/proc/self/fd/" + std::to_string(open), folder / "to_open_file");
  EXPECT_THAT(refusal("to_open_file"), HasSubstr("is what a process has open, and not the name of a file"));
  ::close(open);
  fs::remove_all(folder);
}

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
