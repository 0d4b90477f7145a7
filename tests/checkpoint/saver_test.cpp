#include "tessera/checkpoint/saver.h"

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Fails as a full disk does wherever `path` is named, until told to stop.
class FullDisk {
 public:
  explicit FullDisk(std::string path, std::string action = "write")
      : scope_([this, path, action](std::string_view what, const fs::path& where) {
          if (full && what == action && where.string().find(path) != std::string::npos) throw Error(where.string() + ": cannot write: No space left on device");
        }) {}

  std::atomic<bool> full = true;

 private:
  FaultPointScope scope_;
};

class SaverTest : public testing::TestWithParam<bool> {
 protected:
  SaverOptions options(int64_t keep = 0) const { return {.dir = folder_.path(), .keep = keep, .async = GetParam(), .staging_bytes = 256}; }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_.path())) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  TemporaryFolder folder_;
};

TEST_P(SaverTest, WhatItSavesIsWhatTheTensorsHeldWhenItWasCalled) {
  for (const int ranks : {1, 2, 3, 5}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      Saver saver(options(), world.group());
      for (const int64_t step : {1, 2, 3}) {
        const auto state = state_of(Layout::Rows, ranks, world.rank(), step);
        saver.save(state);
        for (const auto& held : state.tensors) at::Tensor(held.tensor).fill_(-3);  // training goes on
      }
      saver.wait();
      const auto outcomes = saver.outcomes();
      ASSERT_EQ(outcomes.size(), 3);
      for (const auto& outcome : outcomes) EXPECT_THAT(outcome.error, IsEmpty());
      EXPECT_THAT(saver.outcomes(), IsEmpty());
    });
    EXPECT_THAT(names(), ElementsAre("step-00000001", "step-00000002", "step-00000003"));
    for (const auto& name : names()) {
      EXPECT_EQ(problem_with(folder_ / name, Thoroughness::Hashes), std::nullopt);
      expect_loads(folder_ / name, Layout::Columns, 2);
    }
  }
}

TEST_P(SaverTest, BothFormsWriteTheSameBytes) {
  const TemporaryFolder* folder = &folder_;
  const auto other = folder_ / "other";
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver(options(), world.group());
    saver.save(state_of(Layout::ZigZag, 2, world.rank()));
    saver.wait();
    save(other, state_of(Layout::ZigZag, 2, world.rank()), world.group());
  });
  for (const char* file : {"manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}) {
    EXPECT_EQ(read_all(*folder / "step-00000010" / file), read_all(other / "step-00000010" / file)) << file;
  }
}

/// A program that names no run, started again from the beginning: what went further is not its own newest.
TEST_P(SaverTest, WhatAnEarlierStartSavedFurtherOnPushesNothingOut) {
  for (const std::vector<int64_t>& start : {std::vector<int64_t>{4, 5, 6}, {1, 2, 3}}) {
    Saver saver(options(2), comm::Group::self());
    for (const int64_t step : start) {
      saver.save(state_of(Layout::Rows, 1, 0, step));
      saver.wait();
    }
    for (const auto& outcome : saver.outcomes()) EXPECT_THAT(outcome.error, IsEmpty());
  }
  EXPECT_THAT(names(), ElementsAre("step-00000002", "step-00000003", "step-00000005", "step-00000006"));
}

TEST_P(SaverTest, AFullDiskOfOneRankIsToldToAllAndTheLastGoodOneStays) {
  comm::run_ranks(3, [&](comm::World& world) {
    Saver saver(options(1), world.group());
    saver.save(state_of(Layout::Rows, 3, world.rank(), 1));
    saver.wait();
    std::unique_ptr<FullDisk> disk;
    comm::barrier(world.group());
    if (world.rank() == 0) disk = std::make_unique<FullDisk>("rank-00001");
    comm::barrier(world.group());
    saver.save(state_of(Layout::Rows, 3, world.rank(), 2));
    saver.wait();
    auto outcomes = saver.outcomes();
    ASSERT_EQ(outcomes.size(), 2);
    EXPECT_THAT(outcomes[1].error, AllOf(HasSubstr("rank 1: "), HasSubstr("No space left")));
    comm::barrier(world.group());
    if (world.rank() == 0) {
      EXPECT_THAT(names(), ElementsAre("step-00000001"));
      disk->full = false;
    }
    comm::barrier(world.group());
    saver.save(state_of(Layout::Rows, 3, world.rank(), 3));
    saver.wait();
    outcomes = saver.outcomes();
    ASSERT_EQ(outcomes.size(), 1);
    EXPECT_THAT(outcomes[0].error, IsEmpty());
  });
  EXPECT_THAT(names(), ElementsAre("step-00000003"));
  expect_loads(folder_ / "step-00000003", Layout::Replicated, 1);
}

TEST_P(SaverTest, EveryActionThatFailsLeavesTheLastGoodOne) {
  Saver saver(options(), comm::Group::self());
  saver.save(state_of(Layout::Rows, 1, 0, 1));
  saver.wait();
  for (const char* action : {"make folder", "create", "write", "sync", "rename"}) {
    const FullDisk disk("step-", action);
    saver.save(state_of(Layout::Rows, 1, 0, 2));
    saver.wait();
    EXPECT_THAT(saver.outcomes().back().error, HasSubstr("No space left")) << action;
    EXPECT_EQ(find_latest(folder_.path()).folder->filename(), "step-00000001") << action;
  }
  saver.save(state_of(Layout::Rows, 1, 0, 2));
  saver.wait();
  EXPECT_THAT(saver.outcomes().back().error, IsEmpty());
  EXPECT_THAT(names(), ElementsAre("step-00000001", "step-00000002"));
}

TEST_P(SaverTest, WhatCannotBeRemovedIsARemark) {
  Saver saver(options(1), comm::Group::self());
  saver.save(state_of(Layout::Rows, 1, 0, 1));
  saver.wait();
  {
    const FullDisk disk(".tmp-step-00000001", "rename");
    saver.save(state_of(Layout::Rows, 1, 0, 2));
    saver.wait();
  }
  const auto outcomes = saver.outcomes();
  ASSERT_EQ(outcomes.size(), 2);
  EXPECT_THAT(outcomes[1].error, IsEmpty());
  EXPECT_THAT(outcomes[1].remark, HasSubstr(".tmp-step-00000001"));
  EXPECT_EQ(find_latest(folder_.path()).folder->filename(), "step-00000002");
}

/// Others wait in their next collective while rank 0 prunes: what it reads must not grow with what was saved.
TEST_P(SaverTest, WhatItWroteIsNotReadBack) {
  std::atomic<int> hashed = 0;
  const FaultPointScope count([&](std::string_view action, const fs::path&) { hashed += action == "hash" ? 1 : 0; });
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver(options(1), world.group());
    for (const int64_t step : {1, 2, 3}) saver.save(state_of(Layout::Rows, 2, world.rank(), step));
    saver.wait();
    for (const auto& outcome : saver.outcomes()) EXPECT_THAT(outcome.error + outcome.remark, IsEmpty());
  });
  EXPECT_EQ(hashed, 0);
  EXPECT_THAT(names(), ElementsAre("step-00000003"));
}

/// What is deleted is deleted beside the run: a disk that takes its time over it holds up nobody before the end.
TEST_P(SaverTest, WhatGoesIsDeletedBesideTheRun) {
  std::atomic<bool> may_remove = false;
  const FaultPointScope slow([&](std::string_view action, const fs::path& path) {
    if (action == "remove" && path.extension() == ".gone") may_remove.wait(false);
  });
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver(options(1), world.group());
    const comm::Group beside = world.subgroup({0, 1}, "beside the saver's");  // which its thread may still use
    for (const int64_t step : {1, 2}) saver.save(state_of(Layout::Rows, 2, world.rank(), step));
    comm::barrier(beside);  // both are here, or this test hangs
    if (world.rank() == 0) {
      may_remove = true;
      may_remove.notify_all();
    }
    saver.wait();
  });
  EXPECT_THAT(names(), ElementsAre("step-00000002"));
}

/// A rank for which the system has no thread writes on its own, and the others' threads do not wait for ever.
TEST_P(SaverTest, WithoutAThreadTheCallersWrites) {
  std::atomic<int> refused = 0;
  const FaultPointScope none([&](std::string_view action, const fs::path& path) {
    if (action != "start thread" || path.string().find("step-00000001") != std::string::npos) return;
    ++refused;
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  });
  testing::internal::CaptureStderr();
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver(options(1), world.group());
    for (const int64_t step : {1, 2, 3}) saver.save(state_of(Layout::Rows, 2, world.rank(), step));
    EXPECT_FALSE(saver.pending());
    for (const auto& outcome : saver.outcomes()) EXPECT_THAT(outcome.error + outcome.remark, IsEmpty());
  });
  const std::string said = testing::internal::GetCapturedStderr();
  if (GetParam()) EXPECT_THAT(said, AllOf(HasSubstr("checkpoint.async: training waits for the disk on rank 1"), HasSubstr("ulimit -u")));
  EXPECT_GT(refused, 0);
  EXPECT_THAT(names(), ElementsAre("step-00000003"));
  expect_loads(folder_ / "step-00000003", Layout::Replicated, 1);
}

TEST_P(SaverTest, WhatCannotBeDeletedIsToldInTheEnd) {
  Saver saver(options(1), comm::Group::self());
  FullDisk disk(".gone", "remove");
  for (const int64_t step : {1, 2}) saver.save(state_of(Layout::Rows, 1, 0, step));
  if (GetParam()) saver.wait();
  saver.outcomes();
  disk.full = false;
  saver.save(state_of(Layout::Rows, 1, 0, 3));
  saver.wait();
  EXPECT_THAT(names(), ElementsAre("step-00000003")) << "the next one clears up";
  disk.full = true;
  saver.save(state_of(Layout::Rows, 1, 0, 4));
  saver.wait();
  EXPECT_THAT(saver.outcomes().back().remark, HasSubstr("step-00000003.gone"));
}

TEST_P(SaverTest, SlicesThatDoNotMakeAWholeAreOurBug) {
  Saver saver(options(), comm::Group::self());
  EXPECT_THROW(saver.save(state_of(Layout::Rows, 2, 0)), InternalError);
  EXPECT_THAT(names(), IsEmpty());
}

TEST_P(SaverTest, ItsEndWaitsForASaveUnderWay) {
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver(options(), world.group());
    saver.save(state_of(Layout::Columns, 2, world.rank(), 4));
  });
  EXPECT_EQ(problem_with(folder_ / "step-00000004", Thoroughness::Hashes), std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(Forms, SaverTest, testing::Bool(), [](const auto& info) { return info.param ? "Asynchronous" : "Synchronous"; });

TEST(AsyncSaver, ReturnsWhileTheDiskIsStillBusy) {
  const TemporaryFolder folder;
  std::atomic<bool> may_write = false;
  const FaultPointScope slow([&](std::string_view action, const fs::path&) {
    if (action == "sync") may_write.wait(false);
  });
  Saver saver({.dir = folder.path(), .keep = 0, .async = true, .staging_bytes = 1 << 20}, comm::Group::self());
  saver.save(state_of(Layout::Rows, 1, 0, 1));  // returns, or this test hangs
  EXPECT_TRUE(saver.pending());
  EXPECT_THAT(saver.outcomes(), IsEmpty());
  EXPECT_FALSE(find_latest(folder.path()).folder) << "nothing is valid before all is written";
  may_write = true;
  may_write.notify_all();
  saver.wait();
  EXPECT_FALSE(saver.pending());
  EXPECT_EQ(saver.outcomes().size(), 1);
  expect_loads(folder / "step-00000001", Layout::Rows, 2);
}

TEST(AsyncSaver, NoRankRenamesBeforeAllHaveWritten) {
  const TemporaryFolder folder;
  std::atomic<bool> may_finish = false;
  const FaultPointScope slow([&](std::string_view action, const fs::path& path) {
    if (action == "sync" && path.string().find("rank-00001") != std::string::npos) may_finish.wait(false);
  });
  comm::run_ranks(2, [&](comm::World& world) {
    Saver saver({.dir = folder.path(), .keep = 0, .async = true, .staging_bytes = 1 << 20}, world.group());
    saver.save(state_of(Layout::Rows, 2, world.rank(), 1));
    if (world.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      EXPECT_FALSE(fs::exists(folder / "step-00000001"));
      may_finish = true;
      may_finish.notify_all();
    }
    saver.wait();
    EXPECT_TRUE(fs::exists(folder / "step-00000001"));
  });
}

TEST(AsyncSaver, ALostPeerIsThrownNotTakenForAFullDisk) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::World& world) {
    const auto own = world.subgroup({0, 1}, "checkpoint");
    Saver saver({.dir = folder.path(), .keep = 0, .async = true, .staging_bytes = 1 << 20}, own);
    saver.save(state_of(Layout::Rows, 2, world.rank(), 1));
    saver.wait();
    comm::barrier(world.group());
    if (world.rank() == 1) {
      world.abort();
      return;
    }
    EXPECT_THROW(
        {
          saver.save(state_of(Layout::Rows, 2, 0, 2));
          saver.wait();
        },
        CommError);
    EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000001");
  });
}

}  // namespace
}  // namespace tessera::checkpoint
