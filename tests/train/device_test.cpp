// The same training on the CPU and on the device that the suite runs on: on the CPU that says little, on the simulated accelerator (docs/testing.md) that a run
// there has the CPU's bits and counts its bytes.

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include "tessera/kernels/products.h"
#include "tessera/train/deterministic_operators.h"
#include "tessera/train/observers/memory_report.h"
#include "tests/train/fixture.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

/// A device computes GELU by libtorch's kernel (kernels::activate).
constexpr const char* kSameGelu = "run.kernels={ bias_activation = \"reference\" }";

class TrainDevice : public testing_support::TrainFixture {
 protected:
  struct Layout {
    const char* family;
    int world;
    std::vector<std::string> sets;
    int64_t sent_bytes = 0;  ///< that are on their way at the peak, where a CPU's message is done when it is sent
  };

  /// On every rank; `bytes`: and the same peaks.
  void expect_the_same_run(const Layout& layout, bool bytes = true) {
    Config settings = config(layout.family, layout.sets);
    settings.run.steps = 3;
    const Trace got = train(settings, layout.world);
    const bool got_there = !testing_support::test_device().is_cpu();
    const testing_support::OnTheCpu beside;
    const Trace want = train(settings, layout.world);
    const std::string name = std::string(layout.family) + (layout.sets.empty() ? "" : " " + layout.sets.front());
    ASSERT_EQ(got.steps.size(), want.steps.size()) << name;
    for (size_t i = 0; i < want.steps.size(); ++i) {
      EXPECT_EQ(got.steps[i].loss, want.steps[i].loss) << name;
      EXPECT_NEAR(got.steps[i].grad_norm, want.steps[i].grad_norm, 1e-14 * want.steps[i].grad_norm) << name;  // clip.cpp says why
    }
    for (const auto& [parameter, tensor] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(parameter), tensor)) << name << ": " << parameter;
    std::vector<int64_t> peaks = want.peak_of_rank;
    for (int64_t& peak : peaks) peak += got_there ? layout.sent_bytes : 0;
    if (bytes) EXPECT_EQ(got.peak_of_rank, peaks) << name;
  }
};

TEST_F(TrainDevice, OneRankHasTheCpusBitsAndBytes) {
  for (const auto& layout : std::vector<Layout>{{"llama", 1, {}},
                                                {"gpt2", 1, {kSameGelu}},
                                                {"llama", 1, {"precision.compute=bf16"}},
                                                {"llama", 1, {"recompute.mode=full"}},
                                                {"llama", 1, {"run.kernels=reference"}}}) {
    const bool in_bf16 = layout.sets == std::vector<std::string>{"precision.compute=bf16"};
    if (in_bf16 && !kernels::multiplies_bf16(at::kCPU)) continue;  // such a processor's products are not rounded, a device's are
    expect_the_same_run(layout);
  }
}

TEST_F(TrainDevice, SeveralRanksHaveTheCpusBitsAndBytes) {
  for (const auto& layout : std::vector<Layout>{{"llama", 2, {"zero.stage=0"}},
                                                {"llama", 2, {"zero.stage=1"}},
                                                {"llama", 2, {"zero.stage=2"}},
                                                {"llama", 3, {"zero.stage=3"}},
                                                {"llama", 2, {"mesh.tp=2"}},
                                                {"llama", 2, {"mesh.tp=2", "run.kernels=reference"}}}) {
    expect_the_same_run(layout);
  }
}

// Three things on a device round otherwise than on the CPU. Weights' gradients are not added up inside of products there (GradientDispatcher::adds_in_place),
// which a pipeline does unless it recomputes or has several data ranks. And the log-sum-exps of the memory-efficient kernel lie in rows of whole multiples of
// 32, where the CPU's lie without gaps, so that loops over them end, and leave what does not fill a vector, elsewhere: runs of 32 columns lie alike. And tiles
// of heads whose features are no whole vectors are padded: three heads of 8 are not. What a stage has sent, 2 sequences of 16 columns of 24 numbers, goes on
// when the stage asks for the first time.
TEST_F(TrainDevice, StagesAndCutSequencesHaveTheCpusBits) {
  for (const auto& layout : std::vector<Layout>{{"llama", 2, {"mesh.pp=2", "recompute.mode=full"}, 2 * 16 * 24 * 4},
                                                {"gpt2", 4, {"mesh.pp=2", kSameGelu}, 2 * 16 * 24 * 4},
                                                {"llama", 2, {"mesh.cp=2", "data.seq_len=128", "model.heads=3"}}}) {
    expect_the_same_run(layout);
  }
}

TEST_F(TrainDevice, OffloadHasTheCpusBits) {
  for (const int world : {1, 2})
    expect_the_same_run({"llama", world, {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"}}, /*bytes=*/false);
  const std::string dir = "offload.dir=" + (folder_ / "away").string();
  for (const auto& sets : std::vector<std::vector<std::string>>{{"offload.gradients=host", "offload.optimizer=host"},
                                                                {"offload.gradients=host", "offload.optimizer=disk", dir},
                                                                {"offload.optimizer=disk", dir},
                                                                {"offload.optimizer=host", "offload.update=device"},
                                                                {"offload.optimizer=disk", "offload.update=device", dir},
                                                                {"offload.optimizer=host", "offload.delayed_update=true"},
                                                                {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host",
                                                                 "pipeline.schedule=breadth_first", "pipeline.virtual_stages=4"}}) {
    expect_the_same_run({"llama", 1, sets}, /*bytes=*/false);
  }
  for (const auto& sets :
       std::vector<std::vector<std::string>>{{"offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk", dir},
                                             {"offload.params={ \"layers.*\" = \"host\", \"layers.1\" = \"disk\" }", "optim.max_grad_norm=0.1", dir},
                                             {"offload.optimizer={ \"layers.*\" = \"host\" }"}}) {
    auto all = sets;
    all.emplace_back("zero.stage=3");
    for (const int world : {1, 2}) expect_the_same_run({"llama", world, all}, /*bytes=*/false);
  }
  for (const char* stage : {"0", "1", "2"}) {
    expect_the_same_run({"llama", 2, {std::string("zero.stage=") + stage, "offload.gradients=host", "offload.optimizer=host", "zero.bucket_bytes=4096"}},
                        /*bytes=*/false);
  }
}

// The setting is the process's, of which ranks may be threads that end in any order.
TEST_F(TrainDevice, ADeterministicRunAsksForOperatorsThatRepeatTheirBits) {
  const auto asked = [] {
    const at::Context& context = at::globalContext();
    return std::tuple(context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(), context.deterministicFillUninitializedMemory());
  };
  const auto before = asked();
  const std::tuple repeats(true, false, false);
  const at::Device device = testing_support::test_device();
  for (const bool deterministic : {false, true}) {
    Config settings = config("llama");
    settings.run.deterministic = deterministic;
    RankScope scope(settings, 1);
    scope.compute_on(device);
    EXPECT_EQ(asked(), deterministic && !device.is_cpu() ? repeats : before);
  }
  EXPECT_EQ(asked(), before);
  auto one = std::make_unique<DeterministicOperators>(), other = std::make_unique<DeterministicOperators>();
  EXPECT_EQ(asked(), repeats);
  one.reset();
  EXPECT_EQ(asked(), repeats);
  other.reset();
  EXPECT_EQ(asked(), before);
}

/// A rank whose device refuses what it would have to reserve beyond `limit`.
class LimitedDevice : public TrainDevice {
 protected:
  Config limited(int64_t limit) const {
    Config settings = config("llama");
    settings.run.memory_limit_bytes = limit;
    return settings;
  }
};

// Of the host's tensors and the device's, the limit and the device's peak are the device's alone.
TEST_F(LimitedDevice, WhatLiesOnTheHostIsNotTheDevices) {
  const at::Device device = testing_support::test_device();
  RankScope scope(limited(1 << 20), 1);
  scope.compute_on(device);
  const MemoryScope category(MemoryCategory::Comm);
  const auto on_host = [](int64_t bytes) { return at::empty({bytes}, at::TensorOptions(at::kCPU).dtype(at::kByte)); };
  if (device.is_cpu()) {
    EXPECT_THROW(on_host(2 << 20), c10::OutOfMemoryError);
    return;
  }
  const at::Tensor host = on_host(2 << 20), there = at::empty({512}, at::TensorOptions(device).dtype(at::kByte));
  EXPECT_EQ(scope.memory().peak(), 512);
  EXPECT_EQ(total_of(scope.memory().host_by_category()), 2 << 20);
  EXPECT_THROW(at::empty({2 << 20}, at::TensorOptions(device).dtype(at::kByte)), c10::OutOfMemoryError);
  ASSERT_TRUE(scope.memory().refusal().has_value());
  EXPECT_EQ(scope.memory().refusal()->requested, 2 << 20);
  EXPECT_EQ(total_of(scope.memory().refusal()->in_use), 512);
}

// What the allocator keeps of the device stands beside what is alive, in metrics and in the report of a step's memory.
TEST_F(TrainDevice, WhatTheDeviceHasGivenIsShown) {
  Config settings = config("llama", {"run.steps=2", "log.dir=" + (folder_ / "log").string()});
  const bool on_device = !testing_support::test_device().is_cpu();
  std::vector<StepResult> steps;
  ::testing::internal::CaptureStdout();
  comm::run_ranks(1, [&](comm::World& ranks) {
    Trainer trainer(settings, ranks, open_inputs(settings), std::nullopt, {.report = true}, testing_support::test_device());
    trainer.add_observer(std::make_unique<testing_support::Listener>(steps));
    trainer.add_observer(std::make_unique<MemoryReport>(folder_ / "report.svg"));
    trainer.run();
  });
  const std::string report = ::testing::internal::GetCapturedStdout();
  ASSERT_EQ(steps.size(), 2);
  for (const auto& step : steps) {
    EXPECT_EQ(step.extras.contains("reserved_bytes"), on_device);
    if (on_device) EXPECT_GE(step.extras.at("reserved_bytes"), static_cast<double>(total_of(step.memory.current)));
  }
  EXPECT_NE(steps[1].memory_history, nullptr);
  EXPECT_EQ(report.find("the device's allocator has reserved ") != std::string::npos, on_device) << report;
}

}  // namespace
}  // namespace tessera
