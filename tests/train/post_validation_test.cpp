// pipeline.post_validate: updates that are made while the norm is on its way, and taken back where it clips or is not finite, have the bits of the plain ones.

#include <cmath>

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include "tests/train/pipeline_fixture.h"

namespace tessera {
namespace {

class PostValidation : public testing_support::PipelineFixture {
 protected:
  void expect_same_bits(int world, Sets sets, const std::string& family = "llama") const {
    SCOPED_TRACE(sets.back());
    sets.insert(sets.end(), {"run.steps=4"});
    const Trace plain = train(piped(family, sets), world);
    sets.emplace_back("pipeline.post_validate=true");
    const Trace validated = train(piped(family, sets), world);
    ASSERT_EQ(validated.weights.size(), plain.weights.size());
    for (const auto& [name, weight] : plain.weights) EXPECT_TRUE(at::equal(validated.weights.at(name), weight)) << name;
    for (size_t step = 0; step < plain.steps.size(); ++step) {
      EXPECT_EQ(validated.steps[step].loss, plain.steps[step].loss);
      const double norm = plain.steps[step].grad_norm;
      EXPECT_TRUE(std::isfinite(norm) ? validated.steps[step].grad_norm == norm : !std::isfinite(validated.steps[step].grad_norm));
      EXPECT_EQ(validated.steps[step].loss_scale.skipped, plain.steps[step].loss_scale.skipped);
    }
  }
};

TEST_F(PostValidation, UpdatesHaveThePlainOnesBits) {
  expect_same_bits(2, {"mesh.pp=2", "optim.max_grad_norm=0"});
  expect_same_bits(2, {"mesh.pp=2", "optim.max_grad_norm=1e6"});   // never clips: every update stands
  expect_same_bits(2, {"mesh.pp=2", "optim.max_grad_norm=1e-3"});  // always clips: every update is taken back and made again
  expect_same_bits(3, {"mesh.pp=3", "pipeline.schedule=zb_h1", "optim.name=sgd", "optim.max_grad_norm=0.5"});
}

TEST_F(PostValidation, BesideEveryThingThatFollowsAnUpdate) {
  const std::string clips = "optim.max_grad_norm=0.5";
  expect_same_bits(2, {"mesh.pp=2", "model.tie_embeddings=true", clips});
  expect_same_bits(2, {"mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2", "model.tie_embeddings=true", clips});
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) expect_same_bits(4, {"mesh.pp=2", "mesh.dp_shard=2", clips, stage});
  expect_same_bits(4, {"mesh.pp=2", "mesh.tp=2", "precision.params=bf16", "precision.master=fp32", clips});
  expect_same_bits(2, {"mesh.pp=2", "precision.params=bf16", "precision.master=bf16", clips});
}

/// The scale overflows fp16 in every step: each is skipped, its update made and taken back.
TEST_F(PostValidation, StepsThatOverflowAreSkipped) {
  const Sets sets{"mesh.pp=2", "precision.compute=fp16", "precision.loss_scale=1e30"};
  Sets all = sets;
  all.insert(all.end(), {"run.steps=4", "pipeline.post_validate=true"});
  expect_same_bits(2, sets);
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {  // parts that were taken back are brought together, too
    expect_same_bits(4, {"mesh.pp=2", "precision.compute=fp16", "precision.loss_scale=1e30", "mesh.dp_shard=2", stage});
  }
  EXPECT_EQ(train(piped("llama", all), 2).steps.back().loss_scale.skipped, 4);
}

}  // namespace
}  // namespace tessera
