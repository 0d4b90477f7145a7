#include "tessera/data/partial_file.h"

#include <chrono>

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/data/files.h"
#include "tests/file_locks.h"

namespace tessera::data {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<std::string> names_in(const Folder& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.push_back(entry.path().filename());
  return names;
}

TEST(PartialFile, WithoutLocksEachHolderWritesAFileOfItsOwn) {
  const Folder folder;
  const auto path = folder / "p.bin";
  const FileLocks locks(FileLocks::none);
  {
    PartialFile one(path, "output"), two(path, "output");
    ASSERT_TRUE(one.held() && two.held());
    folder.write(one.partial().filename(), "of one");
    folder.write(two.partial().filename(), "of two");
    one.commit();
    EXPECT_EQ(slurp(path), "of one");
    two.commit();
    EXPECT_EQ(slurp(path), "of two");
  }
  EXPECT_THAT(names_in(folder), UnorderedElementsAre("p.bin"));
}

TEST(PartialFile, WhatDeadWritersLeftGoesAndNothingElse) {
  const Folder folder;
  const auto path = folder / "p.bin";
  const pid_t child = ::fork();
  if (child == 0) {
    const PartialFile killed(path, "output");
    folder.write(killed.partial().filename(), "half");
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_THAT(names_in(folder), testing::SizeIs(2));
  EXPECT_THAT(names_in(folder), Each(HasSubstr(".partial")));
  // Of other hosts, which may live; and somebody's own.
  const std::string live = "p.bin.0123456789abcdef.0000000000000001.partial", old = "p.bin.0123456789abcdef.0000000000000002.partial";
  const std::string other = "q.bin.0123456789abcdef.0000000000000003.partial", mine = "p.bin.mine.partial";
  for (const auto& name : {live, old, other, mine}) folder.write(name, "half");
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(48);
  for (const auto& name : {old, other, mine}) std::filesystem::last_write_time(folder / name, long_ago);
  {
    const PartialFile next(path, "output");
    EXPECT_TRUE(next.held());
  }
  EXPECT_THAT(names_in(folder), UnorderedElementsAre(live, other, mine));
}

}  // namespace
}  // namespace tessera::data
