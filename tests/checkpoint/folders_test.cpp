#include "tessera/checkpoint/folders.h"

#include <bit>
#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/cut_parameter.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

/// Which folder is the newest that holds, which go, and which run they are of.
namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;
namespace fs = std::filesystem;

TEST(FindLatest, BelievesNoFolderByItsName) {
  const TemporaryFolder folder;
  for (const int64_t step : {2, 4}) save_with(Layout::Rows, 2, folder.path(), step);
  fs::copy(folder / "step-00000002", folder / "step-00000050", fs::copy_options::recursive);
  const auto latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000004");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000050: holds step 2"), HasSubstr("rename it to step-00000002"))));
  EXPECT_FALSE(written_checkpoints(folder.path()).back().writer) << "nor does it count as one of the newest that are kept";
}

/// Saves one that records a loss which is no number; of `not_finite` false, one that is.
void save_lost(const fs::path& dir, int64_t step, bool not_finite = true) {
  auto state = state_of(Layout::Rows, 1, 0, step);
  state.progress["replay"] = {{"not_finite", not_finite}};
  save(dir, state, comm::Group::self());
}

TEST(FindLatest, PassesOverWhatMakesNoNumber) {
  const TemporaryFolder folder;
  save_lost(folder.path(), 2, false);
  save_lost(folder.path(), 4);
  for (const auto thoroughness : {Thoroughness::Sizes, Thoroughness::Hashes}) {
    const auto latest = find_latest(folder.path(), thoroughness);
    EXPECT_EQ(latest.folder->filename(), "step-00000002");
    EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000004: the loss that it recorded"), HasSubstr("is not finite"))));
  }
  EXPECT_EQ(problem_with(folder / "step-00000004", Thoroughness::Hashes), std::nullopt) << "it is whole";
  constexpr auto any_step = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, any_step, /*verify=*/false).folder->filename(), "step-00000004") << "asked for";
  auto state = state_of(Layout::Rows, 1, 0, 5);
  state.progress["replay"] = {"of", "somebody's own"};
  save(folder.path(), state, comm::Group::self());
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000005");
  // Of builds that did not mark it.
  const auto loss = [](double value) { return nlohmann::json{{"index", 0}, {"bits", std::bit_cast<uint64_t>(value)}}; };
  const double none = std::numeric_limits<double>::quiet_NaN();
  auto older = state_of(Layout::Rows, 1, 0, 6);
  older.progress["replay"] = {{"losses", {loss(none), loss(1.5)}}};
  save(folder.path(), older, comm::Group::self());
  older = state_of(Layout::Rows, 1, 0, 7);
  older.progress["replay"] = {{"losses", {loss(none), loss(none)}}};
  save(folder.path(), older, comm::Group::self());
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000006");
}

TEST(FindLatest, TakesTheNewestValidOneAndSaysWhatItSkipped) {
  const TemporaryFolder folder;
  EXPECT_FALSE(find_latest(folder / "missing").folder);
  EXPECT_FALSE(find_latest(folder.path()).folder);
  for (const int64_t step : {2, 10, 9, 100}) save_with(Layout::Rows, 2, folder.path(), step);
  EXPECT_EQ(find_latest(folder.path()).folder->filename(), "step-00000100");
  EXPECT_THAT(find_latest(folder.path()).skipped, IsEmpty());

  const auto newest = folder / "step-00000100" / "rank-00000-of-00002.safetensors";
  const std::string good = read_all(newest);
  write_all(newest, good.substr(0, good.size() - 1));
  auto latest = find_latest(folder.path(), Thoroughness::Sizes);
  EXPECT_EQ(latest.folder->filename(), "step-00000010");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(AllOf(HasSubstr("step-00000100"), HasSubstr("bytes, the manifest says"))));

  fs::remove(folder / "step-00000010" / "rank-00001-of-00002.safetensors");
  latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000009");
  EXPECT_THAT(latest.skipped, testing::ElementsAre(HasSubstr("step-00000100"), AllOf(HasSubstr("rank-00001"), HasSubstr("is missing"))));

  flip_byte(folder / "step-00000009" / "rank-00001-of-00002.safetensors", fs::file_size(folder / "step-00000009" / "rank-00001-of-00002.safetensors") - 3);
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes).folder->filename(), "step-00000009");
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Hashes).folder->filename(), "step-00000002");
}

TEST(FindLatest, LooksBelowAStep) {
  const TemporaryFolder folder;
  for (const int64_t step : {3, 7}) save_with(Layout::Rows, 1, folder.path(), step);
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, 8).folder->filename(), "step-00000007");
  EXPECT_EQ(find_latest(folder.path(), Thoroughness::Sizes, 7).folder->filename(), "step-00000003");
  EXPECT_FALSE(find_latest(folder.path(), Thoroughness::Sizes, 3).folder);
}

TEST(HashShare, EveryByteIsReadByExactlyOneOfThoseWhoShare) {
  const TemporaryFolder folder;
  const auto checkpoint = save_with(Layout::Rows, 3, folder.path());
  const Manifest manifest = read_manifest(checkpoint);
  for (const int parts : {1, 2, 3, 5, 8}) {
    std::map<int, uint64_t> bytes;
    uint64_t whole = 0;
    for (const auto& [name, tensor] : manifest.tensors) {
      for (const auto& slice : tensor.slices) {
        const TensorEntry entry = SafetensorsFile(checkpoint / slice.file).entry(slice.key);
        flip_byte(checkpoint / slice.file, entry.offset);
        std::vector<int> found;
        for (int index = 0; index < parts; ++index) {
          if (problem_with(checkpoint, Thoroughness::Hashes, {index, parts})) found.push_back(index);
        }
        flip_byte(checkpoint / slice.file, entry.offset);
        ASSERT_EQ(found.size(), 1) << name << " of " << parts;
        bytes[found.front()] += entry.bytes;
        whole += entry.bytes;
      }
    }
    const uint64_t largest = 9 * 6 * 4;  // a rank's rows of "big"
    for (const auto& [index, read] : bytes) EXPECT_LE(read, whole / static_cast<uint64_t>(parts) + largest) << index << " of " << parts;
  }
}

TEST(FindLatest, OverlooksWhatAKilledSaveLeft) {
  const TemporaryFolder folder;
  save_with(Layout::Rows, 2, folder.path(), 5);
  fs::copy(folder / "step-00000005", folder / ".tmp-step-00000006");
  fs::remove(folder / ".tmp-step-00000006" / "manifest.json");
  fs::create_directory(folder / "step-00000007");  // a folder without manifest
  fs::create_directory(folder / "step-8");         // not ours
  write_all(folder / "step-00000009", "a file");
  const auto latest = find_latest(folder.path());
  EXPECT_EQ(latest.folder->filename(), "step-00000005");
  EXPECT_EQ(latest.skipped.size(), 2);
  save_with(Layout::Rows, 2, folder.path(), 6);
  expect_loads(folder / "step-00000006", Layout::Replicated, 1);
}

TEST(Prune, KeepsTheNewestAndNeverLosesTheLastGoodOne) {
  const TemporaryFolder folder;
  const auto names = [&] {
    std::set<std::string> left;
    for (const auto& entry : fs::directory_iterator(folder.path())) left.insert(entry.path().filename());
    return left;
  };
  for (const int64_t step : {1, 2, 3, 4}) save_with(Layout::Rows, 1, folder.path(), step);
  fs::create_directory(folder / ".tmp-step-00000009");
  const auto pruned = [&](int64_t keep, const PruneOptions& options = {}) {
    const auto gone = prune(folder.path(), keep, options).gone;
    remove_pruned(gone);
    return gone;
  };
  EXPECT_EQ(pruned(0).size(), 1);
  EXPECT_EQ(names().size(), 4) << "0 keeps all, and only leftovers go";
  EXPECT_EQ(pruned(2).size(), 2);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000003", "step-00000004"}));
  fs::remove(folder / "step-00000004/manifest.json");
  EXPECT_THAT(pruned(1), IsEmpty()) << "3 is the last good one";
  save_with(Layout::Rows, 1, folder.path(), 4);
  const auto written = folder / "step-00000004" / "rank-00000-of-00001.safetensors";
  flip_byte(written, fs::file_size(written) - 1);
  EXPECT_THAT(pruned(1), IsEmpty()) << "4 has its size, but not its bytes";
  save_with(Layout::Rows, 1, folder.path(), 5);
  pruned(1);
  EXPECT_EQ(names(), (std::set<std::string>{"step-00000005"}));
  EXPECT_THAT(prune(folder / "missing", 1).gone, IsEmpty());
}

TEST(Prune, LeavesFoldersThatHoldWhatNoSaveWrote) {
  const TemporaryFolder folder;
  for (const int64_t step : {1, 2, 3}) save_with(Layout::Rows, 1, folder.path(), step);
  write_all(folder / "step-00000002" / "mine.txt", "precious");
  fs::create_directories(folder / ".tmp-step-00000008" / "mine");
  const auto pruned = prune(folder.path(), 1);
  remove_pruned(pruned.gone);
  EXPECT_FALSE(fs::exists(folder / "step-00000001"));
  EXPECT_EQ(read_all(folder / "step-00000002" / "mine.txt"), "precious");
  EXPECT_TRUE(fs::exists(folder / ".tmp-step-00000008" / "mine"));
  EXPECT_THAT(pruned.kept, ElementsAre(HasSubstr(".tmp-step-00000008: holds mine, which"), HasSubstr("step-00000002: holds mine.txt, which")));
  EXPECT_THAT(foreign_leftover(folder.path()).value(), HasSubstr(".tmp-step-00000008: holds mine"));
  expect_loads(folder / "step-00000002", Layout::Replicated, 1);
}

TEST(Prune, WhatMakesNoNumberPushesNothingOut) {
  const TemporaryFolder folder;
  const auto left = [&](int64_t keep) {
    remove_pruned(prune(folder.path(), keep, {}).gone);
    std::set<int64_t> steps;
    for (const auto& [step, path] : checkpoint_folders(folder.path())) steps.insert(step);
    return steps;
  };
  for (const int64_t step : {1, 2}) save_with(Layout::Rows, 1, folder.path(), step);
  for (const int64_t step : {3, 4, 5}) save_lost(folder.path(), step);
  EXPECT_EQ(left(2), (std::set<int64_t>{1, 2, 5})) << "of those that make none, the newest stays beside";
  EXPECT_EQ(left(1), (std::set<int64_t>{2, 5}));
  save_with(Layout::Rows, 1, folder.path(), 6);
  EXPECT_EQ(left(1), (std::set<int64_t>{6}));
}

TEST(Prune, CountsAndTakesOnlyWhatLiesOnTheRunsLine) {
  const TemporaryFolder folder;
  const auto first = RunIdentity::fresh(), second = first.continued(2), other = RunIdentity::fresh();
  const auto write = [&](int64_t step, const RunIdentity& run) {
    auto state = state_of(Layout::Rows, 1, 0, step);
    state.run = run;
    save(folder.path(), state, comm::Group::self());
  };
  for (const int64_t step : {1, 2}) write(step, first);
  write(3, first);  // abandoned: the second start went back behind it
  for (const int64_t step : {4, 5}) write(step, second);
  for (const int64_t step : {6, 7}) write(step, other);
  std::set<std::string> left;
  remove_pruned(prune(folder.path(), 2, {.run = second, .known = {5}}).gone);
  for (const auto& entry : fs::directory_iterator(folder.path())) left.insert(entry.path().filename());
  EXPECT_EQ(left, (std::set<std::string>{"step-00000003", "step-00000004", "step-00000005", "step-00000006", "step-00000007"}));
}

TEST(RunIdentity, KnowsItsLineFromThoseBesideIt) {
  const auto first = RunIdentity::fresh(), second = first.continued(10), third = second.continued(20), beside = first.continued(10);
  EXPECT_TRUE(first.holds(first, 99));
  EXPECT_TRUE(third.holds(first, 10));
  EXPECT_FALSE(third.holds(first, 15)) << "left behind when the second went back to 10";
  EXPECT_TRUE(third.holds(second, 20));
  EXPECT_FALSE(third.holds(beside, 12));
  EXPECT_FALSE(third.holds(RunIdentity::fresh(), 5));
  EXPECT_TRUE(third.descends_from(first, 10));
  EXPECT_FALSE(first.descends_from(first, 10));
  EXPECT_EQ(run_identity_from(to_json(third)), third);
  const auto launched = RunIdentity::fresh("one job").continued(10, "another");
  EXPECT_EQ(launched.job, "another") << "of whoever wrote it";
  EXPECT_EQ(run_identity_from(to_json(launched)), launched);
  auto older = to_json(launched);
  older.erase("job");
  EXPECT_EQ(run_identity_from(older).job, "") << "older versions wrote none";
  EXPECT_TRUE(RunIdentity().holds(RunIdentity(), 5)) << "older versions wrote none";
}

TEST(RunIdentity, ACheckpointOfAnotherRunGivesWayWhole) {
  const TemporaryFolder folder;
  auto state = state_of(Layout::Rows, 1, 0, 4);
  state.run = RunIdentity::fresh();
  save(folder.path(), state, comm::Group::self());
  const auto before = read_all(folder / "step-00000004" / "manifest.json");
  state.run = RunIdentity::fresh();
  save(folder.path(), state, comm::Group::self());
  EXPECT_EQ(read_all(folder / "set-aside-1" / "step-00000004" / "manifest.json"), before);
  EXPECT_EQ(read_manifest(folder / "step-00000004").run, state.run);
}

/// For want of permission, or of a disk that answers: it may be anybody's.
TEST(RunIdentity, ACheckpointWhoseManifestCannotBeReachedStays) {
  const TemporaryFolder folder;
  const auto state = state_of(Layout::Rows, 1, 0, 4);
  save(folder.path(), state, comm::Group::self());
  const auto manifest = folder / "step-00000004" / "manifest.json", kept = folder / "step-00000004" / "kept.json";
  fs::rename(manifest, kept);
  const auto before = read_all(kept);
  fs::create_symlink("manifest.json", manifest);  // a link to itself, which nobody can open
  EXPECT_THAT([&] { save(folder.path(), state, comm::Group::self()); }, ThrowsMessage<std::runtime_error>(HasSubstr("symbolic links")));
  EXPECT_EQ(read_all(kept), before);
}

}  // namespace
}  // namespace tessera::checkpoint
