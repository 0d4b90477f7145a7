// Stage 3 with its slices, gradients and optimizer state on the host: what a run computes stays the same to the bit, in every setting it meets.

#include "tests/train/fixture.h"

namespace tessera {
namespace {

class OffloadedTraining : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;
  static constexpr const char* kOnHost[] = {"offload.params=host", "offload.gradients=host", "offload.optimizer=host"};

  void expect_same_bits(const std::string& family, Sets sets, int world) const {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets) + " on " + std::to_string(world));
    sets.insert(sets.end(), {"run.steps=3", "batch.global_size=10", "batch.micro_size=1", "run.threads=1", "zero.stage=3", "optim.max_grad_norm=0.1"});
    const Trace plain = train(config(family, sets), world);
    sets.insert(sets.end(), std::begin(kOnHost), std::end(kOnHost));
    const Trace offloaded = train(config(family, sets), world);
    EXPECT_EQ(testing_support::difference(offloaded.gradients, plain.gradients), 0);
    EXPECT_EQ(testing_support::difference(offloaded.weights, plain.weights), 0);
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      const StepOutcome &mine = offloaded.steps[i], &want = plain.steps[i];
      EXPECT_EQ(mine.loss, want.loss) << "step " << i + 1;
      EXPECT_EQ(mine.grad_norm, want.grad_norm) << "step " << i + 1;
      EXPECT_EQ(mine.loss_scale.skipped, want.loss_scale.skipped);
      EXPECT_GT(want.grad_norm, 0.1) << "clipping does something";
      EXPECT_EQ(total_of(want.memory.host), 0);
      for (const auto category : {MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer}) {
        const auto at = static_cast<size_t>(category);
        EXPECT_EQ(mine.memory.current[at], 0) << to_string(category);
        EXPECT_GT(mine.memory.host[at], 0) << to_string(category);
      }
    }
  }
};

TEST_F(OffloadedTraining, IsBitForBitOnAnyNumberOfRanks) {
  for (const int world : {1, 2, 3, 5}) {
    expect_same_bits("llama", {"model.kv_heads=2"}, world);
    expect_same_bits("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true", "zero.accumulate=whole"}, world);
  }
  expect_same_bits("mlp", {"optim.name=sgd", "optim.momentum=0.9", "zero.prefetch=0"}, 2);
  expect_same_bits("llama", {"zero.prefetch=3", "zero.reshard_after_forward=false"}, 3);
  expect_same_bits("llama", {"mesh.dp_replicate=2"}, 4);
  expect_same_bits("llama", {"mesh.dp_replicate=2", "zero.accumulate=whole", "precision.compute=bf16", "precision.reduce=bf16"}, 4);
  expect_same_bits("llama", {"mesh.tp=2"}, 4);
  expect_same_bits("mlp", {"precision.reduce=bf16"}, 1);
}

TEST_F(OffloadedTraining, IsBitForBitInEveryPrecisionAndWithRecompute) {
  const Sets masters{"precision.params=bf16", "precision.compute=bf16"};
  const Sets fp16{"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"};
  for (const int world : {1, 2}) {
    expect_same_bits("llama", {"precision.compute=bf16"}, world);
    expect_same_bits("llama", masters, world);
    expect_same_bits("llama", fp16, world);
  }
  expect_same_bits("gpt2", {"precision.compute=bf16", "model.tie_embeddings=true"}, 1);
  expect_same_bits("llama", {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16", "precision.reduce=bf16"}, 3);
  expect_same_bits("llama", {"recompute.mode=full", "model.dropout=0.1"}, 1);
  expect_same_bits("llama", {"recompute.mode=full", "zero.wrap=layers.*.*", "precision.compute=bf16"}, 3);
  expect_same_bits("llama", {"recompute.mode=selective"}, 2);
}

}  // namespace
}  // namespace tessera
