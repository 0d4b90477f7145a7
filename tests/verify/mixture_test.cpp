// Mixtures of experts in layouts, and routers that choose otherwise than one device.

#include "tessera/nn/attach.h"
#include "tessera/nn/router.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;

class VerifyMixture : public VerifyFixture {};

TEST_F(VerifyMixture, EveryLayoutIsOneDevice) {
  for (const auto& [mesh, sets] : {std::pair{"dp_replicate=2", std::vector<std::string>{}},
                                   {"dp_replicate=3", {"recompute.mode=full"}},
                                   {"dp_shard=2", {"zero.stage=1"}},
                                   {"dp_shard=3", {"zero.stage=2", "model.router=sigmoid"}},
                                   {"dp_shard=2", {"zero.stage=3", "recompute.mode=full"}},
                                   {"dp_shard=7", {"zero.stage=3", "model.shared_ffn_dim=20", "model.shared_gate=true", "model.norm_topk=false"}},
                                   {"pp=2", {"moe.capacity_factor=1"}},
                                   {"pp=2,dp_shard=2", {"zero.stage=3", "recompute.mode=full"}},
                                   {"dp_replicate=2", {"run.deterministic=true"}}}) {
    expect_passes(mesh, "mixtral", sets);
  }
}

/// The recipe in five dimensions (tensor parallelism being one rank), and parts of it.
TEST_F(VerifyMixture, ExpertsOverRanksAndCutSequencesAreOneDevice) {
  for (const auto& [mesh, sets] : {std::pair{"dp_shard=2,ep=2", std::vector<std::string>{"zero.stage=1"}},
                                   {"dp_shard=4,ep=2", {"zero.stage=3", "recompute.mode=full"}},
                                   {"dp_replicate=2,dp_shard=2,ep=2", {"zero.stage=2", "precision.compute=bf16"}},
                                   {"cp=2", {"data.seq_len=15"}},
                                   {"cp=2,ep=2", {"zero.stage=1", "precision.params=bf16", "precision.compute=bf16"}},
                                   {"dp_shard=2,pp=2,cp=2,ep=2", {"zero.stage=3"}},
                                   {"dp_shard=2,pp=2,cp=2,ep=4", {"zero.stage=3", "recompute.mode=full", "context.method=ulysses"}}}) {
    auto all = sets;
    all.push_back("model.experts=4");
    expect_passes(mesh, "mixtral", all);
  }
}

/// Windows end in padding, which no router counts, whichever of its columns a rank has.
TEST_F(VerifyMixture, PaddedWindowsAreOneDevice) {
  for (const auto& [mesh, sets] : {std::pair{"dp_shard=2,ep=2", std::vector<std::string>{"zero.stage=1", "model.router=sigmoid"}},
                                   {"cp=2", {"recompute.mode=full"}},
                                   {"cp=2,ep=2", {"zero.stage=1", "precision.compute=bf16"}},
                                   {"tp=2", {"tensor.sequence_parallel=true", "model.shared_ffn_dim=20", "recompute.ffn_tile=7"}},
                                   {"pp=2", {"moe.capacity_factor=1"}},
                                   {"dp_replicate=2", {"model.router=expert_choice"}},
                                   {"dp_replicate=2,ep=2", {"run.deterministic=true"}},
                                   {"dp_shard=2,pp=2,cp=2,ep=2", {"zero.stage=3"}}}) {
    auto all = sets;
    all.insert(all.end(), {"model.experts=4", write_lines(), "data.documents=lines", "data.seq_len=29", "batch.global_size=6"});
    expect_passes(mesh, "mixtral", all);
  }
}

/// Gradients that are zero in exact arithmetic are zero: of the balance where every expert is every token's, of the weight of one expert that is normalized.
TEST_F(VerifyMixture, TermsThatAreConstantAreNoRounding) {
  for (const auto& sets : {std::vector<std::string>{"model.experts=4", "model.experts_per_token=4"},
                           {"model.experts=4", "model.experts_per_token=4", "model.router=sigmoid"},
                           {"model.experts=1", "model.experts_per_token=1", "model.router=sigmoid"}}) {
    auto all = sets;
    all.insert(all.end(), {"moe.z_loss=0", "moe.balance_loss=100", "data.seq_len=15"});
    expect_passes("cp=2", "mixtral", all);
  }
}

/// Layers cut over mesh.tp, and experts dealt over these and other ranks, whole and by their width.
TEST_F(VerifyMixture, CutLayersAreOneDevice) {
  const char* const by_sequence = "tensor.sequence_parallel=true";
  for (const auto& [mesh, sets] : {std::pair{"tp=2", std::vector<std::string>{"model.shared_ffn_dim=20", "model.shared_gate=true", "recompute.mode=full"}},
                                   {"tp=3", {by_sequence, "data.seq_len=15", "recompute.mode=selective"}},
                                   {"tp=2,ep=2,dp_shard=2", {"zero.stage=1", by_sequence, "model.shared_ffn_dim=20", "model.shared_gate=true"}},
                                   {"tp=2,expert_tp=2", {"precision.compute=bf16"}},
                                   {"tp=2", {"zero.stage=2", "precision.reduce=bf16"}},
                                   {"tp=2,ep=2,expert_tp=2,dp_shard=2", {"zero.stage=3", "recompute.mode=full", "model.router=sigmoid"}},
                                   {"dp_shard=2,expert_tp=2", {"zero.stage=2", "precision.params=bf16", "precision.compute=bf16"}},
                                   {"tp=2,cp=2,ep=4", {"zero.stage=2", by_sequence, "data.seq_len=15"}},
                                   {"tp=2,pp=2,dp_shard=2,ep=2", {"zero.stage=3", by_sequence, "precision.compute=bf16"}}}) {
    auto all = sets;
    all.push_back("model.experts=4");
    expect_passes(mesh, "mixtral", all);
  }
}

/// A rank without a column of its own begins to compute again when the others do, or their collectives would not meet.
TEST_F(VerifyMixture, RanksWithoutTokensComputeAgainWithTheOthers) {
  for (const char* kernels : {"run.kernels=reference", "run.kernels=auto"}) {
    const std::vector<std::string> sets{"data.seq_len=1",  "model.layers=1",     "batch.global_size=2", "batch.micro_size=1",
                                        "model.experts=4", "run.threads=1",      "comm.timeout_s=20",   "tensor.sequence_parallel=true",
                                        kernels,           "recompute.mode=full"};
    const auto report = run("tp=2,ep=2", "mixtral", sets);
    EXPECT_TRUE(report.passed()) << to_string(report);
  }
}

/// Rows that have come to a rank go through its experts in tiles, and tokens through the shared one.
TEST_F(VerifyMixture, ExpertsInTilesAreOneDevice) {
  for (const auto& [mesh, sets] : {std::pair{"dp_replicate=2", std::vector<std::string>{"moe.capacity_factor=1"}},
                                   {"dp_shard=4,ep=2", {"zero.stage=3", "recompute.mode=full"}},
                                   {"cp=2,ep=2", {"zero.stage=1", "data.seq_len=15", "precision.compute=bf16"}},
                                   {"tp=2,ep=2", {"tensor.sequence_parallel=true", "data.seq_len=15"}},
                                   {"pp=2,dp_shard=2,ep=2", {"zero.stage=2", "pipeline.schedule=zb_h1"}}}) {
    auto all = sets;
    all.insert(all.end(), {"model.experts=4", "model.shared_ffn_dim=20", "recompute.ffn_tile=7"});
    expect_passes(mesh, "mixtral", all);
  }
}

/// Bits: experts lie on data ranks, which have all else alike.
TEST_F(VerifyMixture, ExpertsInAFixedOrderHaveTheBitsOfOneDevice) {
  for (const auto& [mesh, sets] :
       {std::pair{"dp_replicate=2,ep=2", std::vector<std::string>{}}, {"dp_replicate=4,ep=2", {"recompute.mode=full", "model.shared_ffn_dim=20"}}}) {
    auto all = sets;
    all.insert(all.end(), {"model.experts=4", "run.deterministic=true"});
    expect_passes(mesh, "mixtral", all);
  }
}

TEST_F(VerifyMixture, EveryLayoutIsOneDeviceInBf16) {
  for (const auto& [mesh, sets] : {std::pair{"dp_replicate=2", std::vector<std::string>{}}, {"dp_shard=2", {"zero.stage=3"}}, {"pp=2", {}}}) {
    auto all = sets;
    all.push_back("precision.compute=bf16");
    expect_passes(mesh, "mixtral", all);
  }
}

/// Experts' products, too, each by scales of its own.
TEST_F(VerifyMixture, EveryLayoutIsOneDeviceInFp8) {
  for (const auto& [mesh, sets] : {std::pair{"dp_replicate=2", std::vector<std::string>{"precision.fp8_scales=row"}},
                                   {"dp_shard=2,ep=2", {"zero.stage=1"}},
                                   {"tp=2,expert_tp=2", {"recompute.mode=full"}},
                                   {"pp=2", {"pipeline.schedule=zb_h1"}}}) {
    auto all = sets;
    all.insert(all.end(), {"precision.compute=fp8", "model.experts=4"});
    expect_passes(mesh, "mixtral", all);
  }
}

/// Rounding explains no router that chooses at random, however coarse it is.
TEST_F(VerifyMixture, ARouterThatChoosesOtherwiseIsFoundInEveryFormat) {
  struct Next : nn::Interceptor {  // the expert after each that was chosen
    nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
      nn::Values outputs = next(std::move(inputs));
      return {(outputs[0].toTensor() + 1).remainder(5)};
    }
  };
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int) { return nn::attach(*run.model, "layers.1.feed_forward.router.choice", std::make_shared<Next>()); };
  for (const char* format : {"precision.compute=fp32", "precision.compute=bf16", "precision.compute=fp8"}) {
    for (const char* router : {"model.router=softmax", "model.router=sigmoid"}) {
      SCOPED_TRACE(std::string(format) + " " + router);
      const auto report = run("dp_replicate=2", "mixtral", {format, router, "run.threads=1"}, options);
      EXPECT_FALSE(report.routing.within()) << to_string(report);
      EXPECT_EQ(report.routing.worst().first, "layers.1.feed_forward.router.choice");
      EXPECT_GT(report.routing.worst().second, 2 * report.routing.share_bound) << to_string(report);
    }
  }
}

TEST_F(VerifyMixture, TheDeviceFollowsTheLayoutsRoutingAndMeasuresIt) {
  struct Turned : nn::Interceptor {  // the two experts after those that were chosen
    nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
      nn::Values outputs = next(std::move(inputs));
      return {(outputs[0].toTensor() + 2).remainder(5)};
    }
  };
  VerifyOptions options;
  options.plant.attach = [](Composition& run, int) { return nn::attach(*run.model, "layers.1.feed_forward.router.choice", std::make_shared<Turned>()); };
  // Ranks of mesh.tp hold the same columns, those of mesh.cp some, and packed documents say where all of them stand.
  for (const auto& [mesh, sets] : {std::pair{"dp_replicate=2", std::vector<std::string>{}},
                                   {"tp=2", {write_lines(), "data.documents=lines", "data.seq_len=29"}},
                                   {"cp=2", {}},
                                   {"cp=2,tp=2", {"zero.stage=1"}}}) {
    SCOPED_TRACE(mesh);
    const auto report = run(mesh, "mixtral", sets, options);
    EXPECT_FALSE(report.passed());
    EXPECT_FALSE(report.routing.within());
    EXPECT_GT(report.routing.margin, 1e-4);
    EXPECT_GT(report.routing.tokens, 0);
    EXPECT_EQ(report.routing.flipped * 2, report.routing.tokens) << "one layer of two";
    const Config settings = config("mixtral", sets);
    data::Loader loader(corpus(settings),
                        {.seq_len = settings.data.seq_len, .global_size = settings.batch.global_size, .micro_size = settings.batch.micro_size});
    int64_t tokens = 0;
    for (int64_t step = 0; step < options.steps; ++step) tokens += loader.next().global_valid_tokens;
    EXPECT_EQ(report.routing.tokens, 2 * tokens) << "nothing of padding";
    EXPECT_TRUE(report.gradients.within()) << "by the layout's choice both compute the same";
    EXPECT_NE(to_string(report).find("choose other experts"), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera
