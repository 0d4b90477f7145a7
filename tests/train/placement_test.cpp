// Activations, or the optimizer's state alone, away from the device: what a run computes stays the same to the bit, in every setting it meets.

#include "tessera/memory/history.h"
#include "tests/file_limit.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class PlacedTraining : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  /// Of a run with `placed` and one without. `category`: what is on the host with it.
  void expect_same_bits(MemoryCategory category, const Sets& placed, const std::string& family, Sets sets, int world) const {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets) + ::testing::PrintToString(placed) + " on " + std::to_string(world));
    sets.insert(sets.begin(), {"run.steps=3", "batch.global_size=10", "batch.micro_size=1", "run.threads=1", "optim.max_grad_norm=0.1"});
    const Trace plain = train(config(family, sets), world);
    sets.insert(sets.end(), placed.begin(), placed.end());
    const Trace moved = train(config(family, sets), world);
    EXPECT_EQ(testing_support::difference(moved.gradients, plain.gradients), 0);
    EXPECT_EQ(testing_support::difference(moved.weights, plain.weights), 0);
    const auto at = static_cast<size_t>(category);
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_EQ(moved.steps[i].loss, plain.steps[i].loss) << "step " << i + 1;
      EXPECT_EQ(moved.steps[i].grad_norm, plain.steps[i].grad_norm) << "step " << i + 1;
      EXPECT_EQ(moved.steps[i].loss_scale.skipped, plain.steps[i].loss_scale.skipped);
      EXPECT_GT(moved.steps[i].memory.host[at], 0);
      if (testing_support::test_device().is_cpu()) EXPECT_EQ(plain.steps[i].memory.host[at], 0) << "beside an accelerator lies what this test has copied";
      if (category == MemoryCategory::Optimizer && moved.steps[i].memory.current[at] > 0) {  // but for the counts of updates, where state comes to the device
        EXPECT_LE(moved.steps[i].memory.current[at], plain.steps[i].memory.current[at] / 50);
      }
    }
    EXPECT_LE(total_of(moved.peak), total_of(plain.peak)) << "the same where what an update takes is all";
  }
  void activations(const std::string& family, const Sets& sets, int world, const std::string& place = "host") const {
    expect_same_bits(MemoryCategory::Activations, {"offload.activations=" + place, "offload.min_bytes=256", "offload.dir=" + (folder_ / "away").string()},
                     family, sets, world);
  }
  void optimizer(const std::string& family, const Sets& sets, int world) const {
    expect_same_bits(MemoryCategory::Optimizer, {"offload.optimizer=host"}, family, sets, world);
  }
  std::string dir() const { return "offload.dir=" + (folder_ / "away").string(); }
};

TEST_F(PlacedTraining, ActivationsOnTheHostAreBitForBitUnderEveryTechnique) {
  activations("llama", {"model.kv_heads=2"}, 1);
  activations("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, 2);
  for (const char* stage : {"1", "2", "3"}) activations("llama", {std::string("zero.stage=") + stage}, 3);
  activations("llama", {"zero.stage=3", "zero.wrap=layers.*.*", "precision.compute=bf16"}, 2);
  activations("llama", {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host", "offload.prefetch=0"}, 2);
  activations("llama", {"mesh.tp=2", "tensor.sequence_parallel=true"}, 2);
  activations("llama", {"mesh.cp=2"}, 2);
  activations("mixtral", {"model.experts=4", "mesh.ep=2", "zero.stage=1"}, 2);
}

TEST_F(PlacedTraining, ActivationsOfStagesAreToldApartByMicroBatch) {
  for (const char* schedule : {"1f1b", "gpipe", "zb_h1"}) {
    activations("llama", {"mesh.pp=2", "model.layers=4", std::string("pipeline.schedule=") + schedule}, 2);
  }
  activations("llama", {"mesh.pp=2", "model.layers=4", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}, 2);
}

TEST_F(PlacedTraining, ActivationsMoveBesideRecompute) {
  for (const Sets& sets : {Sets{"recompute.mode=full"},
                           {"recompute.mode=full", "recompute.every=2"},
                           {"recompute.mode=selective"},
                           {"recompute.mode=full", "recompute.segment=2", "model.layers=5"}}) {
    activations("llama", sets, 1);
  }
  activations("llama", {"recompute.mode=selective", "zero.stage=3", "precision.compute=bf16"}, 2);
}

TEST_F(PlacedTraining, ActivationsOnDiskLeaveNothingBehind) {
  activations("llama", {"model.layers=4"}, 1, "disk");
  activations("gpt2", {"zero.stage=2", "offload.prefetch=2"}, 2, "disk");
  expect_same_bits(MemoryCategory::Activations,
                   {"offload.activations={ \"layers.0\" = \"disk\", \"layers.*.feed_forward\" = \"host\" }", "offload.min_bytes=256",
                    "offload.dir=" + (folder_ / "away").string()},
                   "llama", {"model.layers=3"}, 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "away"));
}

TEST_F(PlacedTraining, ActivationsOfAnExceptionStay) {
  for (const char* stays : {"layers.1", "layers.*.attention"}) {
    const std::string table = std::string("{ \"layers.*\" = \"host\", \"") + stays + "\" = \"device\" }";
    for (const int world : {2, 3}) {
      expect_same_bits(MemoryCategory::Activations, {"offload.activations=" + table, "offload.min_bytes=256"}, "llama", {"model.layers=3"}, world);
    }
    expect_same_bits(MemoryCategory::Activations, {"offload.activations=" + table, "offload.min_bytes=256"}, "llama",
                     {"model.layers=3", "recompute.mode=selective"}, 1);
    const auto away = [&](const std::string& places) {
      const Sets sets{"run.steps=1", "model.layers=3", "offload.min_bytes=256", "offload.activations=" + places};
      return train(config("llama", sets), 1).steps.back().memory.host[static_cast<size_t>(MemoryCategory::Activations)];
    };
    EXPECT_LT(away(table), away("host")) << stays;
  }
}

TEST_F(PlacedTraining, AFullDiskEndsAllRanksWithOneSentence) {
  const Config full = config("llama", {"comm.backend=gloo", "offload.activations=disk", "offload.min_bytes=256", "offload.dir=" + (folder_ / "away").string()});
  corpus(full);
  const FileLimit limit(4096);
  try {
    train(full, 2);
    FAIL() << "the disk was full";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("offload.dir = " + (folder_ / "away").string() + ": writing "), std::string::npos) << error.what();
  }
}

TEST_F(PlacedTraining, TheOptimizerOnTheHostIsBitForBitAtEveryStage) {
  optimizer("llama", {"model.kv_heads=2"}, 1);
  optimizer("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, 2);
  for (const char* stage : {"1", "2", "3"}) {
    optimizer("llama", {std::string("zero.stage=") + stage}, 3);
    optimizer("llama", {std::string("zero.stage=") + stage, "precision.params=bf16", "precision.compute=bf16"}, 2);
  }
  optimizer("llama", {"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"}, 1);
  optimizer("llama", {"mesh.tp=2"}, 2);
  optimizer("llama", {"mesh.pp=2", "pipeline.schedule=zb_h1", "pipeline.post_validate=true"}, 2);
  optimizer("mixtral", {"model.experts=4", "mesh.ep=2", "zero.stage=1"}, 2);
}

TEST_F(PlacedTraining, StateOnDiskOrUpdatedOnTheDeviceIsBitForBitAtEveryStage) {
  for (const Sets& placed : {Sets{"offload.optimizer=disk", dir()},
                             {"offload.optimizer=host", "offload.update=device"},
                             {"offload.optimizer=disk", "offload.update=device", dir()}}) {
    const auto same = [&](const std::string& family, const Sets& sets, int world) { expect_same_bits(MemoryCategory::Optimizer, placed, family, sets, world); };
    same("llama", {"model.kv_heads=2", "precision.params=bf16", "precision.compute=bf16"}, 1);
    same("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true", "zero.stage=1"}, 2);
    same("llama", {"zero.stage=2", "optim.name=lion", "optim.state_dtype=bf16"}, 2);
    same("llama", {"zero.stage=3"}, 2);
    same("llama", {"mesh.pp=2", "pipeline.schedule=zb_h1"}, 2);
    same("llama", {"optim.name=muon"}, 1);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "away"));
}

TEST_F(PlacedTraining, GradientsThatGoToTheHostAsTheyComeAreBitForBit) {
  for (const Sets& placed : {Sets{"offload.gradients=host", "offload.optimizer=host"}, {"offload.gradients=host", "offload.optimizer=disk", dir()}}) {
    const auto same = [&](const std::string& family, Sets sets, int world) {
      expect_same_bits(MemoryCategory::Gradients, placed, family, sets, world);
      sets.insert(sets.end(), placed.begin(), placed.end());
      sets.insert(sets.end(), {"run.steps=2", "batch.global_size=10", "batch.micro_size=1", "run.threads=1"});
      const Trace away = train(config(family, sets), world);
      EXPECT_EQ(away.peak[static_cast<size_t>(MemoryCategory::Gradients)], 0) << "the device has those on their way alone";
      EXPECT_EQ(away.peak[static_cast<size_t>(MemoryCategory::Optimizer)], 0);
    };
    same("llama", {"model.kv_heads=2"}, 1);
    same("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true", "zero.stage=2"}, 1);
    same("llama", {"precision.params=bf16", "precision.compute=bf16"}, 1);
    same("llama", {"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"}, 1);
    same("llama", {"mesh.tp=2", "tensor.sequence_parallel=true"}, 2);
    same("llama", {"mesh.pp=2", "recompute.mode=full"}, 2);
    same("gpt2", {"mesh.pp=2", "model.tie_embeddings=true", "recompute.mode=full"}, 2);
    // Both ends of the embedding on one rank: the second one follows.
    same("llama", {"model.tie_embeddings=true", "pipeline.virtual_stages=2", "pipeline.schedule=breadth_first", "recompute.mode=full"}, 1);
    same("llama", {"model.tie_embeddings=true", "mesh.pp=2", "pipeline.virtual_stages=2", "pipeline.schedule=zb_v", "recompute.mode=full", "zero.stage=1"}, 2);
  }
}

/// They meet on the device by buckets; what a rank's earlier micro-batches have left on the host comes back for that, unless each is reduced by itself.
TEST_F(PlacedTraining, GradientsOfSeveralDataRanksGoToTheHostBitForBit) {
  const Sets streamed{"offload.gradients=host", "offload.optimizer=host"};
  const auto same = [&](const std::string& family, Sets sets, int world, const Sets& placed) {
    sets.push_back("zero.bucket_bytes=4096");
    expect_same_bits(MemoryCategory::Gradients, placed, family, sets, world);
  };
  for (const char* stage : {"0", "1", "2"}) {
    const std::string at = std::string("zero.stage=") + stage;
    same("llama", {at, "model.kv_heads=2"}, 3, streamed);
    same("llama", {at, "precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16"}, 2, streamed);
    same("gpt2", {at, "model.dropout=0.1", "model.tie_embeddings=true", "mesh.pp=2", "recompute.mode=full"}, 4, streamed);
  }
  same("llama", {"zero.stage=2", "zero.accumulate=whole", "mesh.dp_replicate=2"}, 4, streamed);
  same("llama", {"zero.stage=2", "mesh.dp_replicate=2", "precision.reduce=bf16"}, 4, streamed);
  same("llama", {"zero.stage=1", "mesh.tp=2"}, 4, {"offload.gradients=host", "offload.optimizer=disk", dir()});
  same("llama", {"comm.compression=powersgd", "comm.powersgd_start=1"}, 2, streamed);
  same("llama", {"mesh.pp=2", "model.layers=4", "pipeline.schedule=zb_h1", "zero.stage=1"}, 4, streamed);
  same("mixtral", {"model.experts=4", "mesh.ep=2", "zero.stage=1"}, 2, streamed);
  same("llama", {"mesh.cp=2", "zero.stage=2"}, 2, streamed);
  same("llama", {"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"}, 2, streamed);
}

/// Two buckets, one that is reduced and one that fills, and a gradient, with its part, that comes or goes; the largest bucket is the embedding's.
TEST_F(PlacedTraining, StreamedGradientsTakeBucketsAlone) {
  for (const std::string stage : {"0", "1", "2"}) {
    const Config streamed = config("llama", {"zero.stage=" + stage, "offload.gradients=host", "offload.optimizer=host", "zero.bucket_bytes=4096",
                                             "model.layers=24", "batch.global_size=12", "batch.micro_size=2", "run.threads=1"});
    const auto text = corpus(streamed);
    comm::run_ranks(2, [&](comm::World& ranks) {
      Mesh mesh(ranks, mesh_shape(streamed.mesh, streamed.zero.stage, ranks.size()));
      RankScope scope(streamed, ranks.local_size());
      Stepper stepper(streamed, mesh, testing_support::OnTheCpu::now() ? at::Device(at::kCPU) : testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(streamed, mesh));
      const auto at = static_cast<size_t>(MemoryCategory::Gradients);
      int64_t most = 0;
      int64_t whole = 0, largest = 0;
      for (const auto& one : stepper.run().parameters) {
        whole += static_cast<int64_t>(one.tensor.nbytes());
        largest = std::max(largest, static_cast<int64_t>(one.tensor.nbytes()));
      }
      for (int step = 0; step < 3; ++step) {
        scope.memory().start_timeline();
        stepper.step(loader.next(), {});
        const MemoryHistory history = scope.memory().end_timeline();
        for (const auto& event : history.events) most = std::max(most, event.after[at]);
        EXPECT_EQ(scope.memory().current_by_category()[at], 0) << "behind step " << step << " of stage " << stage;
      }
      EXPECT_GT(most, 0);
      EXPECT_LE(most, 4 * largest) << "stage " << stage;
      EXPECT_LT(4 * most, whole) << "stage " << stage;
    });
  }
}

/// The reference takes gradients at the weights of one update before, and updates those of now.
TEST_F(PlacedTraining, ADelayedUpdateIsThatOfAPlainLoopWithStaleWeights) {
  for (const auto& [world, sets] : {std::pair<int, Sets>{1, {}}, {2, {"zero.stage=2"}}, {1, {"offload.optimizer=disk", dir()}}}) {
    Sets common{"batch.global_size=4", "batch.micro_size=1", "run.threads=1", "run.steps=5", "optim.max_grad_norm=0.1", "optim.schedule=linear"};
    Sets delayed = common;
    delayed.insert(delayed.end(), {"offload.optimizer=host", "offload.delayed_update=true"});
    delayed.insert(delayed.end(), sets.begin(), sets.end());
    const Trace moved = train(config("llama", delayed), world);
    if (sets == Sets{"zero.stage=2"}) common.insert(common.end(), sets.begin(), sets.end());
    const Config plain = config("llama", common);
    const auto text = corpus(plain);
    std::vector<StepOutcome> steps;
    comm::run_ranks(world, [&](comm::World& ranks) {
      Mesh mesh(ranks, mesh_shape(plain.mesh, plain.zero.stage, ranks.size()));
      RankScope scope(plain, ranks.local_size());
      Stepper stepper(plain, mesh, testing_support::OnTheCpu::now() ? at::Device(at::kCPU) : testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(plain, mesh));
      const auto weights = [&] {
        std::vector<at::Tensor> all;
        for (const auto& one : stepper.run().parameters) all.push_back(one.tensor.detach().clone());
        return all;
      };
      const auto set_weights = [&](const std::vector<at::Tensor>& values) {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < values.size(); ++i) at::Tensor(stepper.run().parameters[i].tensor).copy_(values[i]);
      };
      std::vector<at::Tensor> now = weights();
      for (int64_t step = 1; step <= plain.run.steps; ++step) {
        const auto outcome = stepper.step(loader.next(), {.gradients_ready = [&] { set_weights(now); }});
        const std::vector<at::Tensor> next = weights();
        set_weights(now);
        now = next;
        if (ranks.rank() == 0) steps.push_back(outcome);
      }
    });
    for (size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(moved.steps[i].loss, steps[i].loss) << "step " << i + 1 << " of " << world;
      EXPECT_EQ(moved.steps[i].grad_norm, steps[i].grad_norm);
    }
    EXPECT_EQ(moved.steps[0].memory.current[static_cast<size_t>(MemoryCategory::Optimizer)], 0);
  }
}

/// Layer by layer through all micro-batches of a step: a pipeline of one rank, each of whose stages is gathered from the host.
TEST_F(PlacedTraining, LayerByLayerIsBitForBitAndHoldsTwoLayersWhateverTheDepth) {
  std::vector<int64_t> held;
  for (const int layers : {4, 16, 64}) {
    const std::string stages = std::to_string(layers + 2);
    const Sets on_host{"zero.stage=3",
                       "offload.params=host",
                       "offload.gradients=host",
                       "offload.optimizer=host",
                       "model.layers=" + std::to_string(layers),
                       "model.vocab_size=260",
                       "run.steps=2",
                       "batch.global_size=6",
                       "batch.micro_size=2",
                       "run.threads=1",
                       "recompute.mode=full",
                       "optim.max_grad_norm=0.1"};
    Sets by_layer = on_host;
    by_layer.insert(by_layer.end(), {"pipeline.schedule=breadth_first", "pipeline.virtual_stages=" + stages, "zero.wrap=layers.*"});
    const Trace plain = train(config("llama", on_host), 1), moved = train(config("llama", by_layer), 1);
    EXPECT_EQ(testing_support::difference(moved.gradients, plain.gradients), 0);
    EXPECT_EQ(testing_support::difference(moved.weights, plain.weights), 0);
    for (size_t i = 0; i < plain.steps.size(); ++i) EXPECT_EQ(moved.steps[i].loss, plain.steps[i].loss);
    held.push_back(moved.peak[static_cast<size_t>(MemoryCategory::Parameters)] + moved.peak[static_cast<size_t>(MemoryCategory::Comm)]);
  }
  EXPECT_EQ(held[0], held[1]);
  EXPECT_EQ(held[0], held[2]);
  const int64_t vocabulary = 260 * 24 * 4;  // embedding and head, which here are the largest of the chain
  EXPECT_LE(held[0], 4 * vocabulary) << "of the layer in use and the next, weights and, in backward, gradients";
}

TEST_F(PlacedTraining, EveryOptimizerMayBeOnTheHost) {
  for (const Sets& sets :
       {Sets{"optim.name=sgd", "optim.momentum=0.9"}, {"optim.name=lion"}, {"optim.name=adafactor"}, {"optim.name=adam8bit"}, {"optim.name=muon"}}) {
    optimizer("llama", sets, 1);
    Sets sharded = sets;
    sharded.push_back("zero.stage=2");
    optimizer("llama", sharded, 2);
  }
}

}  // namespace
}  // namespace tessera
