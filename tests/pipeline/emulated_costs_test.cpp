// Stages of equal, emulated costs: a stage sleeps until its time is over, so that four ranks compute at once on two cores, and what an engine makes of a
// schedule can be held against the formulas of the papers by the clock.

#include <chrono>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/timed.h"

namespace tessera::pipeline {
namespace {

using schedules::Schedule;

constexpr int64_t kKept = 1 << 20;  // bytes that a stage keeps of a micro-batch

/// One rank's device. Work that follows at once takes its time from when what came before was due: a host that wakes late does not make later work later.
class SleepingDevice {
 public:
  explicit SleepingDevice(double unit) : unit_(unit) {}

  void work() {
    const double now = lap_clock();
    due_ = (now - due_ < unit_ / 8 ? due_ : now) + unit_;
    std::this_thread::sleep_for(std::chrono::duration<double>(due_ - now));
  }

 private:
  double unit_, due_ = 0;
};

struct Capsule : torch::CustomClassHolder {
  SleepingDevice* device = nullptr;
  at::Tensor weight;
  std::shared_ptr<nn::WeightGradients> later;
};

/// One unit of time each for forward, the gradient of the input, and that of the weight, now or later; keeps kKept bytes until the last of them is done.
struct SleepingLayer : torch::autograd::Function<SleepingLayer> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const c10::intrusive_ptr<Capsule>& capsule) {
    context->saved_data["capsule"] = c10::IValue::make_capsule(capsule);
    context->save_for_backward({at::empty({kKept}, at::kByte)});
    capsule->device->work();
    return x + weight.detach();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto capsule = c10::static_intrusive_pointer_cast<Capsule>(context->saved_data["capsule"].toCapsule());
    capsule->device->work();
    const auto of_weight = [device = capsule->device, kept = context->get_saved_variables()[0], gradient = grads[0].detach()] {
      device->work();
      return gradient.clone();
    };
    if (!capsule->later) return {grads[0], of_weight(), {}};
    capsule->later->leave(capsule->weight, of_weight);
    return {grads[0], {}, {}};
  }
};

class SleepingStage final : public Stage {
 public:
  SleepingStage(SleepingDevice& device, bool last) : device_(device), last_(last), weight_(torch::zeros({1}).requires_grad_()) {}

  StageOutputs forward(int /*micro_batch*/, const std::vector<at::Tensor>& inputs) override {
    const auto capsule = c10::make_intrusive<Capsule>();
    capsule->device = &device_;
    capsule->weight = weight_;
    capsule->later = nn::LeaveWeightGradients::current();
    const at::Tensor y =
        SleepingLayer::apply(inputs.empty() ? torch::zeros({1}) : inputs[0], capsule->later ? weight_.detach().requires_grad_() : weight_, capsule);
    if (last_) return {.values = {}, .loss = y.sum()};
    return {.values = {y}};
  }

  std::optional<TensorSpec> input_spec(int /*micro_batch*/, int /*input*/) const override { return TensorSpec{{1}, at::kFloat}; }

 private:
  SleepingDevice& device_;
  bool last_;
  at::Tensor weight_;
};

struct Ran {
  schedules::Timed timed;
  std::vector<int64_t> kept;  ///< of each rank, at its peak: micro-batches of a chunk, by the tracker of memory
};

Ran run(const Schedule& schedule, double unit) {
  const int ranks = schedule.ranks();
  Ran ran{.timed = {.schedule = schedule}, .kept = std::vector<int64_t>(static_cast<size_t>(ranks))};
  ran.timed.timeline.resize(static_cast<size_t>(ranks));
  ran.timed.asked.resize(static_cast<size_t>(ranks));
  ran.timed.collectives.resize(static_cast<size_t>(ranks));
  comm::run_ranks(ranks, [&](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    SleepingDevice device(unit);
    std::map<int, SleepingStage> stages;
    std::map<int, Stage*> pointers;
    for (const int s : schedule.stages_of(world.rank())) pointers[s] = &stages.emplace(s, SleepingStage(device, schedule.is_last(s))).first->second;
    Executor executor(schedule, chain(schedule.stages()), pointers, {.ranks = world.group()});
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    StepTimes times;
    executor.run(&times);
    ran.kept[rank] = tracker.peak() / kKept;  // what else there is, a few bytes each, is less than one
    for (const Lap& lap : times.laps) {
      ran.timed.timeline[rank].push_back({lap.start, lap.end});
      ran.timed.asked[rank].push_back(lap.asked);
      ran.timed.collectives[rank].push_back(lap.collectives);
    }
  });
  return ran;
}

struct Case {
  Schedule schedule;
  double idle = 0, busy = 0;  ///< the formula: bubble = idle/(busy + idle), in actions of a chunk
  std::vector<double> peak;   ///< in micro-batches of a rank's whole share
};

std::vector<Case> cases() {
  constexpr int p = 4, m = 8;
  return {{schedules::gpipe(p, m), p - 1, m, {8, 8, 8, 8}},
          {schedules::one_f_one_b(p, m), p - 1, m, {4, 3, 2, 1}},
          {schedules::interleaved(p, m, 2), p - 1, 2 * m, {5.5, 4.5, 3.5, 2.5}},
          {schedules::zb_h1(p, m), p - 1, 3 * m, {4, 4, 4, 4}},
          {schedules::zb_v(p, m), p - 1, 6 * m, {4, 4, 4, 4}}};
}

TEST(EmulatedCosts, BubblesAndPeaksAreThoseOfTheFormulas) {
  constexpr double kUnit = 0.02;
  constexpr int kTries = 3;  // a host that does something else meanwhile only ever adds to the bubble
  std::map<std::string, double> makespans;
  for (const Case& each : cases()) {
    SCOPED_TRACE(each.schedule.name);
    const int chunks = each.schedule.chunks(0);
    const double want = each.idle / (each.busy + each.idle);
    double bubble = 1;
    for (int i = 0; i < kTries && bubble > 1.05 * want; ++i) {
      const Ran ran = run(each.schedule, kUnit / chunks);
      const auto measures = schedules::measure(ran.timed.schedule, ran.timed.timeline);
      bubble = std::min(bubble, measures.bubble_fraction);
      makespans[each.schedule.name] = measures.makespan / kUnit;
      for (size_t rank = 0; rank < each.peak.size(); ++rank) {
        EXPECT_LE(measures.peak_activations[rank], each.peak[rank]);
        EXPECT_EQ(static_cast<double>(ran.kept[rank]) / chunks, measures.peak_activations[rank]) << "rank " << rank;
      }
      std::cout << each.schedule.name << " bubble " << measures.bubble_fraction << " want " << want << " message " << message_time(ran.timed) << "\n";
    }
    EXPECT_NEAR(bubble, want, 0.05 * want);
  }
  EXPECT_NEAR(makespans.at("zb_h1") / makespans.at("1f1b"), 27.0 / 33.0, 0.05);  // (3 m + p - 1) against 3 (m + p - 1)
}

}  // namespace
}  // namespace tessera::pipeline
