// LoRA in every layout against one device: A and B of layers that are cut by columns and by rows, evenly and unevenly, under everything that cuts, shards or
// computes again.

#include <gmock/gmock.h>

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

class VerifyLora : public testing_support::VerifyFixture {
 protected:
  void expect_layout(const std::string& mesh, const Sets& more = {}, const std::string& family = "llama") const {
    Sets sets{"lora.modules=layers.*.attention.*,layers.*.feed_forward.*",
              "lora.rank=3",
              "run.steps=3",
              "batch.global_size=10",
              "batch.micro_size=1",
              "zero.bucket_bytes=2000"};
    sets.insert(sets.end(), more.begin(), more.end());
    expect_passes(mesh, family, sets);
  }
};

TEST_F(VerifyLora, OverReplicas) {
  expect_layout("dp_replicate=2");
  expect_layout("dp_replicate=3", {"lora.dropout=0.3"});
  expect_layout("dp_replicate=2", {"run.deterministic=true"});
}

TEST_F(VerifyLora, OverCutLayers) {
  expect_layout("tp=2", {"lora.dropout=0.3"});
  expect_layout("tp=3", {"model.kv_heads=2", "lora.dropout=0.2"});
  expect_layout("tp=5", {"model.heads=6", "model.kv_heads=3", "model.ffn_dim=43"});
  expect_layout("tp=2", {"tensor.sequence_parallel=true", "lora.dropout=0.3", "model.dropout=0.1"});
  expect_layout("tp=3", {"tensor.sequence_parallel=true", "tensor.overlap=true", "model.kv_heads=1"});
}

TEST_F(VerifyLora, OverShards) {
  expect_layout("dp_shard=2", {"zero.stage=1"});
  expect_layout("dp_shard=3", {"zero.stage=2"});
  expect_layout("dp_shard=5", {"zero.stage=3", "lora.dropout=0.3"});
  expect_layout("dp_shard=2,tp=2", {"zero.stage=3", "lora.dropout=0.3", "model.kv_heads=1"});
  expect_layout("dp_shard=2,dp_replicate=2", {"zero.stage=3"});
}

TEST_F(VerifyLora, OverStagesAndSequences) {
  expect_layout("pp=2");
  expect_layout("pp=2", {"pipeline.schedule=zb_h1", "lora.dropout=0.3"});
  expect_layout("pp=2,tp=2", {"model.tie_embeddings=true"});
  expect_layout("cp=2", {"lora.dropout=0.3"});
  expect_layout("cp=2,tp=2", {"tensor.sequence_parallel=true"});
}

TEST_F(VerifyLora, OfSomeLayers) {
  expect_layout("pp=2", {"lora.modules=layers.1.attention.*,layers.0.feed_forward.w2"});
  expect_layout("dp_shard=2", {"zero.stage=3", "lora.modules=layers.1.attention.wq"});
}

TEST_F(VerifyLora, WithWhatIsTrainedBeside) {
  expect_layout("tp=2", {"lora.trained=[\"norm.weight\", \"layers.*.attention_norm.*\"]", "tensor.sequence_parallel=true"});
  expect_layout("dp_shard=3", {"zero.stage=3", "lora.trained=[\"embed_tokens.weight\"]"});
  expect_layout("pp=2", {"lora.trained=[\"embed_tokens.weight\"]", "model.tie_embeddings=true"});
}

TEST_F(VerifyLora, WithRecomputationAndPrecision) {
  expect_layout("tp=2", {"recompute.mode=full"});
  expect_layout("dp_shard=2", {"zero.stage=3", "recompute.mode=full", "lora.dropout=0.3"});
  expect_layout("dp_replicate=2", {"recompute.mode=selective"});
  expect_layout("tp=2", {"precision.compute=bf16"});
  expect_layout("dp_shard=2", {"zero.stage=3", "precision.params=bf16", "precision.compute=bf16"});
  expect_layout("tp=2", {"recompute.ffn_tile=5"});
  // What the layers see of a tile is of all ranks' parts, and no piece of the sequence.
  expect_layout("tp=3", {"recompute.ffn_tile=4", "tensor.sequence_parallel=true", "lora.dropout=0.3", "model.dropout=0.1", "data.seq_len=17"});
  expect_layout("cp=2,tp=2", {"recompute.ffn_tile=4", "tensor.sequence_parallel=true", "lora.dropout=0.3"});
}

TEST_F(VerifyLora, OfOtherFamilies) {
  expect_layout("tp=2,dp_replicate=2", {}, "gpt2");
  expect_layout("tp=3", {"lora.modules=layers.*.feed_forward.*", "lora.dropout=0.2"}, "mlp");
  expect_layout("dp_shard=2,ep=2", {"lora.modules=layers.*.attention.*", "model.experts=4", "zero.stage=2"}, "mixtral");
}

/// Blocks that no cut respects: of the flattened matrices of 24 and 40 columns.
class VerifyQlora : public VerifyLora {
 protected:
  void expect_quantized(const std::string& mesh, const Sets& more = {}, const std::string& family = "llama") const {
    Sets sets{"quantize.modules=layers.*.attention.*,layers.*.feed_forward.*", "quantize.block=17"};
    sets.insert(sets.end(), more.begin(), more.end());
    expect_layout(mesh, sets, family);
  }
};

TEST_F(VerifyQlora, OverCutLayers) {
  expect_quantized("tp=2");
  expect_quantized("tp=3", {"quantize.format=int8", "model.kv_heads=2", "lora.dropout=0.2"});
  expect_quantized("tp=2", {"quantize.double_scales=true", "tensor.sequence_parallel=true", "tensor.overlap=true"});
  expect_quantized("tp=5", {"model.heads=6", "model.kv_heads=3", "model.ffn_dim=43"});
}

TEST_F(VerifyQlora, OverReplicasAndShards) {
  expect_quantized("dp_replicate=3", {"quantize.format=int8"});
  expect_quantized("dp_shard=2", {"zero.stage=1"});
  expect_quantized("dp_shard=3", {"zero.stage=3", "recompute.mode=full"});
  expect_quantized("dp_shard=2,tp=2", {"zero.stage=3", "precision.compute=bf16"});
  expect_quantized("dp_shard=5", {"zero.stage=3", "quantize.double_scales=true", "quantize.format=int8", "zero.reshard_after_forward=false"});
  expect_quantized("dp_shard=2,dp_replicate=2", {"zero.stage=3", "recompute.mode=selective"}, "gpt2");
}

TEST_F(VerifyQlora, OverStagesAndSequences) {
  expect_quantized("pp=2", {"pipeline.schedule=zb_h1"});
  expect_quantized("pp=2,tp=2", {"quantize.modules=layers.1.**"});
  expect_quantized("cp=2");
  expect_quantized("dp_shard=2,pp=2", {"zero.stage=3", "pipeline.schedule=zb_h1"});
  expect_quantized("dp_shard=2", {"zero.stage=3", "recompute.ffn_tile=5"});
  // Ranks of uneven parts have other numbers of tiles.
  expect_quantized("cp=3", {"zero.stage=3", "recompute.ffn_tile=5", "data.seq_len=17"});
  expect_quantized("tp=2,dp_replicate=2", {}, "gpt2");
}

TEST_F(VerifyQlora, RefusesByName) {
  const auto refusal = [&](const Sets& sets) {
    try {
      run("tp=2", "llama", sets);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using testing::HasSubstr;
  EXPECT_THAT(refusal({"quantize.modules=layers.*.attention.*"}), HasSubstr("set lora.modules"));
  try {
    run("pp=2", "llama", {"lora.modules=layers.1.attention.*"});
    ADD_FAILURE() << "a stage with nothing to train";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("names nothing in stage 0 of 2"));
  }
  EXPECT_THAT(refusal({"lora.modules=layers.*.atention.*"}), HasSubstr("the nearest path is"));
  EXPECT_THAT(refusal({"lora.modules=layers.*.attention.*", "quantize.modules=layer.*.attention.*"}), HasSubstr("the nearest path is"));
  EXPECT_THAT(refusal({"lora.modules=layers.*.attention.*", "lora.trained=[\"layers.0.**\"]", "quantize.modules=layers.*.attention.*"}),
              HasSubstr("'layers.0.attention.wq.weight' is to be trained"));
}

}  // namespace
}  // namespace tessera
