#include "tessera/train/trainer.h"

#include <gmock/gmock.h>
#include <signal.h>

#include "tessera/comm/decorators/inject.h"
#include "tessera/kernels/choice.h"
#include "tessera/train/observers/metrics_file.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

/// What rank 0 is told.
struct Heard {
  std::vector<StepResult> steps;
  std::vector<ValidationResult> validations;
  RunEnd end;
};

class Listener : public Observer {
 public:
  explicit Listener(Heard& heard) : heard_(heard) {}
  void after_step(const StepResult& result) override { heard_.steps.push_back(result); }
  void after_validation(const ValidationResult& result) override { heard_.validations.push_back(result); }
  void on_end(const RunEnd& end) override { heard_.end = end; }

 private:
  Heard& heard_;
};

class TrainerTest : public testing_support::TrainFixture {
 protected:
  /// Trains ranks as threads. `stop` is asked by each rank after each step and in validations, with the number of times it has been asked.
  Heard run(const Config& config, int world, const std::function<int(int rank, int asked)>& stop = {}, const std::string& faults = "") {
    Heard heard;
    std::vector<std::shared_ptr<comm::Decorator>> injected;
    for (int rank = 0; rank < world; ++rank) injected.push_back(std::make_shared<comm::Decorator>(comm::fault_injection(comm::parse_faults(faults), rank, 0)));
    const comm::Decorator inject = [injected](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
      return (*injected[static_cast<size_t>(group.ranks.empty() ? group.rank : group.ranks[static_cast<size_t>(group.rank)])])(std::move(inner), group);
    };
    comm::run_ranks(world,
                    [&](comm::World& ranks) {
                      validate(config, ranks.size());
                      Trainer trainer(config, ranks, open_inputs(config));
                      trainer.add_observer(std::make_unique<Listener>(heard));
                      if (keeps_records_) trainer.add_observer(std::make_unique<MetricsFile>());
                      if (stop) trainer.stop_when([&, rank = ranks.rank(), asked = 0]() mutable { return stop(rank, ++asked); });
                      trainer.run();
                    },
                    {.decorators = {inject}});
    return heard;
  }

  std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    if (std::filesystem::exists(folder_ / "saved"))
      for (const auto& entry : std::filesystem::directory_iterator(folder_ / "saved")) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string saved() const { return "checkpoint.dir=" + (folder_ / "saved").string(); }

  bool keeps_records_ = false;
};

/// Runs whose validations take many rounds and are kept in validation.jsonl.
class ValidatedRuns : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    std::ofstream(folder_ / "held.txt") << std::string(2000, 'x');
    keeps_records_ = true;
  }

  Config settings(const std::string& logs, std::vector<std::string> sets) const {
    std::filesystem::create_directories(folder_ / logs);
    sets.insert(sets.end(), {"data.validation_files=[\"" + (folder_ / "held.txt").string() + "\"]", "log.dir=" + (folder_ / logs).string(), "run.steps=4"});
    if (std::ranges::none_of(sets, [](const std::string& set) { return set.starts_with("run.validate_every"); })) sets.emplace_back("run.validate_every=2");
    return config("llama", sets);
  }
  std::string validations(const std::string& logs) const {
    std::ifstream in(folder_ / logs / "validation.jsonl");
    return {std::istreambuf_iterator<char>(in), {}};
  }

  /// A run that is asked to stop when a rank's `asked` is that of `stop`, and one that goes on from there: together they are `whole`.
  void expect_stops_and_goes_on(int world, const std::vector<std::string>& sets, const std::function<int(int rank, int asked)>& stop, int64_t stopped_after,
                                size_t validated) {
    for (const char* used : {"saved", "whole", "parts"}) std::filesystem::remove_all(folder_ / used);
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), sets.begin(), sets.end());
      return more;
    };
    const Heard whole = run(settings("whole", with({})), world);
    const Heard part = run(settings("parts", with({saved()})), world, stop);
    EXPECT_EQ(part.validations.size(), validated);
    EXPECT_EQ(part.end.step, stopped_after);
    EXPECT_FALSE(part.end.finished);
    EXPECT_THAT(part.end.reason, HasSubstr("got SIGTERM; saved to " + (folder_ / "saved").string()));
    EXPECT_EQ(checkpoints().back(), "step-0000000" + std::to_string(stopped_after));
    const std::string before = validations("parts"), all = validations("whole");
    EXPECT_TRUE(all.starts_with(before) && before.size() < all.size()) << before << "of\n" << all;

    const Heard rest = run(settings("parts", with({saved(), "checkpoint.resume=latest"})), world);
    EXPECT_TRUE(rest.end.finished);
    EXPECT_EQ(validations("parts"), all);
    ASSERT_EQ(part.steps.size() + rest.steps.size(), whole.steps.size());
    for (size_t i = 0; i < rest.steps.size(); ++i) EXPECT_EQ(rest.steps[i].loss, whole.steps[part.steps.size() + i].loss);
  }
};

TEST_F(ValidatedRuns, AWishDuringAValidationIsHeardInIt) {
  // After steps 1 and 2, before the first round, and before the second of the 63, 32, 21 or 8 that they take.
  for (const auto& [world, sets] :
       std::vector<std::pair<int, std::vector<std::string>>>{{1, {}}, {2, {"zero.stage=3"}}, {3, {"checkpoint.async=true"}}, {2, {"mesh.pp=2"}}}) {
    SCOPED_TRACE(world);
    expect_stops_and_goes_on(world, sets, [last = world - 1](int rank, int asked) { return rank == last && asked >= 4 ? SIGTERM : 0; }, 2, 0);
  }
}

TEST_F(ValidatedRuns, WhoStopsValidatesNoMore) {
  expect_stops_and_goes_on(2, {}, [](int, int asked) { return asked == 2 ? SIGTERM : 0; }, 2, 0);
}

TEST_F(ValidatedRuns, AWishDuringTheLastStepLeavesItsValidationToWhoGoesOn) {
  expect_stops_and_goes_on(2, {"run.validate_every=10"}, [](int, int asked) { return asked == 4 ? SIGTERM : 0; }, 4, 0);
}

/// A validation that is made up for can be stopped, too, by a run that has not saved anything where it is to.
TEST_F(ValidatedRuns, AWishBeforeTheFirstStepOfARunThatGoesOnIsHeard) {
  run(settings("parts", {saved()}), 2, [](int, int asked) { return asked == 2 ? SIGTERM : 0; });
  const auto from = "checkpoint.resume=" + (folder_ / "saved" / "step-00000002").string(), into = "checkpoint.dir=" + (folder_ / "other").string();
  const Heard heard = run(settings("parts", {into, from}), 2, [](int rank, int asked) { return rank == 1 && asked == 2 ? SIGTERM : 0; });
  EXPECT_THAT(heard.steps, IsEmpty());
  EXPECT_EQ(heard.end.reason, "rank 1 got SIGTERM; saved to " + (folder_ / "other").string());
  EXPECT_TRUE(std::filesystem::exists(folder_ / "other" / "step-00000002"));
  EXPECT_EQ(validations("parts"), "");
}

/// Nor does a folder without records have anything to complete.
TEST_F(ValidatedRuns, WhatIsThereIsNotValidatedTwice) {
  run(settings("parts", {saved(), "checkpoint.every=2"}), 1);
  const std::string all = validations("parts"), from = "checkpoint.resume=" + (folder_ / "saved" / "step-00000002").string();
  const Heard again = run(settings("parts", {from}), 1), elsewhere = run(settings("others", {from}), 1);
  EXPECT_EQ(again.validations.size(), 1);
  EXPECT_EQ(elsewhere.validations.size(), 1);
  EXPECT_EQ(validations("parts"), all);
}

/// Whoever ends the process in a validation leaves a checkpoint of the step before it.
TEST_F(ValidatedRuns, AStepIsSavedBeforeItIsValidated) {
  class Look : public Observer {
   public:
    Look(std::filesystem::path saved, int& found) : saved_(std::move(saved)), found_(found) {}
    void after_validation(const ValidationResult& result) override {
      found_ += std::filesystem::exists(saved_ / ("step-0000000" + std::to_string(result.step))) ? 1 : 0;
    }

   private:
    std::filesystem::path saved_;
    int& found_;
  };
  int found = 0;
  const Config config = settings("parts", {saved(), "checkpoint.every=2"});
  comm::World world = comm::World::alone();
  Trainer trainer(config, world, open_inputs(config));
  trainer.add_observer(std::make_unique<Look>(folder_ / "saved", found));
  trainer.run();
  EXPECT_EQ(found, 2);
}

TEST_F(TrainerTest, OneRankIsEnoughToStopAllAfterTheSameStep) {
  for (const int world : {1, 2, 3}) {
    std::filesystem::remove_all(folder_ / "saved");
    const int asking = world - 1;
    const auto whole = run(config("llama"), world);
    const auto part = run(config("llama", {saved()}), world, [&](int rank, int asked) { return rank == asking && asked >= 3 ? SIGTERM : 0; });
    EXPECT_EQ(part.steps.size(), 3);
    EXPECT_EQ(part.end.step, 3);
    EXPECT_FALSE(part.end.finished);
    EXPECT_EQ(part.end.reason, "rank " + std::to_string(asking) + " got SIGTERM; saved to " + (folder_ / "saved").string());
    EXPECT_THAT(checkpoints(), ElementsAre("step-00000003"));

    const auto rest = run(config("llama", {saved(), "checkpoint.resume=latest"}), world);
    EXPECT_TRUE(rest.end.finished);
    ASSERT_EQ(rest.steps.size(), 3);
    for (size_t i = 0; i < 6; ++i) {
      const auto& step = i < 3 ? part.steps[i] : rest.steps[i - 3];
      EXPECT_EQ(step.loss, whole.steps[i].loss) << world << " ranks, step " << i + 1;
      EXPECT_EQ(step.grad_norm, whole.steps[i].grad_norm) << world << " ranks, step " << i + 1;
    }
  }
}

TEST_F(TrainerTest, NamesTheFirstOfTheRanksThatWishToStopAndSaysWhatIsLost) {
  const auto heard = run(config("mlp"), 3, [](int rank, int asked) { return rank == 0 ? 0 : asked >= 2 ? SIGINT : 0; });
  EXPECT_EQ(heard.end.reason, "rank 1 got SIGINT; nothing was saved, as there is no checkpoint.dir");
  EXPECT_EQ(heard.end.step, 2);
  EXPECT_THAT(checkpoints(), IsEmpty());
}

TEST_F(TrainerTest, AWishDuringTheLastStepFinishesTheRun) {
  const auto heard = run(config("mlp", {saved()}), 2, [](int, int asked) { return asked == 6 ? SIGTERM : 0; });
  EXPECT_TRUE(heard.end.finished);
  EXPECT_THAT(heard.end.reason, IsEmpty());
  EXPECT_THAT(checkpoints(), ElementsAre("step-00000006"));
}

TEST_F(TrainerTest, AStepThatIsDueAnywayIsSavedOnce) {
  const auto heard = run(config("mlp", {saved(), "checkpoint.every=2"}), 2, [](int, int asked) { return asked == 4 ? SIGTERM : 0; });
  EXPECT_EQ(heard.end.step, 4);
  EXPECT_THAT(checkpoints(), ElementsAre("step-00000002", "step-00000004"));
}

TEST_F(TrainerTest, ValidationLeavesNoTraceInTheTraining) {
  std::ofstream(folder_ / "held.txt") << std::string(100, 'x');
  for (const auto& [world, stage] : std::vector<std::pair<int, std::string>>{{1, "0"}, {2, "0"}, {2, "3"}}) {
    std::vector<std::string> sets{"model.dropout=0.2", "zero.stage=" + stage};
    const auto plain = run(config("gpt2", sets), world);
    sets.insert(sets.end(), {"data.validation_files=[\"" + (folder_ / "held.txt").string() + "\"]", "run.validate_every=2"});
    const auto validated = run(config("gpt2", sets), world);
    EXPECT_EQ(validated.validations.size(), 3);
    ASSERT_EQ(validated.steps.size(), plain.steps.size());
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_EQ(validated.steps[i].loss, plain.steps[i].loss) << world << " ranks, stage " << stage << ", step " << i + 1;
      EXPECT_EQ(validated.steps[i].grad_norm, plain.steps[i].grad_norm) << world << " ranks, stage " << stage << ", step " << i + 1;
    }
  }
}

TEST_F(TrainerTest, ARankThatComputesLongerIsNamedOnce) {
  ::testing::internal::CaptureStderr();
  const auto heard = run(config("mlp", {"run.steps=15"}), 3, {}, "rank=2,op=all_reduce,count=1+,do=delay:60ms");
  const std::string log = ::testing::internal::GetCapturedStderr();
  char host[64] = {};
  ::gethostname(host, sizeof host - 1);
  EXPECT_THAT(log, ::testing::ContainsRegex("rank 2 computes [0-9]+% slower than the median of 3 ranks over the last 10 steps \\([0-9.]+ m?s against "));
  EXPECT_THAT(log, HasSubstr(std::string("; its host is ") + host));
  EXPECT_EQ(log.find("slower"), log.rfind("slower")) << log;
  size_t slowest = 0;  // in nearly all steps: a busy machine may hold up another rank for one
  for (size_t i = 2; i < heard.steps.size(); ++i) {
    const auto& extras = heard.steps[i].extras;
    if (extras.at("slowest_rank") == 2 && extras.at("slowest_ratio") > 1.2 && extras.at("wait_s") > 0) ++slowest;
    EXPECT_LE(extras.at("compute_s"), heard.steps[i].step_s);
  }
  EXPECT_GT(2 * slowest, heard.steps.size()) << "the others wait for it";
}

TEST_F(TrainerTest, NobodyIsNamedWhereItIsOff) {
  ::testing::internal::CaptureStderr();
  run(config("mlp", {"run.steps=12", "log.straggler_ratio=0"}), 2, {}, "rank=1,op=all_reduce,count=1+,do=delay:10ms");
  EXPECT_EQ(::testing::internal::GetCapturedStderr().find("slower"), std::string::npos);
}

/// What is named runs as the reference does, and nothing else.
TEST_F(TrainerTest, KernelsAreChosenByName) {
  using kernels::Kernel, kernels::KernelChoice;
  {
    const RankScope scope(config("llama", {R"(run.kernels={ rms_norm = "reference" })"}), 1);
    EXPECT_EQ(kernels::kernel_choice(Kernel::rms_norm), KernelChoice::Reference);
    EXPECT_EQ(kernels::kernel_choice(Kernel::swiglu), KernelChoice::Auto);
  }
  const RankScope scope(config("llama", {R"(run.kernels={ rms_norm = "auto", "*" = "reference" })"}), 1);
  EXPECT_EQ(kernels::kernel_choice(Kernel::rms_norm), KernelChoice::Auto);
  EXPECT_EQ(kernels::kernel_choice(Kernel::swiglu), KernelChoice::Reference);
}

}  // namespace
}  // namespace tessera
