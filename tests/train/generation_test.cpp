// A model that was trained in any layout is read in any other: the same text is written, and the same loss found, whatever its layers are cut over.

#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tessera/core/error.h"
#include "tessera/models/generate.h"
#include "tessera/models/kv_cache.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/meta.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/load_model.h"
#include "tessera/train/trainer.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Sets = std::vector<std::string>;

const std::string kBySequence = "tensor.sequence_parallel=true";

class Reading : public testing_support::TrainFixture {
 protected:
  /// Trains on `ranks` ranks and leaves a checkpoint.
  void train_and_save(const std::string& family, int ranks, Sets sets) const {
    sets.insert(sets.end(), {"checkpoint.dir=" + checkpoints(), "run.steps=20", "run.threads=1", "batch.global_size=4", "batch.micro_size=1"});
    const Config settings = config(family, sets);
    comm::run_ranks(ranks, [&](comm::World& world) {
      validate(settings, world.size());
      Trainer(settings, world, open_inputs(settings)).run();
    });
  }
  std::string checkpoints() const { return (folder_ / "checkpoints").string(); }
  FoundModel found(const Sets& sets = {}) const { return find_model({.from_hf = {}, .checkpoint = checkpoints()}, sets); }

  struct Read {
    std::vector<int64_t> greedy, sampled;
    double loss = 0;
  };

  /// What `ranks` ranks together make of the checkpoint: 20 tokens after a prompt (more than max_seq_len, so that the context is cut), and the loss.
  Read read(int ranks, const Sets& sets) const {
    const FoundModel model = found(sets);
    const auto text = corpus(model.config);
    std::vector<Read> all(static_cast<size_t>(ranks));
    comm::run_ranks(ranks, [&](comm::World& world) {
      RankScope scope(model.config, world.local_size());
      const auto loaded = load_model(model, world.group());
      const auto write = [&](const SampleOptions& options) { return generate(*loaded.model, {'t', 'h', 'e'}, 20, options); };
      all[static_cast<size_t>(world.rank())] = {write({.temperature = 0}), write({.temperature = 1.5, .top_k = 40, .top_p = 0.99, .seed = 5}),
                                                evaluate(ForwardEngine(*loaded.model), text, model.config.data.seq_len, 7, comm::Group::self()).loss};
    });
    for (const Read& other : all) {
      EXPECT_EQ(other.greedy, all[0].greedy);
      EXPECT_EQ(other.sampled, all[0].sampled);
      EXPECT_EQ(other.loss, all[0].loss);
    }
    return all[0];
  }

  void expect_read_alike(const std::vector<std::pair<int, Sets>>& layouts) const {
    const Read one = read(1, {});
    EXPECT_NE(one.greedy, one.sampled);
    for (const auto& [ranks, sets] : layouts) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks " + (sets.empty() ? "" : sets.front()));
      const Read many = read(ranks, sets);
      EXPECT_EQ(many.greedy, one.greedy);
      EXPECT_EQ(many.sampled, one.sampled);
      EXPECT_NEAR(many.loss, one.loss, 5e-6 * one.loss);
    }
  }
};

TEST_F(Reading, LlamaThatWasCutTwoWays) {
  train_and_save("llama", 4, {"model.kv_heads=2", "mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", kBySequence});
  expect_read_alike({{3, {}}, {4, {}}, {2, {kBySequence, "tensor.overlap=true"}}});  // with 3 and 4 ranks some share their keys
}

TEST_F(Reading, Gpt2WithTiedEmbeddings) {
  train_and_save("gpt2", 3, {"model.tie_embeddings=true", "mesh.tp=3"});
  expect_read_alike({{2, {}}, {3, {kBySequence}}});
}

TEST_F(Reading, OnlyTheLastPositionsLogitsAreGathered) {
  constexpr int kRanks = 2;
  constexpr int64_t kVocabulary = 260, kRows = 3;
  const Config settings = config("llama", {"model.vocab_size=260"});
  comm::run_ranks(kRanks, [&](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::Group group({.name = "tp", .rank = world.rank(), .size = kRanks, .timeout = std::chrono::seconds(60)},
                            comm::make_record_engine(records, {.name = "tp", .rank = world.rank(), .size = kRanks}, world.group().engine()));
    auto model = on_meta([&] { return make_model(settings.model); });
    const auto tensor = parallelize_module(*model, group, parallel_plan(*model, /*sequence_parallel=*/false));
    materialize(*model, 1);
    KvCache cache(*model, kRows);
    for (const int64_t columns : {5, 1}) {
      const size_t before = records->records().size();
      EXPECT_EQ(cache.step(at::ones({kRows, columns}, at::kLong)).sizes(), (at::IntArrayRef{kRows, kVocabulary}));
      const auto& all = records->records();
      int64_t head = 0, layers = 0;
      for (size_t i = before; i < all.size(); ++i) (all[i].site.starts_with("head") ? head : layers) += all[i].sent_bytes / 4;
      EXPECT_EQ(head, kRows * kVocabulary * (kRanks - 1) / kRanks);
      // The embedding, and attention and feed-forward of every layer: an all-reduce of b s h each.
      EXPECT_EQ(layers, (1 + 2 * settings.model.layers) * 2 * (kRanks - 1) * kRows * columns * settings.model.dim / kRanks);
    }
  });
}

TEST_F(Reading, WhatReadingHasNoUseForIsRefused) {
  train_and_save("llama", 2, {"model.kv_heads=2", "mesh.dp_shard=2", "zero.stage=2"});
  const auto refusal = [&](const Sets& sets, int ranks) -> std::string {
    try {
      reading_layout(found(sets).config, ranks);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(refusal({}, 1), "(accepted)") << "the layout of the run that trained it is not the reader's";
  const auto layout = reading_layout(found({"mesh.tp=2"}).config, 6);
  EXPECT_EQ(layout.copies, 3);
  EXPECT_EQ(layout.tensor_ranks, 2);
  EXPECT_THAT(refusal({"zero.stage=3"}, 2), AllOf(HasSubstr("zero.stage = 3: shards what training keeps"), HasSubstr("leave it out")));
  EXPECT_THAT(refusal({"mesh.dp_shard=2"}, 2), HasSubstr("mesh.dp_shard = 2"));
  EXPECT_THAT(refusal({"mesh.pp=2"}, 2), HasSubstr("mesh.pp = 2: a model that is only read is not cut into stages"));
  EXPECT_THAT(refusal({kBySequence}, 2), HasSubstr("tensor.sequence_parallel = true: cuts the sequence between layers that mesh.tp cuts, and mesh.tp is 1"));
  EXPECT_THAT(refusal({"mesh.tp=5"}, 5), HasSubstr("heads"));
  EXPECT_THAT(refusal({"mesh.tp=2"}, 3), HasSubstr("mesh"));
}

}  // namespace
}  // namespace tessera
