// Sequences that are cut over ranks, by every method, beside everything else: the step of one device, module by module.

#include <array>

#include <gmock/gmock.h>

#include "tessera/nn/attach.h"
#include "tessera/nn/sample_scope.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using Sets = std::vector<std::string>;

class ContextVerify : public testing_support::VerifyFixture, public ::testing::WithParamInterface<const char*> {
 protected:
  static Sets with(const std::string& method, const Sets& more) {
    // 13 columns: odd, and uneven for any number of ranks; attention stays soft (matrix_test.cpp).
    Sets sets{"context.method=" + method, "data.seq_len=13", "batch.global_size=3", "batch.micro_size=1", "run.steps=2", "optim.lr=1e-3",
              "zero.bucket_bytes=8000",   "model.heads=8",   "model.dim=32"};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  }
  void expect(const std::string& mesh, const std::string& family, const Sets& more) const { expect_passes(mesh, family, with(GetParam(), more)); }
};

const std::string kShared = "model.kv_heads=2", kTied = "model.tie_embeddings=true", kDropout = "model.dropout=0.1",
                  kBySequence = "tensor.sequence_parallel=true";

TEST_P(ContextVerify, AnyNumberOfRanks) {
  expect("cp=2", "llama", {kShared});
  expect("cp=3", "gpt2", {kDropout, kTied});
  expect("cp=4", "llama", {kShared, kDropout, "context.balance=contiguous"});
  expect("cp=8", "llama", {"comm.check=true"});
}

/// Of less than a rank's columns, which are one part then, and of more, over documents, too.
TEST_P(ContextVerify, Windows) {
  expect("cp=2", "llama", {kShared, "model.sliding_window=3"});
  expect("cp=2", "gpt2", {"model.sliding_window=1"});  // nothing is sent, and queries and keys have no gradient but rounding
  expect("cp=3", "gpt2", {kDropout, "model.sliding_window=7", "recompute.mode=full"});
  expect("cp=4", "llama", {kShared, "model.sliding_window=4", "context.balance=contiguous", "recompute.mode=selective"});
  expect("cp=2", "llama", {write_lines(), "data.documents=lines", "data.seq_len=29", "model.sliding_window=5"});
}

TEST_P(ContextVerify, RecomputedAndInOtherNumberFormats) {
  expect("cp=2", "llama", {kShared, kDropout, "recompute.mode=full"});
  expect("cp=3", "gpt2", {"recompute.mode=selective"});
  expect("cp=2,tp=2", "llama", {kShared, kBySequence, kDropout, "recompute.mode=full"});
  expect("cp=2", "llama", {kShared, "precision.compute=bf16", "recompute.mode=selective"});
  expect("cp=2,dp_shard=2", "gpt2", {"precision.params=bf16", "precision.compute=bf16", "zero.stage=3"});
  expect("cp=2", "llama", {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=1024"});
  expect("cp=2", "llama", {"precision.compute=fp8"});
}

INSTANTIATE_TEST_SUITE_P(Methods, ContextVerify, ::testing::Values("all_gather", "ring", "ring_full", "ulysses", "ulysses_ring"),
                         [](const auto& info) { return std::string(info.param); });

/// Those that send messages from rank to rank, and those that exchange: the others send in the same places.
class ContextLayouts : public ContextVerify {};

TEST_P(ContextLayouts, WithDataRanksAndEveryStageOfSharding) {
  expect("cp=2,dp_replicate=2", "gpt2", {kDropout});
  expect("cp=2,dp_shard=2", "llama", {kShared, "zero.stage=1"});
  expect("cp=3,dp_shard=1", "gpt2", {kTied, "zero.stage=2"});
  expect("cp=2,dp_shard=2", "llama", {kShared, kTied, "zero.stage=3"});
  expect("cp=2,dp_shard=1,dp_replicate=2", "llama", {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"});
}

TEST_P(ContextLayouts, WithLayersThatAreCut) {
  expect("cp=2,tp=2", "llama", {kShared, kDropout});
  expect("cp=2,tp=2", "gpt2", {kBySequence, kDropout, kTied});
  expect("cp=3,tp=2", "llama", {kShared, kBySequence, kDropout, "tensor.overlap=true"});
  expect("cp=2,tp=2,dp_shard=2", "llama", {kShared, kBySequence, "zero.stage=3"});
  expect("cp=2,tp=2", "llama", {kShared, kBySequence, "data.seq_len=2"});  // a rank has no column between layers
}

TEST_P(ContextLayouts, WithStages) {
  expect("cp=2,pp=2", "llama", {kShared, kDropout});
  expect("cp=2,pp=2", "gpt2", {kTied, "pipeline.schedule=interleaved", "pipeline.virtual_stages=2", "model.layers=4"});
  expect("cp=2,pp=2,dp_shard=2", "llama", {kShared, "zero.stage=3", "pipeline.schedule=zb_h1"});
  expect("cp=2,pp=2,tp=2", "llama", {kShared, kTied, kBySequence, "pipeline.schedule=zb_v", "pipeline.virtual_stages=2", "model.layers=4", "zero.stage=1"});
}

/// Each micro-batch is cut by its own documents.
TEST_P(ContextLayouts, WithPackedDocuments) {
  const auto packed = [&](const std::string& mesh, const std::string& family, Sets more) {
    more.insert(more.end(), {write_lines(), "data.documents=lines", "data.seq_len=29", "batch.global_size=6", "batch.micro_size=2"});
    expect(mesh, family, more);
  };
  packed("cp=2", "llama", {kShared, kDropout, "recompute.mode=full"});
  packed("cp=3", "gpt2", {kDropout, kTied});
  packed("cp=2,tp=2", "llama", {kShared, kBySequence, kDropout});
  packed("cp=2,pp=2", "llama", {kShared, "recompute.mode=selective"});
  packed("cp=2,dp_shard=2", "mixtral", {"zero.stage=3", "model.kv_heads=2"});
}

TEST_P(ContextLayouts, WithWindows) {
  const std::string window = "model.sliding_window=4";
  expect("cp=2,dp_shard=2", "llama", {kShared, window, "zero.stage=3"});
  expect("cp=2,tp=2,pp=2", "llama", {kShared, kBySequence, kDropout, window});
  expect("cp=2,dp_shard=2", "mixtral", {window, "zero.stage=1", "model.kv_heads=2", "precision.compute=bf16"});
}

/// Tiles of feed-forward layers are computed again in backward, by themselves or within blocks that are.
TEST_P(ContextLayouts, WithFeedForwardLayersInTiles) {
  const std::string tile = "recompute.ffn_tile=3";
  expect("cp=2", "llama", {kShared, kDropout, tile});
  expect("cp=1,tp=2", "gpt2", {kDropout, tile, "recompute.mode=full", "batch.micro_size=3"});
  expect("cp=2,pp=2", "llama", {kShared, tile, "pipeline.schedule=zb_h1"});
  expect("cp=2,dp_shard=2", "llama", {kShared, tile, "zero.stage=3", "zero.wrap=layers.*.*", "precision.compute=bf16"});
  // Ranks hold parts of the tiles, uneven ones, too, and none of a sequence shorter than they are.
  expect("cp=1,tp=2", "llama", {kShared, kBySequence, kDropout, tile});
  expect("cp=1,tp=3", "gpt2", {kBySequence, kDropout, "recompute.ffn_tile=6", "recompute.mode=full", "batch.micro_size=3"});
  expect("cp=2,tp=2", "llama", {kShared, kBySequence, "recompute.ffn_tile=4", "tensor.overlap=true", "zero.stage=1"});
  expect("cp=2,tp=2,pp=2", "llama", {kShared, kBySequence, "recompute.ffn_tile=2", "pipeline.schedule=zb_h1"});
  expect("cp=1,tp=2", "llama", {kShared, kBySequence, tile, "data.seq_len=1"});
  // Products that begin before their layers are called, in a unit that each tile lets go.
  expect("cp=1,tp=2,dp_shard=2", "gpt2", {tile, "tensor.overlap=true", "zero.stage=3", "zero.wrap=layers.1"});
}

INSTANTIATE_TEST_SUITE_P(Methods, ContextLayouts, ::testing::Values("ring", "ulysses"), [](const auto& info) { return std::string(info.param); });

using PlantedInContext = testing_support::VerifyFixture;

/// Adds to one number of a module's output.
struct NudgedColumns : nn::Interceptor {
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    const at::Tensor output = outputs[0].toTensor();
    at::Tensor nudge = at::zeros_like(output);
    nudge.view(-1)[3] = 1e-2 * output.detach().abs().max();
    outputs[0] = output + nudge;
    return outputs;
  }
};

TEST_F(PlantedInContext, AModuleThatIsOffOnOneRankIsNamed) {
  for (const char* module : {"layers.1.attention.core", "layers.0.feed_forward.w3", "norm"}) {
    VerifyOptions options;
    options.plant.attach = [module](Composition& run, int rank) {
      return rank == 1 ? nn::attach(*run.model, module, std::make_shared<NudgedColumns>()) : Attachment();
    };
    const auto report = run("cp=2", "llama", {"context.method=all_gather", "data.seq_len=13"}, options);
    EXPECT_FALSE(report.passed());
    ASSERT_TRUE(report.forward.first) << to_string(report);
    EXPECT_EQ(report.forward.first->module, module);
    EXPECT_EQ(report.forward.first->rank, 1);
    EXPECT_EQ(report.forward.unseen, 0);
  }
}

/// A mask that is drawn by the column here in place of its position in the sequence.
TEST_F(PlantedInContext, AMaskOfTheWrongPlaceIsNamed) {
  struct Displaced : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      nn::SampleContext here = nn::SampleScope::current();
      here.positions = at::arange(here.positions.size(0), here.positions.options());
      const nn::SampleScope scope(here);
      return next(std::move(inputs));
    }
  };
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int) { return nn::attach(*run.model, "layers.0.ffn_dropout", std::make_shared<Displaced>()); };
  const auto report = run("cp=2", "gpt2", {"context.method=all_gather", "model.dropout=0.2"}, options);
  ASSERT_TRUE(report.forward.first) << to_string(report);
  EXPECT_EQ(report.forward.first->module, "layers.0.ffn_dropout");
}

/// What a rank's columns add to a gradient is left out, or counted twice: losses do not show it.
TEST_F(PlantedInContext, ATermOfAGradientThatIsMissingIsFound) {
  for (const double factor : {0.0, 2.0}) {
    VerifyOptions options{.steps = 1};
    options.plant.attach = [factor](Composition& run, int rank) {
      Attachment attached;
      if (rank != 1) return attached;
      for (const auto& each : run.parameters) {
        const unsigned hook = each.tensor.register_hook([factor](const at::Tensor& gradient) { return gradient * factor; });
        attached.add(Attachment([tensor = each.tensor, hook] { tensor.remove_hook(hook); }));
      }
      return attached;
    };
    const auto report = run("cp=2", "llama", {"context.method=all_gather"}, options);
    EXPECT_FALSE(report.passed());
    EXPECT_FALSE(report.forward.first);
    EXPECT_TRUE(report.losses.within());
    for (const auto& each : report.gradients.each) EXPECT_GT(each.value, 1e-3) << each.name;
  }
}

}  // namespace
}  // namespace tessera
