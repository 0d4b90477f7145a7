// Every number of stages and chunks, with batches that no loader deals: micro-batches of unequal rows and lengths, whose tokens do not all count, and not as
// many on each data rank. Gradients are one device's.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>

#include "tessera/layout/slice.h"
#include "tessera/mesh/roles.h"
#include "tests/train/pipeline_fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;

constexpr int kMicroBatches = 8;
constexpr int64_t kIgnored = -100;

/// Number i of the global batch, for every data rank.
data::MicroBatch odd_micro_batch(int i) {
  const int64_t rows = 1 + i % 3, length = 16 - 3 * (i % 4);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(50 + i));
  data::MicroBatch micro{.tokens = at::randint(259, {rows, length}, generator, at::kLong), .labels = at::randint(259, {rows, length}, generator, at::kLong)};
  micro.labels.narrow(1, 0, i % 5).fill_(kIgnored);
  micro.rows = rows;
  micro.seq_len = length;
  micro.index = i;
  micro.first_sample = 3 * i;
  micro.valid_tokens = rows * (length - i % 5);
  return micro;
}

/// Of a data rank: a contiguous run, filled up with one that counts nothing where others have more.
data::StepBatch odd_batch(int micro_batches, int rank, int ranks) {
  data::StepBatch batch{.step = 1, .micro_batches = {}, .global_valid_tokens = 0};
  for (int i = 0; i < micro_batches; ++i) batch.global_valid_tokens += odd_micro_batch(i).valid_tokens;
  const auto [begin, size] = chunk(micro_batches, ranks, rank);
  for (int64_t i = begin; i < begin + size; ++i) batch.micro_batches.push_back(odd_micro_batch(static_cast<int>(i)));
  if (size < chunk(micro_batches, ranks, 0).second) {
    data::MicroBatch padding = odd_micro_batch(static_cast<int>(begin));
    padding.labels = at::full_like(padding.labels, kIgnored);
    padding.weight = 0;
    padding.index = -1;
    padding.valid_tokens = 0;
    batch.micro_batches.push_back(padding);
  }
  return batch;
}

class PipelineNumbers : public testing_support::PipelineFixture {
 protected:
  Trace odd_step(const Config& config, int world, int micro_batches) const {
    Trace trace;
    testing_support::SliceCollector gradients;
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(config, ranks.size());
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      Stepper stepper(config, mesh, at::kCPU, scope);
      const auto batch = odd_batch(micro_batches, mesh.rank(mesh_roles(config).batch), mesh.size(mesh_roles(config).batch));
      const auto outcome = stepper.step(batch, {.gradients_ready = [&] { gradients.add_gradients(stepper.run().updated); }});
      if (ranks.rank() == 0) trace.steps.push_back(outcome);
    });
    trace.gradients = gradients.whole();
    return trace;
  }

  void expect_one_device_of(const std::string& family, int world, Sets layout, Sets sets = {}, int micro_batches = kMicroBatches) const {
    sets.insert(sets.end(), {"batch.global_size=" + std::to_string(3 * micro_batches), "batch.micro_size=3"});
    layout.insert(layout.begin(), sets.begin(), sets.end());
    const std::string key = family + " " + std::to_string(micro_batches) + [&] {
      std::string text;
      for (const auto& set : sets) text += " " + set;
      return text;
    }();
    if (!one_.contains(key)) one_[key] = odd_step(piped(family, sets), 1, micro_batches);
    expect_alike(odd_step(piped(family, layout), world, micro_batches), one_.at(key), layout);
  }

  static Sets cut(int ranks, int chunks, const std::string& schedule) {
    return {"mesh.pp=" + std::to_string(ranks), "pipeline.virtual_stages=" + std::to_string(chunks), "pipeline.schedule=" + schedule};
  }

  mutable std::map<std::string, Trace> one_;  ///< on one device
};

TEST_F(PipelineNumbers, StagesAndChunksOfEveryNumber) {
  const std::map<int, std::vector<std::string>> schedules{{1, {"zb_h1"}}, {2, {"interleaved", "zb_v"}}, {4, {"interleaved", "breadth_first"}}};
  for (const int ranks : {2, 3, 4, 8}) {
    for (const auto& [chunks, names] : schedules) {
      const Sets deep{"model.layers=" + std::to_string(ranks * chunks <= 8 ? 6 : ranks * chunks <= 16 ? 14 : 30)};
      for (const auto& name : names) expect_one_device_of("mlp", ranks, cut(ranks, chunks, name), deep);
    }
  }
}

TEST_F(PipelineNumbers, BesideDataRanksThatHaveUnequalRuns) {
  for (const char* stage : {"zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    Sets layout = cut(2, 2, "zb_v");
    layout.insert(layout.end(), {stage, std::string(stage) == "zero.stage=0" ? "mesh.dp_replicate=2" : "mesh.dp_shard=2"});
    expect_one_device_of("llama", 4, layout, {"model.tie_embeddings=true"}, /*micro_batches=*/7);
  }
  Sets three = cut(2, 1, "zb_h1");
  three.insert(three.end(), {"mesh.dp_shard=3", "zero.stage=2"});
  expect_one_device_of("llama", 6, three, {"model.tie_embeddings=true"}, 7);
}

TEST_F(PipelineNumbers, BesideLayersThatAreCut) {
  Sets layout = cut(2, 2, "interleaved");
  layout.insert(layout.end(), {"mesh.tp=2"});
  expect_one_device_of("llama", 4, layout, {"model.tie_embeddings=true"});
  Sets all = cut(2, 1, "1f1b");
  all.insert(all.end(), {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3"});
  expect_one_device_of("llama", 8, all, {"model.tie_embeddings=true"}, 7);
}

}  // namespace
}  // namespace tessera
