// Schedules as values, and as an engine carries them out: one that lets forwards run ahead, and computes weights' gradients late, gives the bits of the plain
// one in every layout. What a pipeline's stage does, on a model that is whole.

#include "tessera/train/schedule.h"

#include <ATen/ops/equal.h>

#include "tessera/core/error.h"
#include "tessera/train/engine.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::TrainFixture;
using enum WeightGradientTime;

TEST(Schedule, OneFOneBIsAsThePapersDrawIt) {
  EXPECT_EQ(to_string(one_after_the_other(3)), "F0 B0 F1 B1 F2 B2");
  EXPECT_EQ(to_string(one_f_one_b(5, 0, 4)), "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
  EXPECT_EQ(to_string(one_f_one_b(5, 2, 4)), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
  EXPECT_EQ(to_string(one_f_one_b(3, 3, 4)), to_string(one_after_the_other(3)));
  EXPECT_EQ(to_string(one_f_one_b(2, 0, 4)), "F0 F1 B0 B1");  // fewer micro-batches than stages
  EXPECT_EQ(to_string(one_f_one_b(3, 0, 2, BehindBackward)), "F0 F1 B0 W0 F2 B1 W1 B2 W2");
  EXPECT_EQ(to_string(one_f_one_b(3, 0, 2, AtTheEnd)), "F0 F1 B0 F2 B1 B2 W0 W1 W2");
  EXPECT_EQ(to_string(all_forward_all_backward(3)), "F0 F1 F2 B0 B1 B2");
}

TEST(Schedule, HoldsWhatItSays) {
  for (const int stages : {1, 2, 3, 5, 8}) {
    for (int stage = 0; stage < stages; ++stage) {
      for (const size_t count : {0, 1, 2, 5, 13}) {
        for (const auto weights : {InBackward, BehindBackward, AtTheEnd}) {
          const Schedule schedule = one_f_one_b(count, stage, stages, weights);
          EXPECT_NO_THROW(check_schedule(schedule, count));
          EXPECT_EQ(most_alive(schedule), std::min<size_t>(count, static_cast<size_t>(stages - stage)));
        }
      }
    }
  }
  EXPECT_THROW(one_f_one_b(3, 2, 2), InternalError);
  EXPECT_THROW(check_schedule(one_f_one_b(3, 0, 2), 4), InternalError);
  EXPECT_THROW(check_schedule({{ActionKind::Backward, 0}, {ActionKind::Forward, 0}}, 1), InternalError);
  EXPECT_THROW(check_schedule({{ActionKind::Forward, 1}, {ActionKind::Forward, 0}}, 2), InternalError);
}

class Scheduled : public TrainFixture {
 protected:
  /// What a rank has after two steps whose optimizer is a plain one: losses, gradients and updated values, by name.
  using Seen = std::map<std::string, at::Tensor>;

  std::vector<Seen> run(const Config& config, int world, const Engine::MakeSchedule& schedule) const {
    std::vector<Seen> seen(static_cast<size_t>(world));
    const auto text = corpus(config);
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(config, ranks.size());
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      Composition composed = compose(config, mesh, at::kCPU);
      Engine engine(config, composed, schedule);
      data::Loader loader(text, loader_options(config, mesh));
      Seen& mine = seen[static_cast<size_t>(ranks.rank())];
      for (int step = 0; step < 2; ++step) {
        mine["losses of step " + std::to_string(step)] = engine.forward_backward(loader.next());
        for (const auto& parameter : composed.updated) {
          const at::Tensor& gradient = parameter.tensor.grad();
          mine["gradient of " + parameter.name + " in step " + std::to_string(step)] = gradient.defined() ? gradient.clone() : at::Tensor();
        }
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

  void expect_one_result(int world, std::vector<std::string> sets, const std::string& family = "llama") const {
    sets.insert(sets.end(), {"batch.micro_size=1", "zero.bucket_bytes=20000", "run.threads=1"});
    const Config config = TrainFixture::config(family, sets);
    const auto plain = run(config, world, one_after_the_other);
    const std::vector<std::pair<const char*, Engine::MakeSchedule>> schedules{
        {"1F1B", [](size_t m) { return one_f_one_b(m, 0, 4); }},
        {"1F1B, weights behind", [](size_t m) { return one_f_one_b(m, 1, 3, BehindBackward); }},
        {"1F1B, weights at the end", [](size_t m) { return one_f_one_b(m, 0, 4, AtTheEnd); }},
        {"all forward, all backward", all_forward_all_backward},
    };
    for (const auto& [name, schedule] : schedules) {
      SCOPED_TRACE(std::to_string(world) + " ranks" + (sets.empty() ? "" : ", " + sets.front()) + ", " + name);
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

TEST_F(Scheduled, TensorParallelismGivesTheSameBits) {
  expect_one_result(2, {"mesh.tp=2"});
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
  expect_one_result(2, {"precision.compute=bf16", "zero.stage=1"});
  expect_one_result(2, {"precision.compute=bf16", "zero.stage=3"});
  expect_one_result(2, {"precision.compute=fp16", "model.dropout=0.1"});
}

}  // namespace
}  // namespace tessera
