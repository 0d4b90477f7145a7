// Schedules as values, and as an engine carries them out: one that lets forwards run ahead, and computes weights' gradients late, gives the bits of the plain
// one in every layout. What a pipeline's stage does, on a model that is whole.

#include "tessera/pipeline/schedules/schedule.h"

#include <ATen/ops/equal.h>

#include "tessera/core/error.h"
#include "tessera/nn/sharing.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/precision/gradient_dtype.h"
#include "tessera/precision/policy.h"
#include "tessera/train/engine.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using schedules::WeightGradients;
using testing_support::TrainFixture;

/// Rank 0's order of `schedule`, on a model that is whole.
schedules::Schedule alone(const schedules::Schedule& schedule, int rank = 0) {
  schedules::Schedule one{.name = schedule.name, .micro_batches = schedule.micro_batches, .rank_of = {0}, .actions = {schedule.actions.at(rank)}};
  for (schedules::Action& action : one.actions[0]) action.stage = 0;
  return one;
}

using Schedules = std::vector<std::pair<const char*, ScheduleMaker>>;

Schedules usual_schedules() {
  return {
      {"1F1B", [](int m) { return alone(schedules::one_f_one_b(4, m)); }},
      {"1F1B, weights behind", [](int m) { return alone(with_weight_gradients(schedules::one_f_one_b(3, m), WeightGradients::BehindBackward), 1); }},
      {"1F1B, weights at the end", [](int m) { return alone(with_weight_gradients(schedules::one_f_one_b(4, m), WeightGradients::AtTheEnd)); }},
      {"ZB-H1", [](int m) { return alone(schedules::zb_h1(4, m), 2); }},
      {"all forward, all backward", [](int m) { return alone(schedules::gpipe(1, m)); }},
  };
}

/// One micro-batch's backward is whole; of the others the gradients of weights come as `others` says.
schedules::Schedule with_one_whole(int m, WeightGradients others, int whole) {
  using schedules::Kind;
  schedules::Schedule schedule = alone(with_weight_gradients(schedules::one_f_one_b(2, m), others));
  auto& actions = schedule.actions[0];
  std::erase_if(actions, [&](const schedules::Action& action) { return action.kind == Kind::BackwardWeight && action.micro_batch == whole; });
  for (schedules::Action& action : actions) {
    if (action.kind == Kind::BackwardInput && action.micro_batch == whole) action.kind = Kind::Backward;
  }
  return schedule;
}

/// Whole backwards beside halves, the sums in the order of the micro-batches.
Schedules mixed_schedules() {
  return {
      {"the last whole", [](int m) { return with_one_whole(m, WeightGradients::BehindBackward, m - 1); }},
      {"the first whole", [](int m) { return with_one_whole(m, WeightGradients::AtTheEnd, 0); }},
  };
}

class Scheduled : public TrainFixture {
 protected:
  /// What a rank has after two steps whose optimizer is a plain one: losses, gradients and updated values, by name.
  using Seen = std::map<std::string, at::Tensor>;

  std::vector<Seen> run(const Config& config, int world, const ScheduleMaker& schedule) const {
    std::vector<Seen> seen(static_cast<size_t>(world));
    const auto text = corpus(config);
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(config, ranks.size());
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      Composition composed = compose(config, mesh, testing_support::test_device());
      const auto dtype = precision::policy_from(config.precision).gradient_dtype();
      if (dtype && config.zero.stage < 3) precision::take_gradients_in(*dtype, composed.parameters);
      Engine engine(config, composed, schedule);
      data::Loader loader(text, loader_options(config, mesh));
      Seen& mine = seen[static_cast<size_t>(ranks.rank())];
      for (int step = 0; step < 2; ++step) {
        mine["losses of step " + std::to_string(step)] = engine.forward_backward(loader.next());
        for (const auto& parameter : composed.updated) {
          const at::Tensor& gradient = parameter.tensor.grad();
          mine["gradient of " + parameter.name + " in step " + std::to_string(step)] = gradient.defined() ? gradient.clone() : at::Tensor();
        }
        nn::sum_terms(composed.layers, composed.updated, composed.cut);
        composed.optimizer->step(0.01);
        composed.synchronizer->after_update();
      }
    });
    return seen;
  }

  /// First name whose bits differ; empty where none do.
  static std::string difference(const std::vector<Seen>& a, const std::vector<Seen>& b) {
    for (size_t rank = 0; rank < a.size(); ++rank) {
      if (a[rank].size() != b[rank].size()) return "what there is";
      for (const auto& [name, tensor] : a[rank]) {
        const at::Tensor& other = b[rank].at(name);
        const bool same = tensor.defined() == other.defined() && (!tensor.defined() || at::equal(tensor, other));
        if (!same) return name + " on rank " + std::to_string(rank);
      }
    }
    return "";
  }

  void expect_one_result(int world, std::vector<std::string> sets, const std::string& family = "llama", const Schedules& schedules = usual_schedules()) const {
    sets.insert(sets.begin(), "batch.global_size=10");  // uneven over 3 and 4 ranks
    sets.insert(sets.end(), {"batch.micro_size=1", "zero.bucket_bytes=20000", "run.threads=1"});
    const Config config = TrainFixture::config(family, sets);
    const auto plain = run(config, world, {});
    for (const auto& [name, schedule] : schedules) {
      SCOPED_TRACE(std::to_string(world) + " ranks, " + ::testing::PrintToString(sets) + ", " + name);
      EXPECT_EQ(difference(run(config, world, schedule), plain), "");
    }
  }
};

TEST_F(Scheduled, DataParallelismGivesTheSameBits) {
  expect_one_result(1, {});
  expect_one_result(2, {"model.dropout=0.1"}, "gpt2");
  expect_one_result(3, {"model.tie_embeddings=true"});
}

TEST_F(Scheduled, TheFixedTreeGivesTheSameBits) { expect_one_result(3, {"run.deterministic=true"}); }

TEST_F(Scheduled, ZeroGivesTheSameBits) {
  expect_one_result(3, {"zero.stage=1"});
  expect_one_result(2, {"zero.stage=2"});
  expect_one_result(2, {"zero.stage=2", "zero.accumulate=whole"});
  expect_one_result(4, {"zero.stage=2", "mesh.dp_replicate=2", "model.tie_embeddings=true"});
}

TEST_F(Scheduled, FullShardingGivesTheSameBits) {
  expect_one_result(2, {"zero.stage=3"});
  expect_one_result(3, {"zero.stage=3", "zero.accumulate=whole", "model.dropout=0.1"}, "gpt2");
  expect_one_result(2, {"zero.stage=3", "zero.reshard_after_forward=false"});
  expect_one_result(4, {"zero.stage=3", "mesh.dp_replicate=2"});
}

TEST_F(Scheduled, WholeBackwardsBesideHalvesGiveTheSameBits) {
  const std::string small = "batch.global_size=6";
  expect_one_result(2, {"zero.stage=0", small}, "llama", mixed_schedules());
  expect_one_result(2, {"run.deterministic=true", small}, "llama", mixed_schedules());
  expect_one_result(2, {"zero.stage=2", small}, "llama", mixed_schedules());
  expect_one_result(2, {"zero.stage=3", "zero.accumulate=whole", small}, "llama", mixed_schedules());
  expect_one_result(2, {"zero.stage=3", small}, "llama", mixed_schedules());
}

/// The last backward is whole, and the gradients that others have left come behind it: another order of the sum.
TEST_F(Scheduled, GradientsMayComeBehindTheLastBackward) {
  const std::vector<std::vector<std::string>> layouts{{"zero.stage=3", "zero.accumulate=sharded"},
                                                      {"zero.stage=3", "zero.accumulate=whole"},
                                                      {"zero.stage=2", "zero.accumulate=sharded"},
                                                      {"zero.stage=2", "zero.accumulate=whole"},
                                                      {"zero.stage=0"},
                                                      {"run.deterministic=true"}};
  for (std::vector<std::string> sets : layouts) {
    SCOPED_TRACE(sets.front() + " " + sets.back());
    sets.insert(sets.end(), {"batch.micro_size=1", "batch.global_size=6", "run.threads=1", "optim.name=sgd"});
    const Config config = TrainFixture::config("llama", sets);
    const auto plain = run(config, 2, {}), late = run(config, 2, [](int m) { return with_one_whole(m, WeightGradients::AtTheEnd, m - 1); });
    for (const auto& [name, tensor] : plain[0]) {
      if (tensor.numel() == 0) continue;
      EXPECT_LE((late[0].at(name) - tensor).abs().max().item<double>(), testing_support::kGradients * tensor.abs().max().item<double>()) << name;
    }
  }
}

TEST_F(Scheduled, TensorParallelismGivesTheSameBits) {
  expect_one_result(2, {"mesh.tp=2"});
  expect_one_result(2, {"mesh.tp=2", "tensor.overlap=true", "tensor.sequence_parallel=true", "model.dropout=0.1"});
  expect_one_result(4, {"mesh.tp=2", "zero.stage=3", "model.dropout=0.1"});
  expect_one_result(4, {"mesh.tp=2", "zero.stage=2", "tensor.sequence_parallel=true"}, "gpt2");
}

TEST_F(Scheduled, RecomputationGivesTheSameBits) {
  expect_one_result(2, {"recompute.mode=full", "model.dropout=0.1"});
  expect_one_result(2, {"recompute.mode=full", "zero.stage=3"});
  expect_one_result(2, {"recompute.mode=selective", "zero.stage=2"});
  expect_one_result(2, {"recompute.mode=full", "mesh.tp=2"});
}

TEST_F(Scheduled, PrecisionsGiveTheSameBits) {
  expect_one_result(2, {"precision.compute=fp8"});
  expect_one_result(2, {"precision.compute=bf16", "zero.stage=1"});
  expect_one_result(2, {"precision.compute=bf16", "zero.stage=3"});
  expect_one_result(2, {"precision.compute=fp16", "model.dropout=0.1"});
  expect_one_result(2, {"precision.params=bf16", "precision.compute=bf16"});
}

}  // namespace
}  // namespace tessera
