#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::TrainFixture;

using testing_support::kGradients;
using testing_support::kLosses;

class TensorParallelRuns : public TrainFixture {
 protected:
  /// Of three steps: what an update spoils shows in the next.
  Config config(const std::string& family, std::vector<std::string> sets) const {
    sets.emplace_back("run.steps=3");
    return TrainFixture::config(family, sets);
  }

  void expect_equal(const std::string& family, const std::vector<std::string>& common, const std::vector<std::pair<int, std::vector<std::string>>>& layouts) {
    const Trace one = train(config(family, common), 1);
    for (const auto& [ranks, sets] : layouts) {
      auto all = common;
      all.insert(all.end(), sets.begin(), sets.end());
      SCOPED_TRACE(family + " on " + std::to_string(ranks) + " ranks: " + sets.front());
      const Trace many = train(config(family, all), ranks);
      EXPECT_LE(difference(many.gradients, one.gradients), kGradients);
      for (size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, kLosses * one.steps[i].loss) << "step " << i + 1;
        EXPECT_NEAR(many.steps[i].grad_norm, one.steps[i].grad_norm, 2e-5 * one.steps[i].grad_norm) << "step " << i + 1;
      }
    }
  }
};

const std::string kSequence = "tensor.sequence_parallel=true", kOverlap = "tensor.overlap=true";

TEST_F(TensorParallelRuns, LlamaWithSharedKeys) {
  // 4 heads, 2 key-value heads: on 3 and 4 ranks some share their keys; 259 entries of vocabulary and 16 positions are cut unevenly by 3.
  expect_equal("llama", {"model.kv_heads=2"},
               {{2, {"mesh.tp=2"}},
                {3, {"mesh.tp=3"}},
                {4, {"mesh.tp=4"}},
                {2, {"mesh.tp=2", kSequence}},
                {3, {"mesh.tp=3", kSequence}},
                {4, {"mesh.tp=4", kSequence}}});
}

TEST_F(TensorParallelRuns, Gpt2WithDropoutAndTiedEmbeddings) {
  expect_equal("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, {{2, {"mesh.tp=2"}}, {3, {"mesh.tp=3", kSequence}}});
}

TEST_F(TensorParallelRuns, MlpOnEightRanks) { expect_equal("mlp", {"model.tie_embeddings=true"}, {{8, {"mesh.tp=8"}}, {5, {"mesh.tp=5", kSequence}}}); }

TEST_F(TensorParallelRuns, TogetherWithDataParallelism) {
  expect_equal("llama", {"model.kv_heads=2"},
               {{4, {"mesh.tp=2"}},
                {6, {"mesh.tp=2", "mesh.dp_shard=3", "zero.stage=3", kSequence}},
                {4, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=2", kSequence}},
                {4, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=1"}},
                {8, {"mesh.tp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=3"}}});
}

TEST_F(TensorParallelRuns, WithCommunicationBehindProducts) {
  expect_equal("llama", {"model.kv_heads=2"},
               {{2, {"mesh.tp=2", kOverlap}},
                {3, {"mesh.tp=3", kOverlap, kSequence}},
                {6, {"mesh.tp=3", kOverlap, kSequence, "mesh.dp_shard=2", "zero.stage=3", "recompute.mode=full"}}});
  expect_equal("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, {{4, {"mesh.tp=4", kOverlap, kSequence, "tensor.keep_gathered=true"}}});
}

TEST_F(TensorParallelRuns, RecomputesBitForBit) {
  for (const auto& sequence : {std::string("tensor.sequence_parallel=false"), kSequence}) {
    for (const auto& overlap : {std::string("tensor.overlap=false"), kOverlap}) {
      const Trace kept = train(config("llama", {"mesh.tp=2", sequence, overlap}), 2);
      for (const char* mode : {"recompute.mode=full", "recompute.mode=selective"}) {
        const Trace again = train(config("llama", {"mesh.tp=2", sequence, overlap, mode}), 2);
        EXPECT_EQ(difference(again.gradients, kept.gradients), 0) << mode << " " << sequence << " " << overlap;
        EXPECT_EQ(again.steps.back().loss, kept.steps.back().loss) << mode << " " << sequence << " " << overlap;
      }
    }
  }
}

TEST_F(TensorParallelRuns, KeepWhatIsGatheredWithTheSameBits) {
  const std::vector<std::string> sets{"mesh.tp=3", kSequence};
  const Trace again = train(config("llama", sets), 3), kept = train(config("llama", {sets[0], sets[1], "tensor.keep_gathered=true"}), 3);
  EXPECT_EQ(difference(kept.gradients, again.gradients), 0);
  EXPECT_EQ(kept.steps.back().loss, again.steps.back().loss);
}

}  // namespace
}  // namespace tessera
