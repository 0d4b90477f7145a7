// The same training on the CPU and on the device that the suite runs on: on the CPU that says little, on the simulated accelerator (docs/testing.md) that a run
// there has the CPU's bits and counts its bytes.

#include "tests/train/fixture.h"

namespace tessera {
namespace {

class TrainDevice : public testing_support::TrainFixture {
 protected:
  struct Layout {
    const char* family;
    int world;
    std::vector<std::string> sets;
  };

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
    // The batch lies on the host, too: tokens and labels of 7 micro-batches of 2 sequences of 16.
    const int64_t batch = got_there ? 7 * 2 * 16 * 16 : 0;
    if (bytes && layout.world == 1) EXPECT_EQ(got.peak_of_rank[0], want.peak_of_rank[0] + batch) << name;
  }
};

TEST_F(TrainDevice, OneRankHasTheCpusBitsAndBytes) {
  for (const auto& layout : std::vector<Layout>{{"llama", 1, {}},
                                                {"gpt2", 1, {}},
                                                {"llama", 1, {"precision.compute=bf16"}},
                                                {"llama", 1, {"recompute.mode=full"}},
                                                {"llama", 1, {"run.kernels=reference"}}}) {
    expect_the_same_run(layout);
  }
}

TEST_F(TrainDevice, SeveralRanksHaveTheCpusBits) {
  for (const auto& layout : std::vector<Layout>{{"llama", 2, {"zero.stage=0"}},
                                                {"llama", 2, {"zero.stage=1"}},
                                                {"llama", 2, {"zero.stage=2"}},
                                                {"llama", 3, {"zero.stage=3"}},
                                                {"llama", 2, {"mesh.tp=2"}},
                                                {"llama", 2, {"mesh.tp=2", "run.kernels=reference"}}}) {
    expect_the_same_run(layout);
  }
}

// Two things on a device round otherwise than on the CPU. Weights' gradients are not added up inside of products there (GradientDispatcher::adds_in_place),
// which a pipeline does unless it recomputes or has several data ranks. And the log-sum-exps of the memory-efficient kernel lie in rows of whole multiples of
// 32, where the CPU's lie without gaps, so that loops over them end, and leave what does not fill a vector, elsewhere: runs of 32 columns lie alike.
TEST_F(TrainDevice, StagesAndCutSequencesHaveTheCpusBits) {
  for (const auto& layout :
       std::vector<Layout>{{"llama", 2, {"mesh.pp=2", "recompute.mode=full"}}, {"gpt2", 4, {"mesh.pp=2"}}, {"llama", 2, {"mesh.cp=2", "data.seq_len=128"}}}) {
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
  for (const char* stage : {"0", "1", "2"}) {
    expect_the_same_run({"llama", 2, {std::string("zero.stage=") + stage, "offload.gradients=host", "offload.optimizer=host", "zero.bucket_bytes=4096"}},
                        /*bytes=*/false);
  }
}

}  // namespace
}  // namespace tessera
