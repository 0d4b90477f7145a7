#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <random>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/checkpoint/saver.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

/// A process that is killed at any moment of a save leaves a folder from which the previous checkpoint, or already the new one, loads.
namespace tessera::checkpoint {
namespace {

/// Saves step 2 with keep = 1 over what is there. Returns the number of changes to the file system, unless it dies before change number `last`.
int save_until(const std::filesystem::path& dir, bool async, int last) {
  std::atomic<int> changes = 0;
  const FaultPointScope kill([&](std::string_view, const std::filesystem::path&) {
    if (++changes == last) ::raise(SIGKILL);
  });
  Saver saver({.dir = dir, .keep = 1, .async = async, .staging_bytes = 512}, comm::Group::self());
  saver.save(state_of(Layout::Rows, 1, 0, 2));
  saver.wait();
  return changes;
}

/// In a process of its own; true where it was killed.
bool killed_in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0) << "it ended by something else: " << status;
  return WIFSIGNALED(status);
}

class Kills : public testing::TestWithParam<bool> {};

TEST_P(Kills, AtEveryChangeToTheFileSystemNothingIsLost) {
  const TemporaryFolder folder;
  const auto dir = folder / "run";
  int points = 0;
  bool killed = true;
  for (int last = 1; killed && last < 100; ++last, ++points) {
    std::filesystem::remove_all(dir);
    save(dir, state_of(Layout::Columns, 1, 0, 1), comm::Group::self());
    killed = killed_in_child([&] { save_until(dir, GetParam(), last); });
    const auto latest = find_latest(dir);
    ASSERT_TRUE(latest.folder) << "killed at change " << last;
    EXPECT_TRUE(latest.skipped.empty()) << "what a kill leaves is never taken for a checkpoint: " << latest.skipped.front();
    if (!killed) EXPECT_EQ(latest.folder->filename(), "step-00000002");
    expect_loads(*latest.folder, Layout::Rows, 1);
    if (last % 5 != 0) continue;
    // The next save clears up.
    save_until(dir, GetParam(), 0);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir), {}), 1) << "killed at change " << last;
    expect_loads(dir / "step-00000002", Layout::Rows, 1);
  }
  EXPECT_GT(points, 15) << "a save makes more changes than that";
}

INSTANTIATE_TEST_SUITE_P(Forms, Kills, testing::Bool(), [](const auto& info) { return info.param ? "Asynchronous" : "Synchronous"; });

TEST(RandomKills, TenOfThemLoseNothing) {
  const TemporaryFolder folder;
  std::minstd_rand draw(7);
  save_with(Layout::Columns, 2, folder.path(), 1);
  for (int i = 0; i < 10; ++i) {
    const bool async = i % 2 == 1;
    const int microseconds = static_cast<int>(draw() % 12000);
    const pid_t child = ::fork();
    if (child == 0) {
      for (;;) save_until(folder.path(), async, 0);
    }
    ::usleep(static_cast<useconds_t>(microseconds));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto latest = find_latest(folder.path());
    ASSERT_TRUE(latest.folder) << "killed after " << microseconds << " us";
    EXPECT_TRUE(latest.skipped.empty());
    expect_loads(*latest.folder, Layout::Replicated, 1);
  }
}

}  // namespace
}  // namespace tessera::checkpoint
