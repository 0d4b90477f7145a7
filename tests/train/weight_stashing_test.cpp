// PipeDream, its vertical sync and PipeDream-2BW against lists of weight versions on one thread, bit for bit; what they hold; what they refuse.

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tessera/train/pipeline_layout.h"
#include "tests/comm/order_alone.h"
#include "tests/refusal.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;
using testing_support::Sets;
using testing_support::TrainFixture;

/// What the paper says of a micro-batch in the order of a data rank: which version it computes with on a stage, and which update its gradient is part of.
struct StaleRule {
  std::string name;
  Sets sets;
  std::function<int(int p, int m, int stage, int micro_batch)> version;
  std::function<int(int p, int m, int micro_batch)> update;
};

std::vector<StaleRule> stale_rules() {
  const auto each = [](int, int, int b) { return b; };
  const auto group = [](int p, int m) { return std::min(p, m); };
  return {
      {"pipedream", {"pipeline.schedule=pipedream"}, [](int p, int, int s, int b) { return std::max(0, b - (p - 1 - s)); }, each},
      {"vertical sync", {"pipeline.schedule=pipedream", "pipeline.vertical_sync=true"}, [](int p, int, int, int b) { return std::max(0, b - (p - 1)); }, each},
      {"2BW",
       {"pipeline.schedule=pipedream_2bw"},
       [group](int p, int m, int, int b) { return std::max(0, b / group(p, m) - 1); },
       [group](int p, int m, int b) { return b / group(p, m); }}};
}

class Asynchronous : public TrainFixture {
 protected:
  Config piped(const std::string& family, Sets sets) const {
    sets.insert(sets.begin(),
                {"run.threads=1", "batch.micro_size=1", "batch.global_size=7", "model.layers=3", "run.steps=3", "optim.max_grad_norm=0", "optim.lr=3e-3"});
    return config(family, sets);
  }

  /// The whole model on one thread, its links dealt to stages as `layout` says: each stage's parameters in a list of versions, from which every micro-batch is
  /// computed by itself, those of all data ranks that an update sums one after the other.
  Trace by_lists(const Config& config, const StaleRule& rule, int p, int data_ranks) const {
    Trace trace;
    RankScope scope(config, 1);
    const PipelineLayout layout = pipeline_layout(config, p);
    ModelConfig apart = config.model;
    apart.tie_embeddings = false;  // two tensors, so that the terms of the two ends are seen
    const auto model = on_meta([&] { return make_model(apart); });
    const precision::Policy policy = precision::policy_from(config.precision);
    const auto seed = static_cast<uint64_t>(config.run.seed);
    precision::apply(*model, policy);
    materialize(*model, seed, at::kCPU);
    if (config.model.tie_embeddings) {
      const at::NoGradGuard no_grad;
      model->head()->weight.copy_(model->named_parameters()["embed_tokens.weight"]);
    }
    std::vector<ModelPart> parts;
    std::vector<std::vector<std::vector<at::Tensor>>> versions;  // of each stage, of its parameters
    std::vector<std::vector<nn::NamedParameter>> newest;
    std::vector<std::vector<at::Tensor>> used;  // what a stage's part computes with
    std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
    for (int s = 0; s < p; ++s) {
      parts.emplace_back(model, layout.links[static_cast<size_t>(s)]);
      newest.emplace_back();
      used.emplace_back();
      for (const auto& [name, tensor, aliases] : nn::unique_parameters(*parts.back())) {
        used[s].push_back(tensor);
        newest[s].push_back({name, tensor.detach().clone().requires_grad_(), {}});
        nn::set_slice(newest[s].back().tensor, nn::slice_of(tensor));
      }
      optimizers.push_back(precision::make_optimizer(config.optim, policy, seed, newest[s]));
    }
    std::vector<data::Loader> loaders;
    for (int rank = 0; rank < data_ranks; ++rank) {
      loaders.emplace_back(corpus(config), data::LoaderOptions{.seq_len = config.data.seq_len,
                                                               .global_size = config.batch.global_size,
                                                               .micro_size = config.batch.micro_size,
                                                               .shuffle = config.data.shuffle,
                                                               .seed = static_cast<uint64_t>(*config.data.seed),
                                                               .rank = rank,
                                                               .ranks = data_ranks});
    }
    const optim::LearningRate rate(config.optim, config.run.steps);
    const auto keep = [&] {
      const at::NoGradGuard no_grad;
      for (int s = 0; s < p; ++s) {
        auto& version = versions[s].emplace_back();
        for (const auto& parameter : newest[s]) version.push_back(parameter.tensor.detach().clone());
      }
    };
    for (int64_t step = 1; step <= config.run.steps; ++step) {
      versions.assign(static_cast<size_t>(p), {});
      keep();
      std::vector<data::StepBatch> batches;
      for (auto& loader : loaders) batches.push_back(loader.next());
      const int m = static_cast<int>(batches[0].micro_batches.size());
      double sum = 0, squares = 0;
      int updates = 0;
      for (int first = 0, next = 0; first < m; first = next) {
        int64_t tokens = 0;
        for (next = first; next < m && rule.update(p, m, next) == rule.update(p, m, first); ++next) {
          for (const auto& batch : batches) tokens += batch.micro_batches[static_cast<size_t>(next)].valid_tokens;
        }
        for (int s = 0; s < p; ++s) {
          for (const at::Tensor& parameter : used[s]) parameter.mutable_grad() = at::Tensor();
        }
        for (const auto& batch : batches) {
          for (int b = first; b < next; ++b) {
            const data::MicroBatch& micro = batch.micro_batches[static_cast<size_t>(b)];
            if (micro.valid_tokens == 0) continue;
            for (int s = 0; s < p; ++s) {
              const at::NoGradGuard no_grad;
              const auto& version = versions[s].at(static_cast<size_t>(rule.version(p, m, s, b)));
              for (size_t i = 0; i < version.size(); ++i) at::Tensor(used[s][i]).copy_(version[i]);
            }
            sum += one(config, parts, micro, step, 1.0 / static_cast<double>(tokens));
          }
        }
        if (config.model.tie_embeddings) sum_both_ends(newest, used);
        for (int s = 0; s < p; ++s) {
          for (size_t i = 0; i < newest[s].size(); ++i) {
            newest[s][i].tensor.mutable_grad() = used[s][i].grad();
            const bool counted = !config.model.tie_embeddings || newest[s][i].name != "head.weight";
            if (counted) squares += used[s][i].grad().to(at::kDouble).square().sum().item<double>();
          }
          optimizers[s]->step(rate.at(step));
        }
        keep();
        ++updates;
      }
      trace.steps.push_back({.loss = sum / static_cast<double>(batches[0].global_valid_tokens), .grad_norm = std::sqrt(squares / updates)});
    }
    for (const auto& stage : newest) {
      for (const auto& parameter : stage) trace.weights[parameter.name] = parameter.tensor.detach();
    }
    if (config.model.tie_embeddings) {
      EXPECT_TRUE(at::equal(trace.weights.at("head.weight"), trace.weights.at("embed_tokens.weight")));
      trace.weights.erase("head.weight");
    }
    return trace;
  }

  /// Of an update: the head's term, then the embedding's, each summed over its micro-batches before; both ends get the sum.
  static void sum_both_ends(const std::vector<std::vector<nn::NamedParameter>>& names, std::vector<std::vector<at::Tensor>>& used) {
    std::vector<at::Tensor*> ends;
    for (size_t s = names.size(); s-- > 0;) {
      for (size_t i = 0; i < names[s].size(); ++i) {
        if (names[s][i].name == "head.weight" || names[s][i].name == "embed_tokens.weight") ends.push_back(&used[s][i]);
      }
    }
    ASSERT_EQ(ends.size(), 2);
    const at::Tensor sum = ends[0]->grad() + ends[1]->grad();
    for (at::Tensor* const end : ends) end->mutable_grad() = sum.clone();
  }

  static double one(const Config& config, std::vector<ModelPart>& parts, const data::MicroBatch& micro, int64_t step, double scale) {
    const nn::SampleScope sample(
        {.seed = static_cast<uint64_t>(config.run.seed), .step = step, .first_sample = micro.first_sample, .expected_gradient = scale});
    std::vector<at::Tensor> ins{micro.tokens}, outs;
    for (auto& part : parts) {
      const auto labels = part->gives_loss() ? std::optional(micro.labels) : std::nullopt;
      outs.push_back(part(ins.back(), labels, micro.tokens.size(1)));
      ins.push_back(outs.back().detach().requires_grad_());
    }
    outs.back().mul(scale).backward();
    for (size_t s = parts.size() - 1; s-- > 0;) outs[s].backward(ins[s + 1].grad());
    return outs.back().item<double>();
  }

  void expect_lists(const std::string& family, int p, const Sets& sets = {}) const {
    for (const StaleRule& rule : stale_rules()) {
      const bool tied = std::ranges::find(sets, "model.tie_embeddings=true") != sets.end();
      if (tied && rule.name == "pipedream") continue;  // refused
      Sets all{"mesh.pp=" + std::to_string(p)};
      all.insert(all.end(), rule.sets.begin(), rule.sets.end());
      all.insert(all.end(), sets.begin(), sets.end());
      const Config config = piped(family, all);
      SCOPED_TRACE(testing::Message() << rule.name << ", " << p << " stages, " << family);
      const Trace got = train(config, p), want = by_lists(config, rule, p, 1);
      EXPECT_EQ(got.weights.size(), want.weights.size());
      for (const auto& [name, value] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), value)) << name;
      for (size_t step = 0; step < want.steps.size(); ++step) {
        EXPECT_EQ(got.steps[step].loss, want.steps[step].loss);
        EXPECT_NEAR(got.steps[step].grad_norm, want.steps[step].grad_norm, 1e-9 * want.steps[step].grad_norm);
      }
    }
  }
};

TEST_F(Asynchronous, EqualsListsOfVersionsBitForBit) {
  for (const int p : {2, 3, 4}) expect_lists("llama", p);
}

TEST_F(Asynchronous, UnevenStagesDropoutAndRecomputation) {
  expect_lists("gpt2", 3, {"pipeline.split=[\"3\", \"1\", \"1\"]", "model.dropout=0.1"});
  expect_lists("llama", 3, {"recompute.mode=full", "model.dropout=0.1"});
  expect_lists("mlp", 2, {"batch.global_size=1"});  // fewer micro-batches than stages
}

/// The two ends' terms are summed once for each version, wherever they are computed with it.
TEST_F(Asynchronous, TiedEmbeddingsAreOneParameterInEveryVersion) {
  const Sets tied{"model.tie_embeddings=true"};
  for (const int p : {2, 3, 4}) expect_lists("llama", p, tied);
  expect_lists("gpt2", 3, {tied[0], "pipeline.split=[\"3\", \"1\", \"1\"]", "model.dropout=0.1", "recompute.mode=full"});
  expect_lists("llama", 3, {tied[0], "batch.global_size=2"});  // fewer micro-batches than stages
  expect_lists("llama", 2, {tied[0], "precision.compute=bf16", "optim.name=sgd", "optim.momentum=0.5"});
}

/// So nobody waits for the first stage's term, and the last one holds one version.
TEST_F(Asynchronous, TiedEmbeddingsUpdateTheLastStageLate) {
  const auto made = [&](const Sets& sets) {
    Sets all{"mesh.pp=3", "pipeline.schedule=pipedream"};
    all.insert(all.end(), sets.begin(), sets.end());
    return schedule_maker(piped("llama", all), 3)(7);
  };
  const std::string tied = "model.tie_embeddings=true", sync = "pipeline.vertical_sync=true";
  EXPECT_EQ(made({tied, sync}), schedules::with_late_updates(schedules::pipedream(3, 7, true), 2));
  EXPECT_EQ(made({sync}), schedules::pipedream(3, 7, true));
  EXPECT_EQ(made({tied, "pipeline.schedule=pipedream_2bw"}), schedules::with_late_updates(schedules::pipedream_2bw(3, 7), 2));
}

/// On an engine that matches messages by their order alone: those of a sum that goes on for several micro-batches have groups of their own.
TEST_F(Asynchronous, TiedEmbeddingsWhereMessagesMeetByTheirOrderAlone) {
  decorators_ = {testing_support::order_alone()};
  for (const int p : {2, 3}) expect_lists("llama", p, {"model.tie_embeddings=true"});
}

TEST_F(Asynchronous, SixteenBitProducts) { expect_lists("llama", 2, {"precision.compute=bf16", "optim.name=sgd", "optim.momentum=0.5"}); }

/// What a paged optimizer updates stands for the parameters, which have a memory and a counter of writes for each version.
TEST_F(Asynchronous, StateThatComesToItsParametersUpdatesTheNewestVersion) {
  const std::vector<Sets> optimizers{
      {"optim.name=lion"}, {"optim.name=adafactor"}, {"optim.name=adam8bit"}, {"precision.params=bf16"}, {"precision.params=bf16", "optim.name=lion"},
      {"optim.name=adamw"}};
  for (const StaleRule& rule : stale_rules()) {
    for (const Sets& optimizer : optimizers) {
      SCOPED_TRACE(rule.name + ", " + optimizer.front());
      Sets sets{"mesh.pp=2"};
      for (const Sets& more : {rule.sets, optimizer}) sets.insert(sets.end(), more.begin(), more.end());
      const Trace want = train(piped("llama", sets), 2);
      sets.insert(sets.end(), {"offload.optimizer=host", "offload.update=device"});
      const Trace got = train(piped("llama", sets), 2);
      for (const auto& [name, value] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), value)) << name;
    }
  }
}

TEST_F(Asynchronous, LargerGroupsOfPipeDream2BW) {
  StaleRule rule = stale_rules()[2];
  rule.version = [](int, int, int, int b) { return std::max(0, b / 4 - 1); };
  rule.update = [](int, int, int b) { return b / 4; };
  const Config config = piped("llama", {"mesh.pp=2", "pipeline.schedule=pipedream_2bw", "pipeline.per_update=4", "batch.global_size=11"});
  const Trace got = train(config, 2), want = by_lists(config, rule, 2, 1);
  for (const auto& [name, value] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), value)) << name;
}

/// Data ranks sum in another order, and layers that are cut round otherwise; SGD makes of that what it is.
TEST_F(Asynchronous, DataRanksAndCutLayersWithinBounds) {
  for (const StaleRule& rule : stale_rules()) {
    const std::string tied = rule.name == "pipedream" ? "model.tie_embeddings=false" : "model.tie_embeddings=true";
    for (const auto& [world, sets] : std::vector<std::pair<int, Sets>>{
             {4, {"mesh.dp_replicate=2"}}, {4, {"mesh.tp=2", "tensor.sequence_parallel=true"}}, {4, {"mesh.dp_replicate=2", tied}}, {4, {"mesh.tp=2", tied}}}) {
      Sets all{"mesh.pp=2", "optim.name=sgd", "optim.lr=0.05", "optim.momentum=0.5"};
      all.insert(all.end(), rule.sets.begin(), rule.sets.end());
      all.insert(all.end(), sets.begin(), sets.end());
      const Config config = piped("llama", all);
      SCOPED_TRACE(rule.name + ", " + sets.front());
      const Trace got = train(config, world), want = by_lists(config, rule, 2, sets.front() == "mesh.tp=2" ? 1 : 2);
      EXPECT_LT(difference(got.weights, want.weights), kGradients);
      for (size_t step = 0; step < want.steps.size(); ++step) EXPECT_NEAR(got.steps[step].loss, want.steps[step].loss, kLosses * want.steps[step].loss);
    }
  }
}

/// A flush after one micro-batch leaves nothing that is stale: the step of one device, with the norm of one.
TEST_F(Asynchronous, AStepOfOneMicroBatchIsSynchronous) {
  const Trace stale = train(piped("llama", {"mesh.pp=2", "pipeline.schedule=pipedream", "batch.global_size=1"}), 2);
  const Trace plain = train(piped("llama", {"mesh.pp=2", "batch.global_size=1"}), 2);
  for (const auto& [name, value] : plain.weights) EXPECT_TRUE(at::equal(stale.weights.at(name), value)) << name;
  for (size_t step = 0; step < plain.steps.size(); ++step) EXPECT_NEAR(stale.steps[step].grad_norm, plain.steps[step].grad_norm, 1e-12);
}

/// By the tracker, on rank 0 of 4 when most is alive: the versions of the formulas beside the activations of 1F1B, which has 4 micro-batches alive. Where each
/// backward is followed by an update, most is alive when that has made the newest version: the backward has freed the fourth micro-batch.
TEST_F(Asynchronous, ARunHoldsTheVersionsAndActivationsOfTheFormulas) {
  constexpr int64_t kBoundary = 16 * 24 * 4;  // what crosses, in bytes: received ahead, or not sent yet
  const auto at_peak = [&](Sets sets, const char* micro_batches = "12") {
    sets.insert(sets.end(), {"mesh.pp=4", "model.layers=6", std::string("batch.global_size=") + micro_batches});
    const MemoryByCategory peak = train(piped("llama", sets), 4).peak;
    return std::pair(peak[static_cast<size_t>(MemoryCategory::Parameters)], peak[static_cast<size_t>(MemoryCategory::Activations)]);
  };
  const auto [weights, activations] = at_peak({});
  const int64_t one = at_peak({"pipeline.schedule=gpipe"}, "9").second - at_peak({"pipeline.schedule=gpipe"}, "8").second;  // of a micro-batch
  EXPECT_GT(one, 10 * kBoundary);
  EXPECT_GT(activations, 4 * one);
  for (const StaleRule& rule : stale_rules()) {
    const auto [versions, alive] = at_peak(rule.sets);
    EXPECT_EQ(versions, (rule.name == "2BW" ? 2 : 4) * weights) << rule.name;
    EXPECT_NEAR(alive, rule.name == "2BW" ? activations : 3 * one, kBoundary) << rule.name;
  }
}

class AsynchronousResume : public testing_support::ResumeFixture {};

TEST_F(AsynchronousResume, GoesOnBitForBit) {
  const testing_support::Layout layout{
      "pipedream", 2, {"mesh.pp=2", "pipeline.schedule=pipedream", "model.tie_embeddings=false", "optim.max_grad_norm=0", "optim.lr=3e-3"}};
  expect_goes_on(layout, layout, {}, 0, run_saving(layout, {}));
  const testing_support::Layout tied{
      "pipedream tied",
      2,
      {"mesh.pp=2", "pipeline.schedule=pipedream", "pipeline.vertical_sync=true", "model.tie_embeddings=true", "optim.max_grad_norm=0", "optim.lr=3e-3"}};
  expect_goes_on(tied, tied, {}, 0, run_saving(tied, {}));
}

TEST_F(Asynchronous, WhatCannotBeRightIsRefusedByName) {
  const auto refusal = [&](const Sets& more) {
    Sets all{"mesh.pp=2", "pipeline.schedule=pipedream"};
    all.insert(all.end(), more.begin(), more.end());
    return testing_support::refusal([&] { validate(piped("llama", all), 2); });
  };
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  const std::vector<std::pair<Sets, std::string>> refused{{{"zero.stage=1"}, "zero.stage = 0"},
                                                          {{"optim.max_grad_norm=1"}, "optim.max_grad_norm = 0"},
                                                          {{"precision.loss_scale=dynamic", "precision.compute=fp16"}, "precision.loss_scale = none"},
                                                          {{"run.deterministic=true"}, "run.deterministic = false"},
                                                          {{"model.tie_embeddings=true"}, "model.tie_embeddings = false"}};
  for (const auto& [sets, way_out] : refused) {
    EXPECT_THAT(refusal(sets), AllOf(HasSubstr("pipeline.schedule = pipedream"), HasSubstr("set " + way_out), HasSubstr("pipeline.schedule = 1f1b")));
  }
  EXPECT_THAT(refusal({"model.tie_embeddings=true"}), HasSubstr("set pipeline.vertical_sync = true, pipeline.schedule = pipedream_2bw"));
  for (const char* schedule : {"pipeline.vertical_sync=true", "pipeline.schedule=pipedream_2bw"}) {
    EXPECT_NO_THROW(validate(piped("llama", {"mesh.pp=2", "pipeline.schedule=pipedream", "model.tie_embeddings=true", schedule}), 2)) << schedule;
  }
  const Config groups = piped("llama", {"mesh.pp=4", "pipeline.schedule=pipedream_2bw", "pipeline.per_update=3"});
  EXPECT_THAT(testing_support::refusal([&] { check_pipeline(groups, mesh_shape(groups.mesh, 0, 4)); }),
              AllOf(HasSubstr("pipeline.per_update = 3"), HasSubstr("set pipeline.per_update = 4")));
  EXPECT_NO_THROW(validate(piped("llama", {"pipeline.schedule=pipedream", "optim.max_grad_norm=1"}), 1));
}

}  // namespace
}  // namespace tessera
