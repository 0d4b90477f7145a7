// Whose checkpoints are whose: fresh starts, second runs, rewinds and restarts in one folder; and what a run that goes on may do otherwise.

#include <chrono>
#include <csignal>
#include <thread>

#include <torch/nn/modules/linear.h>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/core/format.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/mesh/roles.h"
#include "tessera/optim/schedule.h"
#include "tessera/train/compose.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/observers/metrics_file.h"
#include "tessera/train/progress.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;
using testing_support::kLast;
using testing_support::kSaved;
using testing_support::Layout;
using testing_support::Sets;

class Runs : public testing_support::ResumeFixture {
 protected:
  /// A run of two ranks into `dir`, saved every second step; returns what it says.
  std::string run_into(const std::string& dir, int64_t last, Sets more, const OpenOptions& open = {}) {
    more.insert(more.end(), {"checkpoint.dir=" + (folder_ / dir).string(), "checkpoint.every=2", "run.steps=" + std::to_string(last)});
    ::testing::internal::CaptureStderr();
    try {
      steps_ = run(ddp2_, more, open);
    } catch (...) {
      ::testing::internal::GetCapturedStderr();
      throw;
    }
    return ::testing::internal::GetCapturedStderr();
  }
  std::string at(const std::string& dir, int64_t step) const { return (folder_ / dir / ("step-0000000" + std::to_string(step))).string(); }
  std::vector<int64_t> steps_in(const std::string& dir) const {
    std::vector<int64_t> steps;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / dir)) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step-")) steps.push_back(std::stoll(name.substr(5)));
    }
    std::ranges::sort(steps);
    return steps;
  }
  int64_t first_step() const { return steps_.empty() ? 0 : steps_.front().step; }

  /// What ends a run; ThrowsMessage would begin another one to tell.
  static std::string failure(const std::function<void()>& action) {
    try {
      action();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "none";
  }
  /// The same with something that happens to it behind each step.
  std::string run_beside(const std::string& dir, Sets more, const std::function<void(int64_t step)>& meanwhile) {
    class Beside : public Observer {
     public:
      explicit Beside(const std::function<void(int64_t)>& meanwhile) : meanwhile_(meanwhile) {}
      void after_step(const StepResult& result) override { meanwhile_(result.step); }

     private:
      const std::function<void(int64_t)>& meanwhile_;
    };
    if (!dir.empty()) more.insert(more.end(), {"checkpoint.dir=" + (folder_ / dir).string(), "checkpoint.every=2"});
    more.push_back("run.steps=6");
    const Config config = settings(ddp2_, more);
    ::testing::internal::CaptureStderr();
    try {
      comm::run_ranks(2, [&](comm::World& world) {
        Trainer trainer(config, world, open_inputs(config));
        trainer.add_observer(std::make_unique<Beside>(meanwhile));
        trainer.run();
      });
    } catch (...) {
      ::testing::internal::GetCapturedStderr();
      throw;
    }
    return ::testing::internal::GetCapturedStderr();
  }

  const Layout ddp2_{"ddp2", 2, {}};
  std::vector<StepResult> steps_;
};

TEST_F(Runs, AFreshStartInAUsedFolderIsRefusedUnlessItSetsTheOthersAside) {
  run_into("a", 4, {});
  EXPECT_THAT(([&] { run_into("a", 4, {}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.dir = "), HasSubstr("step-00000002 to step-00000004"),
                                               HasSubstr("checkpoint.resume = latest"), HasSubstr("checkpoint.replace = true"))));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4));
  const std::string said = run_into("a", 6, {"checkpoint.replace=true", "checkpoint.keep=1"});
  EXPECT_THAT(said, AllOf(HasSubstr("step-00000002 to step-00000004 are"), HasSubstr("set aside in"), HasSubstr("set-aside-1")));
  EXPECT_THAT(steps_in("a"), ElementsAre(6));
  EXPECT_THAT(steps_in("a/set-aside-1"), ElementsAre(2, 4)) << "nobody deletes what another run wrote";
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a" / ".lock"));
}

TEST_F(Runs, WhatSomebodyElsePutThereIsLeftAndSaid) {
  run_into("a", 4, {});
  std::ofstream(at("a", 2) + "/mine.txt") << "precious";
  EXPECT_THAT(run_into("a", 6, {"checkpoint.resume=latest", "checkpoint.keep=1"}), HasSubstr("step-00000002: holds mine.txt, which no save writes"));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 6));
  std::filesystem::create_directories(folder_ / "a" / ".tmp-step-00000008" / "mine");
  EXPECT_THAT(([&] { run_into("a", 8, {"checkpoint.resume=latest"}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(".tmp-step-00000008: holds mine"), HasSubstr("move it elsewhere"))));
}

TEST_F(Runs, GoingOnFromElsewhereIntoAnotherRunsFolderIsRefused) {
  run_into("a", 4, {});
  run_into("b", 2, {});
  EXPECT_THAT(([&] { run_into("b", 6, {"checkpoint.resume=" + at("a", 4)}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("holds checkpoints of another run (step-00000002)"), HasSubstr("a/step-00000004"))));
  // A copy is the same run.
  std::filesystem::copy(folder_ / "a", folder_ / "copy", std::filesystem::copy_options::recursive);
  EXPECT_THAT(run_into("copy", 6, {"checkpoint.resume=" + at("a", 4)}), Not(HasSubstr("set aside")));
  EXPECT_THAT(steps_in("copy"), ElementsAre(2, 4, 6));
}

TEST_F(Runs, ASecondLiveRunIsRefusedByName) {
  run_into("a", 4, {});  // its checkpoints are in the way, too, and of no use to whoever is told to go on from them
  const checkpoint::RunLock first(folder_ / "a");
  EXPECT_THAT(([&] { run_into("a", 4, {}); }), ThrowsMessage<ConfigError>(AllOf(HasSubstr("is training into it"), HasSubstr("name another checkpoint.dir"))));
}

TEST_F(Runs, ACheckpointFolderThatWasTakenAwayIsTakenAnew) {
  const auto at_step_3 = [&](const std::function<void()>& happens) {
    return [&, happens](int64_t step) {
      if (step == 3) happens();
      if (step == 5) EXPECT_THROW(checkpoint::RunLock{folder_ / "a"}, ConfigError) << "whoever comes now is kept out";
    };
  };
  const auto move = [&] { std::filesystem::rename(folder_ / "a", folder_ / "moved"); };
  EXPECT_THAT(
      run_beside("a", {}, at_step_3(move)),
      AllOf(HasSubstr("the folder was removed, or moved, with what it held, while this run went on; it is taken anew"), HasSubstr("from here on alone")));
  EXPECT_THAT(steps_in("a"), ElementsAre(4, 6));
  EXPECT_THAT(steps_in("moved"), ElementsAre(2));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a" / ".lock"));

  std::filesystem::remove_all(folder_ / "a");
  EXPECT_THAT(run_beside("a", {"checkpoint.async=true"}, at_step_3([&] { std::filesystem::remove(folder_ / "a" / ".lock"); })),
              HasSubstr("its .lock was removed"));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 6));

  std::filesystem::remove_all(folder_ / "a");
  std::filesystem::remove_all(folder_ / "moved");
  std::unique_ptr<checkpoint::RunLock> another;
  const auto give_away = [&] {
    move();
    another = std::make_unique<checkpoint::RunLock>(folder_ / "a");
  };
  EXPECT_THAT(failure([&] { run_beside("a", {}, at_step_3(give_away)); }), AllOf(HasSubstr("cannot be taken anew"), HasSubstr("is training into it")));
  EXPECT_THAT(steps_in("a"), IsEmpty()) << "nothing of one run among the other's";
  EXPECT_EQ(another->loss(), "");
}

/// It is mapped: what is written into it is trained on, and no run could go on from there.
TEST_F(Runs, ATextThatIsWrittenOverEndsTheRunBeforeItIsSaved) {
  const auto byte = data::Tokenizer::load("byte");
  const auto pack = [&](const std::string& name, char letter) {
    std::ofstream(folder_ / (name + ".txt")) << std::string(3000, letter);
    data::Corpus::build({folder_ / (name + ".txt")}, *byte, folder_ / (name + ".bin"));
    std::ifstream file(folder_ / (name + ".bin"), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string ours = pack("ours", 'a'), theirs = pack("theirs", 'b');
  const auto write_over = [&](const std::string& bytes) {  // at no time shorter, for ranks read it
    std::fstream file(folder_ / "ours.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  };
  const auto at_step_3 = [](const std::function<void()>& happens) {
    return [happens](int64_t step) {
      if (step == 3) happens();
    };
  };
  const std::string files = "data.files=[\"" + (folder_ / "ours.bin").string() + "\"]";
  for (const std::string dir : {"a", ""}) {
    EXPECT_THAT(failure([&] { run_beside(dir, {files}, at_step_3([&] { write_over(theirs); })); }),
                AllOf(HasSubstr("data.files: "), HasSubstr("ours.bin: was written over while it was in use"), HasSubstr("(mv)")));
    write_over(ours);
  }
  EXPECT_THAT(steps_in("a"), ElementsAre(2));
  const auto put_in_its_place = [&] { std::filesystem::rename(folder_ / "theirs.bin", folder_ / "ours.bin"); };
  EXPECT_THAT(run_beside("a", {files, "checkpoint.resume=latest"}, at_step_3(put_in_its_place)), Not(HasSubstr("written over")));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 6));

  pack("ours", 'a');
  const std::string said =
      run_beside("", {"data.validation_files=[\"" + (folder_ / "ours.bin").string() + "\"]", "run.validate_every=1"}, at_step_3([&] { write_over(theirs); }));
  EXPECT_THAT(said, HasSubstr("data.validation_files: "));
  EXPECT_EQ(said.find("losses from step 3 on"), said.rfind("losses from step ")) << said;
}

/// A file server keeps what a host held that has vanished, and a refusal would end the job whatever restarts it has left.
TEST_F(Runs, ARestartWaitsForTheLockOfTheAttemptBeforeIt) {
  run_into("a", 4, {});
  auto before = std::make_unique<checkpoint::RunLock>(folder_ / "a");
  std::jthread server([&] {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    before.reset();
  });
  EXPECT_THAT(run_into("a", 6, {}, {.restarted = true}), HasSubstr("is training into it; waiting up to 2 m 00 s for its end"));
  EXPECT_EQ(first_step(), 5);
}

TEST_F(Runs, ARestartWaitsLongerThanAFirstAttemptAndLessThanTheOtherRanks) {
  using std::chrono_literals::operator""s;
  const auto patience = [&](bool restarted, const std::string& timeout_s) {
    return lock_patience(settings(ddp2_, {"comm.timeout_s=" + timeout_s}), restarted);
  };
  EXPECT_EQ(patience(false, "300"), 2s);
  EXPECT_EQ(patience(true, "300"), 120s);
  EXPECT_EQ(patience(true, "40"), 30s);
  EXPECT_EQ(patience(true, "1"), 2s);
}

TEST_F(Runs, ARewindSetsTheLaterOnesAsideAndKeepCountsItsOwn) {
  run_into("a", 8, {});
  const std::string said = run_into("a", 6, {"checkpoint.resume=" + at("a", 2), "checkpoint.keep=2"});
  EXPECT_THAT(said, AllOf(HasSubstr("step-00000004 to step-00000008 are"), HasSubstr("set aside in")));
  EXPECT_THAT(steps_in("a"), ElementsAre(4, 6)) << "its own new ones, not those that it left behind";
  EXPECT_THAT(steps_in("a/set-aside-1"), ElementsAre(4, 6, 8));
  run_into("a", 7, {"checkpoint.resume=latest"});
  EXPECT_EQ(first_step(), 7) << "latest is of the run that went back";
}

TEST_F(Runs, ARewindThatIsRefusedLeavesEverythingWhereItWas) {
  run_into("a", 6, {});
  EXPECT_THAT(([&] { run_into("a", 6, {"checkpoint.resume=" + at("a", 2), "checkpoint.partial=nothing"}); }),
              ThrowsMessage<ConfigError>(HasSubstr("matches no tensor")));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 6)) << "a run that does not train moves nothing";
}

TEST_F(Runs, APatternOfWhatOneStageHoldsIsNoneOfTheOthers) {
  run_into("a", 2, {"model.layers=3"});
  Sets longer{"model.layers=4", "run.steps=3", "checkpoint.resume=" + at("a", 2)};
  longer.push_back("checkpoint.partial=[\"layers.3.**\"]");
  const auto trained = [&](int ranks, Sets more) {
    more.insert(more.end(), longer.begin(), longer.end());
    return run({"staged", ranks, {}}, more).back().loss;
  };
  const double whole = trained(1, {});
  EXPECT_NEAR(trained(2, {"mesh.pp=2"}), whole, testing_support::kLosses * whole);
  EXPECT_NEAR(trained(3, {"mesh.pp=3"}), whole, testing_support::kLosses * whole);
  // The new block lies on the last stage: what is missing and not listed is refused by all.
  longer.back() = "checkpoint.partial=[\"layers.2.**\"]";
  EXPECT_THAT(([&] { trained(2, {"mesh.pp=2"}); }), ThrowsMessage<ConfigError>(HasSubstr("missing model.layers.3.")));
  longer.back() = "checkpoint.partial=[\"layers.3.**\", \"layers.7.**\"]";
  EXPECT_THAT(([&] { open_inputs(settings({"one", 1, {}}, longer)); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.partial = layers.7.**"), HasSubstr("matches no tensor of the checkpoint"))));
}

TEST_F(Runs, ARestartGoesOnFromTheNewestThatThisJobWrote) {
  run_into("a", 6, {});
  const Sets from{"checkpoint.resume=" + at("a", 2)};
  run_into("a", 5, from);
  EXPECT_EQ(first_step(), 3);
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 5));
  run_into("a", 7, from, {.restarted = true});
  EXPECT_EQ(first_step(), 6);
  // Into another folder, and where the newest is damaged.
  run_into("b", 4, from);
  std::filesystem::remove(at("b", 4) + "/manifest.json");
  const std::string said = run_into("b", 6, from, {.restarted = true});
  EXPECT_EQ(first_step(), 3) << "nothing else there went on from it";
  EXPECT_THAT(steps_in("b/set-aside-1"), ElementsAre(4));
  // `keep` may have removed the named one, which is of the run's own line.
  run_into("d", 2, {});
  const Sets gone{"checkpoint.resume=" + at("d", 2), "checkpoint.keep=1"};
  run_into("d", 4, gone);
  EXPECT_THAT(steps_in("d"), ElementsAre(4));
  run_into("d", 6, gone, {.restarted = true});
  EXPECT_EQ(first_step(), 5);
  // A restart before the first save.
  run_into("c", 4, from, {.restarted = true});
  EXPECT_EQ(first_step(), 3);
}

TEST_F(Runs, ARestartPassesOverWhatAnotherJobWrote) {
  run_into("a", 4, {}, {.job = "first"});
  // The second job's first attempt ended before it could set these aside, or refuse them: the next does it.
  const OpenOptions second{.restarted = true, .job = "second"};
  EXPECT_THAT(([&] { run_into("a", 2, {}, second); }),
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("holds checkpoints of another run (step-00000002 to step-00000004)"), HasSubstr("checkpoint.replace = true"))));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4));
  const Sets replace{"checkpoint.replace=true"};
  EXPECT_THAT(run_into("a", 2, replace, second), HasSubstr("step-00000002 to step-00000004 are not what this run goes on from: set aside in"));
  EXPECT_EQ(first_step(), 1);
  EXPECT_THAT(steps_in("a"), ElementsAre(2));
  EXPECT_THAT(steps_in("a/set-aside-1"), ElementsAre(2, 4));
  // Its own it goes on from, with replace and without.
  run_into("a", 4, replace, second);
  EXPECT_EQ(first_step(), 3);
  run_into("a", 6, {}, second);
  EXPECT_EQ(first_step(), 5);
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 6));
  // `latest` is whoever's; and a launcher that gives its job no name leaves no more to go by than that.
  run_into("a", 7, {"checkpoint.resume=latest"}, {.restarted = true, .job = "third"});
  EXPECT_EQ(first_step(), 7);
  run_into("a", 8, {}, {.restarted = true});
  EXPECT_EQ(first_step(), 8);
}

TEST_F(Runs, ARestartPassesOverAnotherJobsThatWentOnFromTheNamedOne) {
  run_into("a", 2, {});
  const Sets from{"checkpoint.resume=" + at("a", 2)};
  run_into("a", 6, from, {.job = "first"});
  const OpenOptions second{.restarted = true, .job = "second"};
  run_into("a", 5, from, second);
  EXPECT_EQ(first_step(), 3) << "as its first attempt would have";
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 4, 5));
  EXPECT_THAT(steps_in("a/set-aside-1"), ElementsAre(4, 6));
  run_into("a", 7, from, second);
  EXPECT_EQ(first_step(), 6);
}

/// By another machine, which is a change that somebody has to be told, and none that was asked for.
TEST_F(Runs, AFormatThatFollowsTheMachineIsAChangeWhereItBecameAnother) {
  ResumePoint point{.folder = "saved", .manifest = {}};
  const auto progress_of = [&](const std::string& asked, const char* became) {
    auto progress = progress_json(settings(ddp2_, {"precision.compute=" + asked}), {}, {}, {}, 2);
    if (became != nullptr) progress["replay"] = {{"arithmetic", {{"precision", {{"compute", became}}}}}};
    return progress;
  };
  Config here = settings(ddp2_, {"precision.compute=auto"});
  here.asked["precision.compute"] = std::exchange(here.precision.compute, "bf16");
  const std::vector<std::pair<nlohmann::json, std::string>> saved{{progress_of("auto", "bf16"), ""},
                                                                  {progress_of("auto", nullptr), ""},
                                                                  {progress_of("bf16", "bf16"), ""},
                                                                  {progress_of("auto", "fp32"), "precision.compute = bf16 (was fp32)"},
                                                                  {progress_of("fp32", nullptr), "precision.compute = bf16 (was fp32)"}};
  for (const auto& [progress, change] : saved) {
    point.manifest.progress = progress;
    SCOPED_TRACE(progress.dump());
    const auto said = changes_since(point, here);
    EXPECT_EQ(said.size(), change.empty() ? 0 : 1);
    if (!said.empty()) EXPECT_THAT(said.front(), HasSubstr(change));
  }
  point.manifest.progress = progress_of("auto", "bf16");
  EXPECT_THAT(changes_since(point, settings(ddp2_, {"precision.compute=auto"})), IsEmpty()) << "of a caller who does not know it yet";
}

/// Losses of two texts would make one curve.
TEST_F(Runs, AnotherTextOfValidationsIsSaid) {
  const auto held_out = [&](const char* letters) {
    std::ofstream text(folder_ / "held_out.txt");
    for (int i = 0; i < 400; ++i) text << letters[i * i % 5];
  };
  const Sets validating{"data.validation_files=" + (folder_ / "held_out.txt").string(), "run.validate_every=2"};
  const auto with = [&](Sets sets) {
    sets.push_back("checkpoint.resume=latest");
    return sets;
  };
  held_out("abcde");
  run_into("a", 2, validating);
  EXPECT_THAT(run_into("a", 4, with(validating)), Not(HasSubstr("another text")));
  run_into("a", 6, with({}));  // without validations, what the last were of is not forgotten
  held_out("fghij");
  const std::string other = run_into("b", 2, {"data.validation_files=" + (folder_ / "held_out.txt").string()});
  EXPECT_THAT(run_into("b", 4, {validating[0], validating[1], "checkpoint.resume=latest"}), Not(HasSubstr("another text"))) << "than none";
  EXPECT_THAT(run_into("a", 8, with(validating)), HasSubstr("data.validation_files: another text than until step 6"));
  EXPECT_THAT(run_into("a", 9, with(validating)), Not(HasSubstr("another text")));
}

/// By its name, or by its file.
TEST_F(Runs, AnotherScheduleIsAChange) {
  ResumePoint point{.folder = "saved", .manifest = {}};
  point.manifest.progress = progress_json(settings(ddp2_, {"mesh.pp=2"}), {}, {}, {}, 2);
  const auto said = [&](const std::string& schedule) { return changes_since(point, settings(ddp2_, {"mesh.pp=2", "pipeline.schedule=" + schedule})); };
  EXPECT_THAT(said("1f1b"), IsEmpty());
  EXPECT_THAT(said("pipedream"), ElementsAre(HasSubstr("pipeline.schedule = pipedream (was 1f1b)")));
  EXPECT_THAT(said("/mine.csv"), ElementsAre(HasSubstr("pipeline.schedule = /mine.csv (was 1f1b)")));
}

/// A checkpoint of a run of so many ranks, as far as its files say it.
ResumePoint saved_by(const Config& config, int ranks) {
  ResumePoint point{.folder = "saved", .manifest = {}};
  point.manifest.progress = progress_json(config, {}, {}, {}, data_ranks(config, ranks));
  point.manifest.files[detail::concat("rank-00000-of-", ranks, ".safetensors")] = 1;
  return point;
}

/// Whose updates are of the micro-batches that all data ranks have at a time.
TEST_F(Runs, AnUpdateOfOtherSamplesIsAChange) {
  const auto of = [&](const std::string& schedule, const std::string& micro_size) {
    return settings(ddp2_, {"mesh.pp=2", "pipeline.schedule=" + schedule, "batch.global_size=16", "batch.micro_size=" + micro_size});
  };
  const auto said = [&](const std::string& schedule, const std::string& micro_size, int ranks, int per_update = 0) {
    Config now = of(schedule, micro_size);
    now.pipeline.per_update = per_update;
    return other_update(saved_by(of(schedule, "1"), 8), now, 2 * ranks);
  };
  for (const std::string schedule : {"1f1b", "pipedream", "pipedream_2bw"}) {
    EXPECT_EQ(said(schedule, "1", 4), "");
    EXPECT_EQ(said(schedule, "2", 2), "") << schedule << " of as many samples";
  }
  EXPECT_EQ(said("1f1b", "1", 2), "");
  const auto with = [&](const std::string& schedule, MeshConfig mesh) {
    Config config = of(schedule, "1");
    config.mesh = std::move(mesh);
    return config;
  };
  const auto over_stages = [&](int before, int now) {
    return other_update(saved_by(with("pipedream", {.pp = before}), 2 * before), with("pipedream", {.pp = now}), 2 * now);
  };
  EXPECT_EQ(over_stages(1, 1), "") << "a schedule of one stage means nothing";
  EXPECT_THAT(over_stages(1, 2), HasSubstr("an update sums 2 samples on 2 data ranks, and summed 16 where saved was saved"));
  EXPECT_THAT(over_stages(2, 1), HasSubstr("keep pipeline.schedule and mesh.pp"));
  EXPECT_THAT(said("pipedream", "1", 2), HasSubstr("an update sums 2 samples on 2 data ranks, and summed 4 where saved was saved"));
  EXPECT_THAT(said("pipedream_2bw", "1", 2), HasSubstr("an update sums 4 samples on 2 data ranks, and summed 8"));
  EXPECT_EQ(said("pipedream_2bw", "1", 2, 4), "");
  EXPECT_THAT(said("pipedream_2bw", "4", 4), HasSubstr("an update sums 16 samples on 4 data ranks, and summed 8")) << "of one micro-batch, which is all";
  // Of 8 micro-batches three ranks have 3, 3 and 2.
  const auto uneven = [&](int before, int per_update, int now, int per_update_now) {
    const auto config = [&](int per_update) {
      const std::string summed = "pipeline.per_update=" + std::to_string(per_update);
      return settings(ddp2_, {"mesh.pp=2", "pipeline.schedule=pipedream_2bw", "batch.global_size=8", "batch.micro_size=1", summed});
    };
    return other_update(saved_by(config(per_update), 2 * before), config(per_update_now), 2 * now);
  };
  EXPECT_THAT(uneven(3, 3, 2, 3), HasSubstr("an update sums 6 samples on 2 data ranks, and summed 8")) << "and then 2";
  EXPECT_THAT(uneven(2, 3, 3, 3), HasSubstr("an update sums 8 samples on 3 data ranks, and summed 6"));
  EXPECT_EQ(uneven(3, 3, 1, 8), "");
  EXPECT_EQ(uneven(3, 2, 2, 3), "") << "6, and then 2";
  // Sizes that take what is left are those that it comes to; ranks of mesh.cp have the same samples.
  const auto over_mesh = [&](MeshConfig before, int saved_on, MeshConfig now, int ranks) {
    return other_update(saved_by(with("pipedream_2bw", std::move(before)), saved_on), with("pipedream_2bw", std::move(now)), ranks);
  };
  EXPECT_EQ(over_mesh({.pp = 2}, 2, {.pp = -1}, 2), "");
  EXPECT_EQ(over_mesh({.pp = -1}, 2, {.pp = 2}, 2), "");
  EXPECT_THAT(over_mesh({.pp = -1}, 2, {.pp = -1}, 3), HasSubstr("an update sums 3 samples on 1 data ranks, and summed 2"));
  EXPECT_EQ(over_mesh({.pp = 2}, 2, {.pp = 2, .cp = 3}, 6), "");
  EXPECT_THAT(over_mesh({.dp_replicate = 2, .pp = 2}, 4, {.pp = 2, .cp = 2}, 4), HasSubstr("an update sums 2 samples on 1 data ranks, and summed 4"));
}

/// What the whole run says.
TEST_F(Runs, GoingOnWithAFormatThatFollowsTheMachineSaysNothing) {
  run_into("a", 2, {"precision.compute=auto"});
  EXPECT_THAT(run_into("a", 4, {"precision.compute=auto", "checkpoint.resume=latest"}), Not(HasSubstr("other settings")));
}

TEST_F(Runs, WhatNobodyCanReadIsSetAsideWhereLatestStartsAfresh) {
  run_into("a", 2, {});
  std::filesystem::remove(at("a", 2) + "/manifest.json");
  run_into("a", 4, {"checkpoint.resume=latest", "checkpoint.keep=1"});
  EXPECT_EQ(first_step(), 1);
  EXPECT_THAT(steps_in("a"), ElementsAre(4));
  EXPECT_THAT(steps_in("a/set-aside-1"), ElementsAre(2));
}

TEST_F(Runs, RatesClippingDecayAndLossesMayChangeAndAreSaidOnce) {
  run_into("a", 4, {});
  const std::string said =
      run_into("a", 6,
               {"checkpoint.resume=latest", "optim.lr=0.001", "optim.max_grad_norm=0.5", "optim.weight_decay=0.1", "optim.betas=[0.8, 0.9]",
                "optim.schedule=linear", "optim.warmup_steps=1", "loss.z_loss=0.001", "loss.label_smoothing=0.1"});
  EXPECT_EQ(first_step(), 5);
  EXPECT_LT(steps_.front().lr, 0.001);
  const std::string list = "optim.lr = 0.001 (was 0.01)";
  EXPECT_THAT(said, AllOf(HasSubstr("with other settings than it was saved with"), HasSubstr(list), HasSubstr("optim.max_grad_norm = 0.5 (was 1.0)"),
                          HasSubstr("loss.z_loss = 0.001 (was 0.0)")));
  EXPECT_EQ(said.find(list), said.rfind(list)) << "by one rank";
  EXPECT_THAT(([&] { run_into("a", 8, {"checkpoint.resume=latest", "optim.name=sgd"}); }), ThrowsMessage<ConfigError>(HasSubstr("optim.name = \"sgd\"")));
}

TEST_F(Runs, MomentumThatACheckpointDoesNotHoldIsRefused) {
  run_into("a", 2, {"optim.name=sgd"});
  EXPECT_THAT(([&] { run_into("a", 4, {"optim.name=sgd", "optim.momentum=0.9", "checkpoint.resume=latest"}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("optim.momentum = 0.9"), HasSubstr("was written without momentum"))));
  run_into("b", 2, {"optim.name=muon"});
  EXPECT_THAT(([&] { run_into("b", 4, {"optim.name=muon", "optim.momentum=0", "checkpoint.resume=latest"}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("optim.momentum = 0.0"), HasSubstr("holds momentum, which would be lost"))));
  run_into("b", 4, {"optim.name=muon", "optim.momentum=0.5", "checkpoint.resume=latest"});
  EXPECT_EQ(first_step(), 3);
}

/// A rate that leaves weights of which every forward is NaN: they replay bit for bit, and are no use.
TEST_F(Runs, WeightsThatMakeNoNumberAreSavedBesideAndNotGoneOnFrom) {
  const auto lost = [](Sets more) {
    more.insert(more.end(), {"optim.lr=1e38", "optim.weight_decay=0"});
    return more;
  };
  run_into("a", 2, {});
  const auto from_2 = lost({"checkpoint.resume=latest", "checkpoint.keep=1", "checkpoint.dir=" + (folder_ / "a").string(), "run.steps=3"});
  ::testing::internal::CaptureStderr();
  EXPECT_THAT([&] { run(ddp2_, from_2); },
              ThrowsMessage<std::runtime_error>(AllOf(HasSubstr("step 3: the run ends with weights of which no step goes on"), HasSubstr("lower optim.lr"))));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(HasSubstr("step 3: the loss of the next step's text"), HasSubstr("checkpoint.keep does not")));
  EXPECT_THAT(steps_in("a"), ElementsAre(2, 3));

  EXPECT_THAT(([&] { run_into("a", 4, {"checkpoint.resume=" + at("a", 3)}); }),
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("step-00000003: the loss that it recorded"), HasSubstr("name an older checkpoint"), HasSubstr("checkpoint.verify = false"))));
  EXPECT_THAT(([&] { run_into("b", 4, {"checkpoint.resume=" + at("a", 3), "checkpoint.verify=false"}); }),
              ThrowsMessage<std::runtime_error>(HasSubstr("step 4: the gradient's norm is not finite")));
  EXPECT_THAT(open_inputs(settings(ddp2_, {"checkpoint.dir=" + (folder_ / "a").string(), "checkpoint.resume=latest"})).remarks,
              ElementsAre(AllOf(HasSubstr("passing over "), HasSubstr("step-00000003: the loss that it recorded"))));
  run_into("a", 4, {"checkpoint.resume=latest"});
  EXPECT_EQ(first_step(), 3);
  run_into("c", 1, lost({"checkpoint.verify=false"}));  // with no replay, nobody knows
}

TEST_F(Runs, ALastStepThatWasSkippedIsSaid) {
  const Sets half{"precision.params=fp16", "precision.compute=fp16"};
  const auto with_scale = [&](const std::string& scale) {
    Sets sets = half;
    sets.push_back("precision.loss_scale=" + scale);
    return sets;
  };
  EXPECT_THAT(run_into("a", 1, with_scale("1e30")), HasSubstr("step 1, the last, was skipped"));
  EXPECT_THAT(run_into("b", 1, with_scale("16")), Not(HasSubstr("was skipped")));
}

/// Of which the schedule knows ever after, also where nothing is scaled any more.
TEST_F(Runs, StepsThatWereSkippedAreCountedWithoutALossScale) {
  run_into("a", 2, {"precision.compute=fp16", "precision.loss_scale=1e30"});
  const Sets plain{"checkpoint.resume=latest", "optim.warmup_steps=4"};
  EXPECT_THAT(run_into("a", 4, plain), HasSubstr("precision.loss_scale = none (was 1e30): 2 of the 2 steps before were skipped, and the learning rate "
                                                 "waits for them: step 3 is update 1"));
  const auto check = [&](int64_t first) {
    ASSERT_EQ(first_step(), first);
    for (const StepResult& step : steps_) {
      ASSERT_TRUE(step.extras.contains("skipped_steps")) << step.step;
      EXPECT_EQ(step.extras.at("skipped_steps"), 2);
      EXPECT_FALSE(step.extras.contains("loss_scale"));
      EXPECT_NEAR(step.lr, 1e-2 * static_cast<double>(step.step - 2) / 4, 1e-12) << step.step;
    }
  };
  check(3);
  EXPECT_THAT(run_into("a", 6, plain), Not(HasSubstr("were skipped"))) << "this has been said";
  check(5);
  run_into("b", 2, {});
  EXPECT_FALSE(steps_.back().extras.contains("skipped_steps"));
}

/// Its folder is where whoever comes next looks.
TEST_F(Runs, AStepThatIsTheLastAlreadyIsSavedWhereItIsNot) {
  run_into("a", 4, {});
  run_into("b", 4, {"checkpoint.resume=" + at("a", 4)});
  EXPECT_THAT(steps_, IsEmpty());
  EXPECT_THAT(steps_in("b"), ElementsAre(4));
  expect_same_bits(stored(at("b", 4)), stored(at("a", 4)));
  const auto written = [&] { return std::filesystem::last_write_time(at("b", 4) + "/manifest.json"); };
  const auto before = written();
  run_into("b", 4, {"checkpoint.resume=latest"});
  EXPECT_EQ(written(), before) << "once";
  for (const char* dir : {"a", "b"}) run_into(dir, 6, {"checkpoint.resume=latest"});
  expect_same_bits(stored(at("b", 6)), stored(at("a", 6)));
}

TEST_F(Runs, GroupsMayChangeTheirRatesAndNotTheirOptimizer) {
  run_into("a", 2, {"optim.groups=[\"embed_tokens: name = lion, lr = 0.001\"]"});
  const std::string said = run_into("a", 4, {"optim.groups=[\"embed_tokens: name = lion, lr = 0.002\", \"norm: lr_factor = 2\"]", "checkpoint.resume=latest"});
  EXPECT_THAT(said, AllOf(HasSubstr("optim.groups = "), HasSubstr("lr_factor = 2"), HasSubstr("lr = 0.001")));
  const auto refused = [&](const std::string& groups, const std::string& sentence) {
    EXPECT_THAT(([&] { run_into("a", 6, {"optim.groups=" + groups, "checkpoint.resume=latest"}); }),
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("optim.groups: 'embed_tokens.weight' would be updated by " + sentence))));
  };
  refused("[]", "adamw, and");
  refused("[\"embed_tokens: name = sgd\"]", "sgd, and");
}

/// What checkpoint.partial names may have another optimizer, and begins anew with it.
TEST_F(Runs, AGroupThatIsLoadedInPartMayHaveAnotherOptimizer) {
  const std::string before = "optim.groups=[\"norm: name = sgd, momentum = 0.5\"]", anew = "checkpoint.partial=[\"norm.*\"]";
  run_into("a", 2, {before});
  const auto go_on = [&](const std::string& name, const std::string& settings, const Sets& more) {
    Sets sets{"optim.groups=[\"norm: " + settings + "\"]", "checkpoint.resume=" + at("a", 2)};
    sets.insert(sets.end(), more.begin(), more.end());
    run_into(name, 3, sets);
    return checkpoint::read_manifest(at(name, 3));
  };
  EXPECT_THAT(([&] { go_on("b", "name = lion", {}); }), ThrowsMessage<ConfigError>(HasSubstr("optim.groups: 'norm.weight' would be updated by lion")));
  const auto lion = go_on("c", "name = lion", {anew});
  EXPECT_EQ(lion.optimizer.at("update_counts").at("norm.weight"), 1);
  EXPECT_EQ(lion.optimizer.at("update_counts").at("embed_tokens.weight"), 3);
  EXPECT_EQ(lion.optimizer.at("kinds").at("norm.weight"), "lion");
  EXPECT_FALSE(lion.tensors.contains("optimizer.momentum_buffer.norm.weight"));
  EXPECT_EQ(go_on("d", "name = sgd, momentum = 0", {anew}).optimizer.at("kinds").at("norm.weight"), "sgd");
}

TEST_F(Runs, APartialLoadSaysWhatBeginsAnewAndIsReplayedWhereNothingDoes) {
  run_into("a", 2, {"model.layers=3"});
  const auto said = [&](const std::string& name, const std::string& layers, const std::string& partial, const Sets& more = {}) {
    Sets sets{"model.layers=" + layers, "checkpoint.resume=" + at("a", 2), "checkpoint.partial=[\"" + partial + "\"]"};
    sets.insert(sets.end(), more.begin(), more.end());
    return run_into(name, 3, sets);
  };
  const std::string left_out = "not replayed, as checkpoint.partial leaves some of it out";
  EXPECT_THAT(said("b", "4", "layers.3.**"),
              AllOf(HasSubstr("begin anew (layers.3."), HasSubstr(" more)"), Not(HasSubstr("left unread")), HasSubstr(left_out)));
  EXPECT_THAT(said("c", "2", "layers.2.**"), AllOf(HasSubstr("are left unread (layers.2."), Not(HasSubstr("begin anew")), HasSubstr(left_out)));
  EXPECT_THAT(said("d", "3", "layers.2.**"), AllOf(Not(HasSubstr("begin anew")), Not(HasSubstr("not replayed")), HasSubstr("replays bit for bit")));
  EXPECT_THAT(said("e", "3", "layers.2.**", {"model.rope_theta=500"}),
              AllOf(Not(HasSubstr("begin anew")), HasSubstr("not replayed, as by checkpoint.partial it goes on with another model.rope_theta")));
  const PartialLoad found = partial_load(checkpoint::read_manifest(at("a", 2)), settings(ddp2_, {"model.layers=2"}));
  EXPECT_EQ(found.unread.size(), 9U);
  EXPECT_THAT(found.fresh, IsEmpty());
}

/// A router's steering bias is a buffer.
TEST_F(Runs, APartialLoadSaysWhatBeginsAnewOfBuffers) {
  const auto mixture = [&](const std::string& router, const Sets& more) {
    Sets sets{"model.router=" + router, "run.threads=1", "run.steps=2", "batch.global_size=4", "batch.micro_size=1", "checkpoint.every=2"};
    sets.insert(sets.end(), more.begin(), more.end());
    return config("mixtral", sets);
  };
  const auto dir = "checkpoint.dir=" + (folder_ / "softmax").string();
  const Config from = mixture("softmax", {dir});
  comm::run_ranks(2, [&](comm::World& world) { Trainer(from, world, open_inputs(from)).run(); });
  const auto goes_on = [&](const std::string& pattern) {
    return mixture("sigmoid", {"checkpoint.resume=" + (folder_ / "softmax" / step_name(2)).string(), "checkpoint.partial=[\"" + pattern + "\"]"});
  };
  const Config named = goes_on("**.router.bias");
  const auto inputs = open_inputs(named);
  EXPECT_THAT(partial_load(inputs.resume->manifest, named).fresh, ElementsAre("layers.0.feed_forward.router.bias", "layers.1.feed_forward.router.bias"));
  EXPECT_THAT(changes_since(*inputs.resume, named), Contains(HasSubstr("begin anew (layers.0.feed_forward.router.bias, ")));
  EXPECT_THAT([&] { open_inputs(goes_on("**.router.biases")); }, ThrowsMessage<ConfigError>(HasSubstr("no parameter or buffer of the model")));
  auto steered = checkpoint::read_manifest(folder_ / "softmax" / step_name(2));
  steered.tensors["buffer.layers.0.feed_forward.router.bias"] = steered.tensors.at("model.norm.weight");
  const PartialLoad back = partial_load(steered, from);
  EXPECT_THAT(back.fresh, IsEmpty());
  EXPECT_THAT(back.unread, ElementsAre("layers.0.feed_forward.router.bias"));
}

TEST_F(Runs, MuonsGroupsMayNameTheOptimizerThatAParameterHasAlready) {
  run_into("a", 2, {"optim.name=muon"});
  const auto go_on = [&](int64_t last, const std::string& groups) {
    run_into("a", last, {"optim.name=muon", "checkpoint.resume=latest", "optim.groups=[\"" + groups + "\"]"});
  };
  go_on(3, "norm.weight: name = adamw");
  go_on(4, "embed_tokens: name = adamw, lr_factor = 0.5");
  EXPECT_THAT(([&] { go_on(5, "layers.0.attention.wq: name = adamw"); }),
              ThrowsMessage<ConfigError>(HasSubstr("'layers.0.attention.wq.weight' would be updated by adamw, and ")));
}

TEST_F(Runs, WhatWasEverTrainedBesideAdaptersIsNotLeftBehind) {
  const std::string adapters = "lora.modules=layers.*.attention.*";
  run_into("a", 2, {adapters, "lora.trained=[\"norm.weight\"]"});
  for (const int64_t step : {4, 6}) {
    run_into("a", step, {adapters, "checkpoint.resume=latest"});
    const auto progress = checkpoint::read_manifest(at("a", step)).progress;
    EXPECT_EQ(progress.at("lora_trained"), nlohmann::json({"norm.weight"}));
    const Config config = config_of(progress, "");
    EXPECT_THAT(([&] { checkpoint::export_peft(at("a", step), config.model, config.lora, folder_ / "peft", {}); }),
                ThrowsMessage<ConfigError>(HasSubstr("'norm.weight' (lora.trained) was trained beside the adapters")));
  }
  run_into("b", 2, {adapters});
  const Config config = config_of(checkpoint::read_manifest(at("b", 2)).progress, "");
  checkpoint::export_peft(at("b", 2), config.model, config.lora, folder_ / "peft", {});
}

TEST_F(Runs, WhatWasTrainedBeforeThereWereAdaptersIsNotLeftBehind) {
  const std::string adapters = "lora.modules=layers.*.attention.*";
  run_into("a", 2, {});
  run_into("b", 4, {adapters, "checkpoint.resume=" + at("a", 2), "checkpoint.partial=[\"**.lora_a\",\"**.lora_b\"]"});
  run_into("b", 6, {adapters, "checkpoint.resume=latest"});
  for (const int64_t step : {4, 6}) {
    const Config config = config_of(checkpoint::read_manifest(at("b", step)).progress, "");
    EXPECT_THAT(([&] { checkpoint::export_peft(at("b", step), config.model, config.lora, folder_ / "peft", {}); }),
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("--to peft: the whole model was trained, too"), HasSubstr("--merge-lora"))));
  }
}

/// What is left out begins anew; what is gone on with stays what it was trained as.
TEST_F(Runs, APartOfACheckpointKeepsTheScaleOfItsAdaptersAndTheFormatOfItsWeights) {
  const std::string modules = "layers.*.attention.*", adapters = "lora.modules=" + modules;
  const std::string anew = "checkpoint.partial=[\"**.lora_a\",\"**.lora_b\"]", others = "checkpoint.partial=[\"norm.*\"]";
  const std::string fewer = "quantize.modules=" + modules;
  run_into("a", 2, {adapters, "lora.alpha=4"});
  run_into("b", 2, {adapters, fewer, "run.device=cpu"});
  const auto from = [&](const std::string& dir, Sets more) {
    more.insert(more.end(), {adapters, "checkpoint.resume=" + at(dir, 2)});
    run_into("c", 3, more);
  };
  const auto refused = [&](const std::string& dir, const Sets& more, const std::string& words) {
    EXPECT_THAT(([&] { from(dir, more); }), ThrowsMessage<ConfigError>(HasSubstr(words))) << words;
  };
  refused("a", {others, "lora.alpha=8"}, "lora.alpha = 8.0");
  refused("a", {others, "lora.alpha=4", "lora.rank=3"}, "lora.rank = 3");
  refused("a", {anew, "lora.alpha=8"}, "lora.alpha = 8.0");  // they fit, and are loaded
  refused("b", {others, fewer, "run.device=cpu", "quantize.block=32"}, "quantize.block = 32");
  refused("b", {anew, "run.device=cpu"}, "quantize.modules = ");
  EXPECT_NO_THROW(from("a", {anew, "lora.alpha=8", "lora.rank=3"}));
  const auto on_others = [&](const std::string& others_too) {  // layers whose adapters the checkpoint lacks
    run_into("d", 3, {anew, "lora.alpha=8", "lora.modules=layers.*.feed_forward.*" + others_too, "checkpoint.resume=" + at("a", 2)});
  };
  EXPECT_THAT(([&] { on_others(", layers.0.attention.wq"); }), ThrowsMessage<ConfigError>(HasSubstr("lora.alpha = 8.0"))) << "one of them fits";
  EXPECT_NO_THROW(on_others(""));
}

TEST_F(Runs, AnotherFolderThanARunBeganWithIsSaid) {
  ResumePoint point{.folder = "saved", .manifest = {}};
  Config saved = settings(ddp2_, {}), now = saved;
  saved.model.from_hf = "first", now.model.from_hf = "second";
  point.manifest.progress = progress_json(saved, {}, {}, {}, 2);
  const auto in_file = config_of(point.manifest.progress, "").model.from_hf;
  EXPECT_THAT(changes_since(point, now), ElementsAre(HasSubstr("model.from_hf = second (was " + in_file + "): the weights are those of saved")));
  now.model.from_hf = in_file;
  EXPECT_THAT(changes_since(point, now), IsEmpty());
}

/// Their folder may be unmounted, or hold others by the time of a save.
TEST_F(Runs, WeightsInFewerBitsAreSavedAsWhatTheyWereMadeOf) {
  const auto hf = folder_ / "hf";
  run_into("a", 2, {});
  checkpoint::export_hugging_face(at("a", 2), config_of(checkpoint::read_manifest(at("a", 2)).progress, "").model, hf, {});
  const std::string before = checkpoint::hugging_face_fingerprint(hf);
  const Config config = settings(ddp2_, {"model.from_hf=" + hf.string(), "lora.modules=layers.*.attention.*", "quantize.modules=layers.*.attention.*",
                                         "checkpoint.dir=" + (folder_ / "b").string(), "run.device=cpu", "run.steps=2"});
  comm::run_ranks(2, [&](comm::World& world) {
    validate(config, world.size());
    Trainer trainer(config, world, open_inputs(config));
    if (world.rank() == 0) std::filesystem::remove_all(hf);  // by then the others have read it, too: ranks meet behind
    trainer.run();
  });
  EXPECT_EQ(checkpoint::read_manifest(at("b", 2)).agreement.at("quantize.from"), before);
}

TEST_F(Runs, GroupsOfWhatIsFrozenAreNamed) {
  const Sets groups{"optim.groups=[\"embed_tokens: lr_factor = 0.5\", \"layers.0: weight_decay = 0\"]"};
  EXPECT_THAT(groups_without_effect(config("llama", groups)), IsEmpty());
  const Sets adapted{groups[0], "lora.modules=layers.*.attention.*"};
  EXPECT_THAT(groups_without_effect(config("llama", adapted)), ElementsAre(HasSubstr("embed_tokens: lr_factor = 0.5\": has no effect")));
  EXPECT_THAT(groups_without_effect(config("llama", {adapted[0], adapted[1], "lora.trained=embed_tokens.weight"})), IsEmpty());
}

TEST_F(Runs, MoreStepsUnderAScheduleSayThatTheRateBends) {
  run_into("a", 4, {"optim.schedule=cosine"});
  const std::string said = run_into("a", 8, {"optim.schedule=cosine", "checkpoint.resume=latest"});
  EXPECT_THAT(said, AllOf(HasSubstr("run.steps = 8 (was 4): optim.schedule = cosine ends there, so the learning rate bends"), HasSubstr("in step 5")));
  EXPECT_THAT(run_into("b", 4, {}), Not(HasSubstr("bends")));
  EXPECT_THAT(run_into("b", 6, {"checkpoint.resume=latest"}), Not(HasSubstr("bends")));
}

/// The batch grows; every sample of the text still comes in its turn, as one run with the larger batch from the start of that place would have it.
/// The schedule waits for steps that were skipped, and what is said of it is what training will do.
TEST_F(Runs, TheRateThatBendsIsThatOfTheNextUpdate) {
  const auto with_steps = [&](int64_t steps) { return settings(ddp2_, {"optim.schedule=linear", "optim.lr=0.1", "run.steps=" + std::to_string(steps)}); };
  ResumePoint point{.folder = "saved", .manifest = {}};
  point.manifest.step = 4;
  point.manifest.progress = progress_json(with_steps(10), {}, {}, {}, 2);
  const auto rates = [&](int64_t update) {
    const auto at = [&](int64_t steps) { return format_float(optim::LearningRate(with_steps(steps).optim, steps).at(update)); };
    return at(20) + " in step 5, where it would have been " + at(10);
  };
  EXPECT_THAT(changes_since(point, with_steps(20)), ElementsAre(HasSubstr("bends: " + rates(5))));
  point.manifest.progress["loss_scale"] = {{"skipped", 2}};
  EXPECT_THAT(changes_since(point, with_steps(20)), ElementsAre(HasSubstr("bends: " + rates(3))));
  ASSERT_NE(rates(3), rates(5));

  // What other settings do is theirs: the remark says what run.steps alone changes.
  Config faster = with_steps(20);
  faster.optim.lr = 0.4;
  const auto of_faster = [&](int64_t steps) { return format_float(optim::LearningRate(faster.optim, steps).at(3)); };
  EXPECT_THAT(changes_since(point, faster), ElementsAre(HasSubstr("optim.lr = 0.4 (was 0.1)"),
                                                        HasSubstr("bends: " + of_faster(20) + " in step 5, where it would have been " + of_faster(10))));

  // Through the warm-up they are the same, and in the step behind it, and nothing bends where the last rate is the first.
  const auto warmed = [&](int64_t steps, const std::string& least) {
    return settings(ddp2_, {"optim.schedule=cosine", "optim.lr=0.01", "optim.warmup_steps=5", least, "run.steps=" + std::to_string(steps)});
  };
  point.manifest.step = 3;
  point.manifest.progress = progress_json(warmed(7, "optim.min_lr=0"), {}, {}, {}, 2);
  EXPECT_THAT(changes_since(point, warmed(12, "optim.min_lr=0")),
              Contains(AllOf(HasSubstr("bends: "), HasSubstr(" in step 7, where it would have been 0.005"))));
  point.manifest.progress = progress_json(warmed(7, "optim.min_lr=0.01"), {}, {}, {}, 2);
  EXPECT_THAT(changes_since(point, warmed(12, "optim.min_lr=0.01")), Not(Contains(HasSubstr("bends"))));
}

/// Checkpoints say a momentum that nobody gave, from when nothing was no value of it.
TEST_F(Runs, AMomentumThatNobodyGaveIsNoChange) {
  ResumePoint point{.folder = "saved", .manifest = {}};
  Config saved = settings(ddp2_, {});
  const auto changes = [&](std::optional<double> momentum) {
    saved.optim.momentum = momentum;
    point.manifest.progress = progress_json(saved, {}, {}, {}, 2);
    return changes_since(point, settings(ddp2_, {}));
  };
  EXPECT_THAT(changes(0.0), IsEmpty());
  EXPECT_THAT(changes(std::nullopt), IsEmpty());
  EXPECT_THAT(changes(0.9), ElementsAre(HasSubstr("optim.momentum = 0.0 (was 0.9)")));
}

/// Two runs that log into one folder, of which the first goes on.
TEST_F(Runs, TheRecordsOfAnotherRunAreNotGoneOnWith) {
  const auto logs = folder_ / "logs";
  std::filesystem::create_directories(logs);
  const auto train = [&](const std::string& dir, int64_t last, const std::string& resume) {
    const Config config = settings(ddp2_, {"log.dir=" + logs.string(), "checkpoint.dir=" + (folder_ / dir).string(), "checkpoint.every=2",
                                           "run.steps=" + std::to_string(last), "checkpoint.resume=" + resume});
    ::testing::internal::CaptureStderr();
    comm::run_ranks(2, [&](comm::World& ranks) {
      Trainer trainer(config, ranks, open_inputs(config));
      trainer.add_observer(std::make_unique<MetricsFile>());
      trainer.run();
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const auto steps = [&](const std::string& name) {
    std::vector<int64_t> found;
    std::ifstream in(logs / name);
    for (std::string line; std::getline(in, line);) found.push_back(nlohmann::json::parse(line).at("step"));
    return found;
  };
  train("a", 2, "");
  EXPECT_THAT(train("a", 4, "latest"), Not(HasSubstr("another run")));
  EXPECT_THAT(steps("metrics.jsonl"), ElementsAre(1, 2, 3, 4));
  train("b", 2, "");
  EXPECT_THAT(train("a", 6, "latest"), HasSubstr("metrics.jsonl: 2 of its lines are of another run"));
  EXPECT_THAT(steps("metrics.jsonl"), ElementsAre(5, 6));
  EXPECT_THAT(steps("metrics.jsonl.another-run-1"), ElementsAre(1, 2));
}

TEST_F(Runs, AnotherBatchGoesOnAtTheNextSample) {
  run_into("a", 4, {});
  run_into("a", 5, {"checkpoint.resume=latest", "batch.global_size=6"});
  EXPECT_EQ(first_step(), 5);
  const auto cursor = checkpoint::read_manifest(at("a", 5)).progress.at("cursor");
  EXPECT_EQ(cursor.at("offset"), 4 * 4 - 4 * 6);
  EXPECT_THAT(([&] { run_into("a", 8, {"checkpoint.resume=latest", "batch.global_size=6", "data.seq_len=8", "model.max_seq_len=16"}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("data.seq_len = 8"), HasSubstr("inside an epoch of shuffled windows"))));
}

TEST_F(Runs, ShorterWindowsGoOnWhereOneBegins) {
  run_into("a", 4, {"data.shuffle=false"});
  run_into("a", 6, {"data.shuffle=false", "checkpoint.resume=latest", "data.seq_len=8", "model.max_seq_len=16"});
  EXPECT_EQ(first_step(), 5);
  EXPECT_EQ(steps_.front().tokens, 4 * 8);
}

/// Every rank that holds other parts of the layers has a plan of its own: a resumed run takes up its own, and another cut makes another.
class CutPlans : public Runs {
 protected:
  static Sets sets(int tensor_ranks, Sets more = {}) {
    more.push_back("mesh.tp=" + std::to_string(tensor_ranks));
    return more;
  }
};

TEST_F(CutPlans, UnevenCutsResumeInTheirOwnLayoutToTheBit) {
  const Layout uneven{"uneven", 6, sets(3)};
  const auto whole = run_saving(uneven, {});
  const auto plans = checkpoint::read_manifest(saved(uneven, kSaved)).progress.at("bucket_plan");
  ASSERT_TRUE(plans.is_array());
  EXPECT_EQ(plans.size(), 3);
  ::testing::internal::CaptureStderr();
  expect_goes_on(uneven, uneven, {}, /*bound=*/0, whole);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("bucket layout")));
}

TEST_F(CutPlans, AnotherCutAtEqualDataRanksMakesItsOwnPlanAndSaysSo) {
  const Layout two{"dp2 x tp2", 4, sets(2)}, one{"dp2", 2, {}};
  for (const auto& [from, to] : {std::pair(&two, &one), std::pair(&one, &two)}) {
    const auto whole = run_saving(*from, {});
    ::testing::internal::CaptureStderr();
    expect_goes_on(*from, *to, {}, testing_support::kLosses, whole);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, HasSubstr("its bucket layout is of another layout"));
    EXPECT_EQ(said.find("bucket layout"), said.rfind("bucket layout")) << said;
  }
}

/// Each tensor-parallel rank approximates its own part of a matrix, by a Q of its own.
TEST_F(CutPlans, PowerSgdResumesWithLayersCutEvenlyAndUnevenly) {
  const Sets powersgd{"comm.compression=powersgd", "comm.powersgd_rank=1", "comm.powersgd_start=1"};
  for (const Layout& layout : {Layout{"even", 4, sets(2, powersgd)}, Layout{"uneven", 6, sets(3, powersgd)}}) {
    SCOPED_TRACE(layout.name);
    const auto whole = run_saving(layout, {});
    ::testing::internal::CaptureStderr();
    expect_goes_on(layout, layout, {}, /*bound=*/0, whole);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(Not(HasSubstr("start afresh")), Not(HasSubstr("left unread"))));
  }
  const Layout even{"even", 4, sets(2, powersgd)}, other{"other", 2, powersgd};
  ::testing::internal::CaptureStderr();
  run(other, {"checkpoint.resume=" + saved(even, kSaved).string(), "run.steps=4"});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(HasSubstr("errors, and Q of PowerSGD"), HasSubstr("start afresh")));
}

/// What is owed is in the unit of the loss scale.
TEST_F(CutPlans, PowerSgdGoesOnWithAnotherLossScale) {
  const auto scaled = [](const std::string& scale) {
    return Sets{"comm.compression=powersgd", "comm.powersgd_rank=1", "comm.powersgd_start=1", "precision.compute=fp16", "precision.loss_scale=" + scale};
  };
  const Layout one{"one", 2, scaled("4096")}, other{"other", 2, scaled("65536")};
  const auto whole = run_saving(one, {});
  expect_goes_on(one, one, {}, /*bound=*/0, whole);
  const auto steps = run(other, {"checkpoint.resume=" + saved(one, kSaved).string()});
  ASSERT_EQ(steps.size(), kLast - kSaved);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_NEAR(steps[i].loss, whole[kSaved + i].loss, testing_support::kLosses * whole[kSaved + i].loss) << i;
  }
}

/// What each of them would owe of it is fed back, and parts them.
TEST_F(CutPlans, WhatTensorParallelRanksHoldAlikeStaysOneUnderPowerSgd) {
  const Config made = config("gpt2", {"mesh.tp=2", "model.ffn_dim=11", "model.heads=2", "comm.compression=powersgd", "comm.powersgd_rank=1",
                                      "comm.powersgd_start=0", "batch.global_size=4", "batch.micro_size=1", "run.threads=1"});
  const auto text = corpus(made);
  testing_support::SliceCollector of_first, of_second;
  comm::run_ranks(4, [&](comm::World& ranks) {
    const Mesh mesh(ranks, mesh_shape(made.mesh, made.zero.stage, ranks.size()));
    RankScope scope(made, ranks.local_size());
    Stepper stepper(made, mesh, at::kCPU, scope);
    data::Loader loader(text, loader_options(made, mesh));
    for (int step = 1; step <= 30; ++step) stepper.step(loader.next());
    for (const auto& held : hook_tensors(hook_shares(stepper.run()), mesh[mesh_roles(made).batch])) {
      EXPECT_THAT(held.slice.name, Not(HasSubstr("embed_positions"))) << "nothing is owed of it";
    }
    if (mesh["dp_replicate"].rank() > 0) return;
    for (const auto& parameter : stepper.run().updated) {
      const Slice slice = nn::slice_of(parameter.tensor);
      if (slice.is_whole()) (mesh["tp"].rank() == 0 ? of_first : of_second).add(parameter.name, parameter.tensor, slice);
    }
  });
  const auto first = of_first.whole(), second = of_second.whole();
  ASSERT_EQ(first.size(), second.size());
  EXPECT_TRUE(first.contains("embed_positions.weight"));
  for (const auto& [name, tensor] : first) EXPECT_TRUE(at::equal(second.at(name), tensor)) << name;
}

/// A program's own loop: what is owed is in each rank's unit, which with average is that of the mean.
class HookState : public testing_support::ResumeFixture {};

TEST_F(HookState, WhatIsOwedIsPaidOnceOnAnyNumberOfRanks) {
  constexpr int64_t size = 12;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const at::Tensor weight = at::randn({size, size}, generator), x = at::randn({size, size}, generator), y = at::randn({size, size}, generator);
  for (const bool average : {false, true}) {
    const std::filesystem::path dir = folder_ / (average ? "mean" : "sum");
    double wanted = 0;
    for (const int ranks : {2, 3, 4, 5}) {
      comm::run_ranks(ranks, [&](comm::World& world) {
        torch::nn::Linear net(torch::nn::LinearOptions(size, size).bias(false));
        net->weight.data().copy_(weight);
        const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
        DistributedDataParallel ddp(*net, world.group(), {.average = average, .hook = hook});
        const auto gradient = [&](double scale) {
          net->zero_grad();
          const auto [begin, own] = chunk(size, ranks, world.rank());
          const at::Tensor loss = (net(x.narrow(0, begin, own)) - y.narrow(0, begin, own)).square().sum() / static_cast<double>(average ? own : size);
          (loss * scale).backward();
          return net->weight.grad().clone();
        };
        const HookShares shares{.parts = {{hook.get(), 0}}};
        if (ranks == 2) {
          gradient(1);
          checkpoint::CheckpointState state;
          state.step = 1;
          state.tensors = hook_tensors(shares, world.group());
          checkpoint::save(dir, state, world.group());
        } else {
          gradient(0);  // what the hook carries exists from its first step on
          const auto saved = checkpoint::find_latest(dir).folder.value();
          EXPECT_TRUE(load_hook_state(shares, {.folder = saved, .manifest = checkpoint::read_manifest(saved)}, world.group(), /*verify=*/true).empty());
        }
        at::Tensor paid = at::zeros({size, size});
        for (int step = 0; step < 60; ++step) paid.add_(gradient(0));
        if (world.rank() > 0) return;
        if (ranks == 2) wanted = paid.norm().item<double>();
        EXPECT_GT(wanted, 1);
        EXPECT_NEAR(paid.norm().item<double>(), wanted, 1e-4 * wanted) << ranks << " ranks, average " << average;
      });
    }
  }
}

}  // namespace
}  // namespace tessera
