#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::TrainFixture;

using testing_support::kGradients;
using testing_support::kLosses;

class Parity : public TrainFixture {
 protected:
  void expect_equal_runs(const Config& config, const std::vector<int>& worlds) {
    const Trace one = train(config, 1);
    for (int world : worlds) {
      const Trace many = train(config, world);
      EXPECT_LE(difference(many.gradients, one.gradients), kGradients) << world << " ranks";
      for (size_t i = 0; i < one.steps.size(); ++i)
        EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, kLosses * one.steps[i].loss) << world << " ranks, step " << i + 1;
    }
    EXPECT_LT(one.steps.back().loss, one.steps.front().loss);
  }

  void expect_same_bits(const Config& config, int fewest, const std::vector<int>& worlds) {
    const Trace one = train(config, fewest);
    for (int world : worlds) {
      const Trace many = train(config, world);
      EXPECT_EQ(difference(many.gradients, one.gradients), 0) << world << " ranks";
      EXPECT_EQ(difference(many.weights, one.weights), 0) << world << " ranks";
      for (size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_EQ(many.steps[i].loss, one.steps[i].loss) << world << " ranks, step " << i + 1;
        EXPECT_EQ(many.steps[i].grad_norm, one.steps[i].grad_norm) << world << " ranks, step " << i + 1;
      }
    }
  }
};

TEST_F(Parity, LlamaOnUnequalRuns) { expect_equal_runs(config("llama", {"model.kv_heads=2"}), {2, 3, 5}); }
TEST_F(Parity, Gpt2WithDropout) { expect_equal_runs(config("gpt2", {"model.dropout=0.1"}), {3}); }
TEST_F(Parity, MlpWithSgd) { expect_equal_runs(config("mlp", {"optim.name=sgd", "optim.momentum=0.9"}), {2}); }
TEST_F(Parity, TiedWeights) { expect_equal_runs(config("llama", {"model.tie_embeddings=true"}), {3}); }
TEST_F(Parity, ReferenceKernels) {
  // Of the first step: after an update, Adam has turned rounding in gradients near zero into steps of full size.
  const Trace fused = train(config("llama"), 1, {}, 1), plain = train(config("llama", {"run.kernels=reference"}), 1, {}, 1);
  EXPECT_LE(difference(fused.gradients, plain.gradients), kGradients);
}

TEST_F(Parity, DeterministicRunsAreBitIdentical) { expect_same_bits(config("llama", {"run.deterministic=true"}), 1, {2, 3, 5}); }

/// Products whose sums cross ranks have bits of their own, the same ones for any number of data ranks.
TEST_F(Parity, DeterministicRunsOfLayersThatAreCutAreBitIdentical) {
  expect_same_bits(config("llama", {"run.deterministic=true", "model.kv_heads=2", "mesh.tp=2", "tensor.sequence_parallel=true"}), 2, {4, 6});
  expect_same_bits(config("gpt2", {"run.deterministic=true", "model.dropout=0.1", "model.tie_embeddings=true", "mesh.tp=3"}), 3, {6});
}

TEST_F(Parity, PlantedBugsAreFound) {
  const auto settings = config("llama");
  const Trace one = train(settings, 1);
  const Trace halved = train(settings, 2, [](Composition& run) {
    for (auto& p : run.parameters)
      if (p.name == "norm.weight") p.tensor.grad().mul_(0.5);
  });
  EXPECT_GT(difference(halved.gradients, one.gradients), kGradients);
  // 1/7 of the batch missing, as if one micro-batch's contribution had been dropped.
  const Trace dropped = train(config("llama", {"batch.global_size=12"}), 2);
  EXPECT_GT(difference(dropped.gradients, one.gradients), kGradients);
}

}  // namespace
}  // namespace tessera
