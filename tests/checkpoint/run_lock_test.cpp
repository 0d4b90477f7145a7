#include "tessera/checkpoint/run_lock.h"

#include <csignal>

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

TEST(RunLock, RefusesASecondOneByNameUntilTheFirstGoes) {
  const TemporaryFolder folder;
  const auto dir = folder / "made" / "here";
  {
    const RunLock first(dir);
    EXPECT_THAT([&] { RunLock second(dir); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.dir = "), HasSubstr("process " + std::to_string(::getpid()) + " on "),
                                                 HasSubstr("is training into it"), HasSubstr("name another checkpoint.dir"))));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir));
  EXPECT_THAT(RunLock(dir).remarks(), IsEmpty());
}

TEST(RunLock, OfAProcessThatWasKilledIsTakenOver) {
  const TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunLock lock(folder.path());
    [[maybe_unused]] const auto told = ::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(RunLock(folder.path()), ConfigError);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::exists(folder / ".lock")) << "a killed process cannot clear up";
  EXPECT_THAT(RunLock(folder.path()).remarks(), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(folder / ".lock"));
}

TEST(RunLock, WhatAnotherHostLeftIsTakenOverAndSaid) {
  const TemporaryFolder folder;
  write_all(folder / ".lock", "{\"boot\":\"b\",\"host\":\"elsewhere\",\"pid\":7}\n");
  EXPECT_THAT(RunLock(folder.path()).remarks(), ElementsAre(AllOf(HasSubstr("process 7 on elsewhere"), HasSubstr("is taken over"))));
  write_all(folder / ".lock", "{\"boot\":\"b\",\"ho");  // cut
  EXPECT_THAT(RunLock(folder.path()).remarks(), IsEmpty());
}

TEST(RunLock, SaysWhatBecameOfItAndTakesNothingFromWhoHasThePlaceByNow) {
  const TemporaryFolder folder;
  const auto dir = folder / "runs";
  {
    const RunLock lock(dir);
    EXPECT_EQ(lock.loss(), "");
    std::filesystem::remove(dir / ".lock");
    EXPECT_EQ(lock.loss(), "its .lock was removed");
  }
  auto first = std::make_unique<RunLock>(dir);
  std::filesystem::rename(dir, folder / "moved");
  EXPECT_THAT(first->loss(), HasSubstr("the folder was removed, or moved"));
  const RunLock second(dir);
  EXPECT_THAT(first->loss(), HasSubstr("the folder was removed, or moved"));
  first.reset();
  EXPECT_TRUE(std::filesystem::exists(dir / ".lock"));
  EXPECT_THROW(RunLock{dir}, ConfigError);
  EXPECT_EQ(second.loss(), "");
}

TEST(RunLock, IsDoneWithoutWhereItIsNotNeededButForAnothers) {
  const TemporaryFolder folder;
  const LockedFolder log{.knob = "log.dir", .file = ".log.lock", .before = "held by ", .after = "", .way_out = "; wait", .needed = false};
  EXPECT_EQ(RunLock("/proc", {}, log).loss(), "");
  write_all(folder / ".log.lock", "mine");
  {
    const RunLock none(folder.path(), {}, log);
  }
  EXPECT_EQ(read_all(folder / ".log.lock"), "mine");
  std::filesystem::remove(folder / ".log.lock");
  const RunLock first(folder.path(), {}, log), of_checkpoints(folder.path());
  EXPECT_THAT([&] { RunLock second(folder.path(), {}, log); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("log.dir = "), HasSubstr(": held by process " + std::to_string(::getpid())), HasSubstr("; wait"))));
}

TEST(RunLock, AFileOfTheUsersIsLeftAloneAndALinkIsNotFollowed) {
  const TemporaryFolder folder;
  const auto lock = folder / ".lock", elsewhere = folder / "elsewhere";
  write_all(lock, "mine");
  EXPECT_THAT([&] { RunLock taken(folder.path()); }, ThrowsMessage<ConfigError>(HasSubstr(".lock in it is no run's")));
  EXPECT_EQ(std::filesystem::file_size(lock), 4u);
  std::filesystem::remove(lock);
  std::filesystem::create_symlink(elsewhere, lock);
  EXPECT_THAT([&] { RunLock taken(folder.path()); }, ThrowsMessage<ConfigError>(HasSubstr("cannot be written: .lock in it")));
  EXPECT_FALSE(std::filesystem::exists(elsewhere));
}

TEST(RunLock, AFolderThatCannotBeWrittenIsRefused) {
  const TemporaryFolder folder;
  write_all(folder / "file", "");
  EXPECT_THAT([&] { RunLock lock(folder / "file" / "dir"); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.dir = "), HasSubstr("cannot be made"))));
  EXPECT_THAT([] { RunLock lock("/proc"); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.dir = /proc: cannot be written"))));
  std::filesystem::create_directory(folder / ".lock");
  EXPECT_THAT([&] { RunLock lock(folder.path()); }, ThrowsMessage<ConfigError>(HasSubstr(".lock in it: Is a directory")));
}

}  // namespace
}  // namespace tessera::checkpoint
