// 16-bit weights that are computed with in fp32: no micro-batch's gradient is rounded before it is added up, so what a step gets is what it would be of fp32
// weights that hold the same numbers.

#include <ATen/ops/equal.h>

#include "tessera/precision/gradient_dtype.h"
#include "tessera/precision/policy.h"
#include "tessera/train/engine.h"
#include "tests/train/fixture.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::TrainFixture;

using Sets = std::vector<std::string>;

Sets joined(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

class WideGradients : public TrainFixture {
 protected:
  static Sets many_micro_batches() { return {"batch.global_size=24", "batch.micro_size=1", "run.steps=1", "run.threads=1", "precision.compute=fp32"}; }
  static Sets narrow() { return joined(many_micro_batches(), {"precision.params=bf16"}); }

  /// Of one step on one rank, whose weights begin as those of the bf16 run do.
  std::map<std::string, at::Tensor> of_fp32_weights(const std::string& family, const Sets& more) const {
    const Config config = TrainFixture::config(family, joined(many_micro_batches(), more));
    const auto text = corpus(config);
    std::map<std::string, at::Tensor> gradients;
    comm::run_ranks(1, [&](comm::World& world) {
      const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, 1));
      RankScope scope(config, 1);
      Stepper stepper(config, mesh, testing_support::test_device(), scope);
      {
        const at::NoGradGuard no_grad;
        for (const auto& parameter : stepper.run().parameters) parameter.tensor.copy_(parameter.tensor.to(at::kBFloat16));
      }
      data::Loader loader(text, loader_options(config, mesh));
      stepper.step(loader.next(), {.gradients_ready = [&] {
                     for (const auto& parameter : stepper.run().updated) gradients[parameter.name] = parameter.tensor.grad().clone();
                   }});
    });
    return gradients;
  }
};

struct Model {
  const char* family;
  Sets sets;
};

const std::vector<Model>& models() {
  static const std::vector<Model> all{{"llama", {}},
                                      {"llama", {"model.tie_embeddings=true", "model.kv_heads=2", "recompute.mode=full"}},
                                      {"gpt2", {"model.dropout=0.1"}},
                                      {"gpt2", {"model.tie_embeddings=true", "run.kernels=reference"}},
                                      {"mlp", {"loss.z_loss=0.001"}}};
  return all;
}

/// 24 micro-batches, bit for bit.
TEST_F(WideGradients, AddUpToThoseOfFp32Weights) {
  for (const auto& [family, sets] : models()) {
    SCOPED_TRACE(std::string(family) + ::testing::PrintToString(sets));
    const auto got = train(config(family, joined(narrow(), sets)), 1, {}, 1).gradients, want = of_fp32_weights(family, sets);
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, gradient] : want) {
      EXPECT_EQ(got.at(name).scalar_type(), at::kFloat) << name;
      EXPECT_TRUE(at::equal(got.at(name), gradient)) << name;
    }
  }
}

/// Whoever adds them up.
TEST_F(WideGradients, InEveryLayout) {
  struct Layout {
    int ranks;
    Sets sets;
  };
  const std::vector<Layout> layouts{{1, {"run.deterministic=true"}},
                                    {3, {"run.deterministic=true"}},
                                    {2, {}},
                                    {3, {"zero.stage=1"}},
                                    {2, {"zero.stage=2"}},
                                    {3, {"zero.stage=2", "zero.accumulate=whole"}},
                                    {2, {"zero.stage=3"}},
                                    {3, {"zero.stage=3", "zero.accumulate=whole"}},
                                    {4, {"zero.stage=3", "mesh.dp_replicate=2"}},
                                    {2, {"mesh.tp=2"}},
                                    {4, {"mesh.tp=2", "tensor.sequence_parallel=true", "tensor.overlap=true", "zero.stage=2"}},
                                    {2, {"mesh.pp=2", "pipeline.schedule=zb_h1"}},
                                    {4, {"mesh.pp=2", "zero.stage=3"}}};
  for (const size_t model : {size_t{1}, size_t{2}}) {
    const auto& [family, sets] = models()[model];
    const auto want = of_fp32_weights(family, sets);
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(std::string(family) + " on " + std::to_string(layout.ranks) + " ranks " + ::testing::PrintToString(layout.sets));
      const auto got = train(config(family, joined(joined(narrow(), sets), layout.sets)), layout.ranks, {}, 1).gradients;
      EXPECT_LT(difference(got, want), testing_support::kGradients);
    }
  }
}

}  // namespace
}  // namespace tessera
