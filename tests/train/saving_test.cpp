// What a save costs the run that goes on: seconds and bytes.

#include <atomic>

#include <gmock/gmock.h>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/train/trainer.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

/// Lets the disk go on once a step is done.
class Saving : public testing_support::TrainFixture {
 protected:
  class Listener : public Observer {
   public:
    Listener(std::vector<StepResult>& steps, std::atomic<bool>& may_write, int64_t until) : steps_(steps), may_write_(may_write), until_(until) {}
    void after_step(const StepResult& result) override {
      steps_.push_back(result);
      if (result.step < until_) return;
      may_write_ = true;
      may_write_.notify_all();
    }

   private:
    std::vector<StepResult>& steps_;
    std::atomic<bool>& may_write_;
    int64_t until_;
  };

  /// Four steps, saved after the second and the last, on a disk that does not move before the end of step `until`.
  std::vector<StepResult> run(const std::string& mode, int64_t until) const {
    std::vector<StepResult> steps;
    std::atomic<bool> may_write = false;
    const checkpoint::FaultPointScope slow([&](std::string_view action, const std::filesystem::path&) {
      if (action == "write") may_write.wait(false);
    });
    const Config settings =
        config("mlp", {"run.steps=4", "run.threads=1", "checkpoint.every=2", "checkpoint.async=" + mode, "checkpoint.dir=" + (folder_ / mode).string()});
    comm::World world = comm::World::alone();
    Trainer trainer(settings, world, open_inputs(settings));
    trainer.add_observer(std::make_unique<Listener>(steps, may_write, until));
    trainer.run();
    return steps;
  }

  /// Bytes of what is saved: weights, and two moments of each.
  int64_t state_bytes() const {
    int64_t bytes = 0;
    for (const auto& [name, tensor] : checkpoint::read_manifest(folder_ / "true" / "step-00000002").tensors) {
      bytes += Box::whole(tensor.shape).numel() * static_cast<int64_t>(sizeof(float));
    }
    return bytes;
  }
};

TEST_F(Saving, WhatIsStagedCountsInThePeakOfTheStepsMeanwhile) {
  const auto waiting = run("false", 1), staging = run("true", 3);
  ASSERT_EQ(staging.size(), 4);
  EXPECT_EQ(staging[1].peak_bytes, waiting[1].peak_bytes);
  EXPECT_EQ(staging[2].peak_bytes, waiting[2].peak_bytes + state_bytes());
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(staging[i].loss, waiting[i].loss);
}

TEST_F(Saving, TheSecondsThatTrainingStandsStillAreReportedOnce) {
  for (const std::string mode : {"false", "true"}) {
    const auto steps = run(mode, 1);
    for (const auto& step : steps) EXPECT_EQ(step.extras.contains("save_blocked_s"), step.step == 3) << mode << ", step " << step.step;
    EXPECT_GT(steps[2].extras.at("save_blocked_s"), 0);
  }
}

}  // namespace
}  // namespace tessera
