#include "tessera/launch/scratch_folder.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/host_name.h"
#include "tests/checkpoint/files.h"

namespace tessera::launch {
namespace {

using checkpoint::TemporaryFolder;
using checkpoint::write_all;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr const char* way_out = "do without";

TemporaryPlace place_of(const std::filesystem::path& folder) { return {.knob = "TMPDIR = " + folder.string(), .folder = folder}; }

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> entries;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) entries.push_back(entry.path());
  std::ranges::sort(entries);
  return entries;
}

/// A process that makes a folder and stays until it is killed.
class Launcher {
 public:
  explicit Launcher(const std::filesystem::path& place) {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const ScratchFolder scratch(place_of(place), way_out);
      write_all(scratch.path() / "record.bin", "x");
      [[maybe_unused]] const auto told = ::write(ready[1], "x", 1);
      for (;;) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  ~Launcher() { kill(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

TEST(ScratchFolder, GoesWithItsOwner) {
  const TemporaryFolder tmp;
  {
    const ScratchFolder one(place_of(tmp.path()), way_out), other(place_of(tmp.path()), way_out);
    write_all(one.path() / "record.bin", "x");
    EXPECT_THAT(entries_of(tmp.path()), ::testing::UnorderedElementsAre(one.path(), other.path()));
    EXPECT_TRUE(one.path().filename().string().starts_with("tessera_run_"));
  }
  EXPECT_THAT(entries_of(tmp.path()), IsEmpty());
}

TEST(ScratchFolder, OfALauncherThatWasKilledGoesWithTheNext) {
  const TemporaryFolder tmp;
  Launcher dead(tmp.path());
  const Launcher alive(tmp.path());
  EXPECT_EQ(entries_of(tmp.path()).size(), 2u);
  {
    const ScratchFolder while_both_live(place_of(tmp.path()), way_out);
  }
  EXPECT_EQ(entries_of(tmp.path()).size(), 2u);
  dead.kill();
  EXPECT_EQ(entries_of(tmp.path()).size(), 2u) << "it could not clear up";
  {
    const ScratchFolder next(place_of(tmp.path()), way_out);
  }
  EXPECT_EQ(entries_of(tmp.path()).size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(entries_of(tmp.path()).front() / "record.bin")) << "its launcher lives";
}

TEST(ScratchFolder, WhatNobodyCanKnowOfIsLeftAlone) {
  const TemporaryFolder all;
  const auto place = all / "place", elsewhere = all / "elsewhere";
  const auto add = [&](const std::filesystem::path& folder, const std::string& host) {
    std::filesystem::create_directories(folder);
    write_all(folder / "launcher.lock", host + "\n");
  };
  std::filesystem::create_directories(place / "tessera_run_unlock");  // being made
  add(place / "tessera_run_remote", "elsewhere");
  add(place / "tessera_other", host_name("localhost"));
  add(elsewhere / "target", host_name("localhost"));
  std::filesystem::create_directory_symlink(elsewhere / "target", place / "tessera_run_symlnk");
  write_all(place / "tessera_run_a_file", "");
  const auto before = entries_of(place);
  add(place / "tessera_run_nobody", host_name("localhost"));
  {
    const ScratchFolder next(place_of(place), way_out);
  }
  EXPECT_EQ(entries_of(place), before);
  EXPECT_THAT(entries_of(elsewhere), ElementsAre(elsewhere / "target"));
}

/// Launchers that come, go and are killed at the same time: each finds its own folder whole to its end.
TEST(ScratchFolder, LaunchersNeverRemoveEachOthers) {
  const TemporaryFolder tmp;
  std::vector<pid_t> children;
  for (int child = 0; child < 6; ++child) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    for (int round = 0; round < 100; ++round) {
      const ScratchFolder scratch(place_of(tmp.path()), way_out);
      write_all(scratch.path() / "record.bin", "x");
      if (child % 2 == 1 && round == 50 + child) ::kill(::getpid(), SIGKILL);
      std::this_thread::yield();
      if (!std::filesystem::exists(scratch.path() / "record.bin")) std::_Exit(1);
    }
    std::_Exit(0);
  }
  for (int child = 0; child < 6; ++child) {
    int status = 0;
    ::waitpid(children[child], &status, 0);
    EXPECT_EQ(status, child % 2 == 1 ? SIGKILL : 0) << child;
  }
  {
    const ScratchFolder last(place_of(tmp.path()), way_out);
  }
  EXPECT_THAT(entries_of(tmp.path()), IsEmpty());
}

TEST(ScratchFolder, APlaceThatIsNoneIsRefusedByItsKnob) {
  const TemporaryFolder tmp;
  write_all(tmp / "file", "");
  for (const auto& [folder, why] : {std::pair{tmp / "nope", "No such file or directory"}, {tmp / "file", "Not a directory"}}) {
    const std::string expected =
        "TMPDIR = " + folder.string() + ": nothing can be made there (" + why + "); set TMPDIR to a folder that exists and can be written, or do without";
    EXPECT_THAT(([&, folder = folder] { const ScratchFolder scratch(place_of(folder), way_out); }), ThrowsMessage<ConfigError>(expected));
  }
}

}  // namespace
}  // namespace tessera::launch
