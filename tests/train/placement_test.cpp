// Activations, or the optimizer's state alone, away from the device: what a run computes stays the same to the bit, in every setting it meets.

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
      EXPECT_EQ(plain.steps[i].memory.host[at], 0);
      if (category == MemoryCategory::Optimizer) {
        EXPECT_EQ(moved.steps[i].memory.current[at], 0);
      }
    }
    EXPECT_LT(total_of(moved.peak), total_of(plain.peak));
  }
  void activations(const std::string& family, const Sets& sets, int world, const std::string& place = "host") const {
    expect_same_bits(MemoryCategory::Activations, {"offload.activations=" + place, "offload.min_bytes=256", "offload.dir=" + (folder_ / "away").string()},
                     family, sets, world);
  }
  void optimizer(const std::string& family, const Sets& sets, int world) const {
    expect_same_bits(MemoryCategory::Optimizer, {"offload.optimizer=host"}, family, sets, world);
  }
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
