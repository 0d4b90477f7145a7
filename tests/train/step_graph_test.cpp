// run.graph: steps that are captured once and replayed are those of the run without. Real graphs need a device; those of the simulated accelerator
// (docs/testing.md) do again what was asked for in the capture, on the same memory, with the numbers of then. On the CPU there is what is refused.

#include "tessera/train/step_graph.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/train/batch_feed.h"
#include "tests/train/fixture.h"

#ifdef TESSERA_SIM_DEVICE
#include "tests/support/sim_device/happens_before.h"
#endif

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class StepGraphs : public testing_support::TrainFixture {
 protected:
  Config graphed(const std::vector<std::string>& sets, const char* family = "llama") const {
    std::vector<std::string> all{"run.graph=true"};
    all.insert(all.end(), sets.begin(), sets.end());
    return config(family, all);
  }
};

TEST_F(StepGraphs, AreTheRunWithoutThem) {
  if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "a CPU has no graphs";
  struct Layout {
    int world;
    std::vector<std::string> sets;
  };
  for (const auto& [world, sets] : std::vector<Layout>{{1, {"precision.compute=bf16", "recompute.mode=full", "optim.warmup_steps=5"}},
                                                       {1, {"optim.max_grad_norm=0", "run.kernels=reference", "model.tie_embeddings=true"}},
                                                       {2, {"zero.stage=0"}},
                                                       {3, {"zero.stage=1"}},
                                                       {2, {"zero.stage=2"}},
                                                       {3, {"zero.stage=3"}},
                                                       {2, {"mesh.tp=2", "tensor.sequence_parallel=true"}},
                                                       {2, {"run.deterministic=true"}}}) {
    const std::string name = std::to_string(world) + " ranks" + (sets.empty() ? "" : ", " + sets.front());
    Config plain = config("llama", sets), captured = graphed(sets);
    plain.run.steps = captured.run.steps = StepGraph::kWarmUp + 2;
    const Trace want = train(plain, world), got = train(captured, world);
    for (size_t i = 0; i < want.steps.size(); ++i) {
      EXPECT_EQ(got.steps[i].loss, want.steps[i].loss) << name << ", step " << i + 1;
      EXPECT_EQ(got.steps[i].grad_norm, want.steps[i].grad_norm) << name << ", step " << i + 1;
    }
    for (const auto& [parameter, tensor] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(parameter), tensor)) << name << ": " << parameter;
    for (const auto& [parameter, tensor] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(parameter), tensor)) << name << ": " << parameter;
    // And the batch that stays: tokens and labels of each micro-batch of a rank, of 2 sequences of 16.
    const int data_ranks = captured.mesh.tp > 1 ? 1 : world;
    const int64_t batch = (7 + data_ranks - 1) / data_ranks * 2 * 16 * 16;
    for (int rank = 0; rank < world; ++rank) EXPECT_EQ(got.peak_of_rank[rank], want.peak_of_rank[rank] + batch) << name << ", rank " << rank;
  }
}

TEST_F(StepGraphs, ReadOnceAStepAndSayTheirPeak) {
#ifdef TESSERA_SIM_DEVICE
  if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "a CPU has no graphs";
  struct Seen {
    std::vector<double> losses;
    std::vector<int64_t> peaks, waits;
  };
  const auto steps_of = [this](const Config& config) {
    Seen seen;
    const auto text = corpus(config);
    comm::run_ranks(1, [&](comm::World& ranks) {
      Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, 1);
      const at::Device device = testing_support::test_device();
      Stepper stepper(config, mesh, device, scope);
      BatchFeed feed(data::Loader(text, loader_options(config, mesh)), device);
      for (int step = 1; step <= 8; ++step) {
        scope.memory().reset_peak();
        const auto batch = feed.next();
        sim::HappensBefore::get().take_host_syncs();
        pipeline::StepTimes times;  // a step that is timed runs as without a graph
        StepRequest request{.meanwhile = [&] { feed.prepare(); }};
        if (step == 6) request.times = &times;
        seen.losses.push_back(stepper.step(batch, request).loss);
        int64_t waits = 0;
        for (const auto& [name, count] : sim::HappensBefore::get().take_host_syncs()) waits += count;
        seen.waits.push_back(waits);
        seen.peaks.push_back(scope.memory().peak());
      }
    });
    return seen;
  };
  const Seen seen = steps_of(graphed({})), plain = steps_of(config("llama"));
  EXPECT_EQ(seen.losses, plain.losses);
  for (const size_t step : {1, 2, 4, 5, 6, 7}) EXPECT_EQ(seen.waits[step], 1) << "step " << step + 1;
  EXPECT_LE(seen.waits[3], 2) << "the capture waits once more, for all before it";
  for (const size_t step : {4, 6, 7}) EXPECT_EQ(seen.peaks[step], seen.peaks[2]) << "step " << step + 1;
#endif
}

TEST_F(StepGraphs, AreRefusedWhereAStepCannotBeCaptured) {
  const auto refusal = [&](const std::vector<std::string>& sets, int world = 2, const char* family = "llama") -> std::string {
    try {
      validate(graphed(sets, family), world);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({"comm.backend=nccl", "zero.stage=3", "mesh.tp=2"}), "");
  EXPECT_THAT(refusal({"model.dropout=0.1"}, 2, "gpt2"), AllOf(HasSubstr("run.graph = true with model.dropout = 0.1"), HasSubstr("set model.dropout = 0, or")));
  EXPECT_THAT(refusal({}, 2, "mixtral"), HasSubstr("run.graph = true with model.experts = 5"));
  EXPECT_THAT(refusal({"mesh.pp=2"}), HasSubstr("run.graph = true with mesh.pp = 2"));
  EXPECT_THAT(refusal({"mesh.cp=2"}), HasSubstr("run.graph = true with mesh.cp = 2"));
  EXPECT_THAT(refusal({"run.device=cpu"}), HasSubstr("run.graph = true with run.device = cpu"));
  EXPECT_THAT(refusal({"data.documents=lines"}), HasSubstr("run.graph = true with data.documents = lines"));
  EXPECT_THAT(refusal({"precision.compute=fp16", "precision.loss_scale=dynamic"}), HasSubstr("run.graph = true with precision.loss_scale = dynamic"));
  EXPECT_THAT(refusal({"comm.backend=shm"}), HasSubstr("run.graph = true with comm.backend = shm"));
  EXPECT_THAT(refusal({"comm.algorithm=all_reduce=ring"}), HasSubstr("run.graph = true with comm.algorithm"));
  EXPECT_THAT(refusal({"comm.check=true"}), HasSubstr("run.graph = true with comm.check = true"));
  EXPECT_THAT(refusal({"comm.compression=powersgd"}), HasSubstr("run.graph = true with comm.compression = powersgd"));
  EXPECT_THAT(refusal({"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"}), HasSubstr("run.graph = true with offload"));
  EXPECT_THAT(refusal({"offload.activations=host"}), HasSubstr("run.graph = true with offload"));
  EXPECT_THAT(refusal({"lora.modules=[\"layers.*.w1\"]"}), HasSubstr("run.graph = true with lora.modules"));
}

/// A job goes on without a lost peer, and a report explains what did not fit: neither is a refusal of run.graph.
TEST_F(StepGraphs, WhatFailsInACaptureStaysTheErrorThatItIs) {
  if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "a CPU has no graphs";
  comm::run_ranks(1, [&](comm::World&) {
    const at::Device device = testing_support::test_device();
    RankScope scope(graphed({}), 1);
    const c10::StreamGuard stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));  // a default one cannot be captured
    const auto captured = [&](const std::function<void()>& fail) {
      StepGraph graph(device, scope.memory());
      int steps = 0;
      const auto passes = [&](const data::StepBatch&) {
        if (steps++ == StepGraph::kWarmUp) fail();
        return StepGraph::Result{};
      };
      for (int step = 0; step < StepGraph::kWarmUp; ++step) graph.run({}, {}, passes);
      graph.run({}, {}, passes);
    };
    const auto error_of = [&]<class E>(const std::function<void()>& fail) -> std::string {
      try {
        captured(fail);
      } catch (const E& error) {
        return typeid(error) == typeid(E) ? error.what() : "of another kind";
      }
      return "none";
    };
    EXPECT_THAT(error_of.operator()<CommError>([] { throw CommError("rank 1 is lost"); }),
                AllOf(HasSubstr("rank 1 is lost; "), HasSubstr("set run.graph = false")));
    EXPECT_EQ(error_of.operator()<InternalError>([] { invariant(false, "odd"); }), "internal error: odd");
    EXPECT_THAT(error_of.operator()<c10::OutOfMemoryError>([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "no more"); }), HasSubstr("no more"));
    EXPECT_THAT(error_of.operator()<ConfigError>([] { TORCH_CHECK(false, "not while a stream captures"); }),
                HasSubstr("cannot be captured: not while a stream"));
    EXPECT_EQ(at::ones({1}).item<float>(), 1) << "the stream captures no more";
  });
}

TEST_F(StepGraphs, ACpuHasNone) {
  try {
    require_graphs(at::kCPU);
    ADD_FAILURE() << "took a CPU";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("run.graph = true"), HasSubstr("set run.graph = false")));
  }
}

}  // namespace
}  // namespace tessera
