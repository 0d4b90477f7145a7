// Every optimizer whose update is not made element by element, and Lion, in layouts that cut what it adds up: rows, columns and blocks, by layers and by flat
// buckets, with weights in 16 bits, and with parameters that several ranks hold alike.

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

class VerifyOptimizer : public testing_support::VerifyFixture {
 protected:
  /// Matrices of 72 x 72 and 72 x 200, in blocks that no cut respects.
  void expect_layout(const std::string& optimizer, const std::string& mesh, const Sets& more, const std::string& family) const {
    Sets sets{"optim.name=" + optimizer, "optim.lr=0.01", "optim.weight_decay=0.1", "run.steps=2",       "batch.global_size=7",
              "batch.micro_size=1",      "model.dim=72",  "model.heads=6",          "model.ffn_dim=200", "zero.bucket_bytes=50000"};
    if (optimizer == "adafactor") sets.push_back("optim.momentum=0.8");
    sets.insert(sets.end(), more.begin(), more.end());
    expect_passes(mesh, family, sets);
  }
};

class VerifyOptimizers : public VerifyOptimizer, public ::testing::WithParamInterface<const char*> {
 protected:
  void expect_layout(const std::string& mesh, const Sets& more, const std::string& family = "llama") const {
    VerifyOptimizer::expect_layout(GetParam(), mesh, more, family);
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, VerifyOptimizers, ::testing::Values("lion", "adafactor", "adam8bit", "muon"));

TEST_P(VerifyOptimizers, OverCutLayers) {
  expect_layout("tp=2", {"model.kv_heads=3"});
  expect_layout("tp=3,dp_replicate=2", {"tensor.sequence_parallel=true", "model.tie_embeddings=true"});
}

TEST_P(VerifyOptimizers, OverShardedUpdates) {
  expect_layout("dp_shard=3", {"zero.stage=1"});
  expect_layout("dp_shard=2,dp_replicate=2", {"zero.stage=2", "precision.params=bf16", "precision.compute=bf16"});
}

TEST_P(VerifyOptimizers, OverShardedParameters) {
  expect_layout("dp_shard=5", {"zero.stage=3"});
  expect_layout("dp_shard=2,tp=2", {"zero.stage=3", "model.kv_heads=3"});
}

TEST_P(VerifyOptimizers, OverStagesAndExperts) {
  expect_layout("pp=2,dp_shard=2", {"zero.stage=1"});
  expect_layout("pp=2", {"model.tie_embeddings=true"});
  expect_layout("dp_shard=4,ep=2", {"zero.stage=2", "model.experts=4", "model.experts_per_token=2", "model.layers=1"}, "mixtral");
}

/// Rounded stochastically, where gradients have one device's bits; elsewhere a rounding of theirs may become one of a bf16 average.
TEST_F(VerifyOptimizer, WithStateIn16Bits) {
  for (const char* name : {"adamw", "lion"}) {
    expect_layout(name, "dp_replicate=3", {"optim.state_dtype=bf16", "run.deterministic=true"}, "llama");
    expect_layout(name, "pp=2", {"optim.state_dtype=bf16"}, "llama");
  }
}

TEST_F(VerifyOptimizer, MuonTakesHeadsApart) {
  expect_layout("muon", "tp=2,dp_shard=2", {"zero.stage=1", "model.kv_heads=3", "optim.split_heads=true"}, "llama");
  expect_layout("muon", "dp_shard=4,ep=2,expert_tp=2",
                {"zero.stage=3", "optim.split_heads=true", "model.experts=4", "model.experts_per_token=2", "model.layers=1"}, "mixtral");
}

/// Parameters of two optimizers, of three rates and of other averages: each pattern cuts across stages, buckets and layers.
class VerifyGroups : public VerifyOptimizers {
 protected:
  void SetUp() override {
    VerifyOptimizers::SetUp();
    groups_ = "optim.groups=[\"**.*norm: weight_decay = 0, lr_factor = 0.5\", \"layers.*.attention: name = " + std::string(GetParam()) +
              ", lr = 0.003\", \"layers.1: betas = [0.8, 0.95]\"]";
  }
  std::string groups_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, VerifyGroups, ::testing::Values("lion", "adam8bit"));

TEST_P(VerifyGroups, InEveryLayout) {
  expect_layout("tp=2,dp_replicate=2", {"optim.name=adamw", groups_, "model.kv_heads=3", "tensor.sequence_parallel=true"});
  expect_layout("dp_shard=3", {"optim.name=adamw", groups_, "zero.stage=1"});
  expect_layout("dp_shard=2,tp=2", {"optim.name=adamw", groups_, "zero.stage=3"});
  expect_layout("pp=2,dp_shard=2", {"optim.name=adamw", groups_, "zero.stage=2", "precision.params=bf16", "precision.compute=bf16"});
}

}  // namespace
}  // namespace tessera
