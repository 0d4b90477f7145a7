// Random layouts of random small models against one device: stages, chunks, schedules, tensor parallelism, data ranks, ZeRO of each stage, recomputation,
// dropout, tied embeddings, batches that do not divide. Whatever a recipe says together, it has to train as one device does. A seed that fails is a recipe: it
// is printed; take settings out of it. TESSERA_SEED=n runs DISABLED_Many with that seed alone.

#include "tessera/core/error.h"
#include "tessera/train/pipeline_layout.h"
#include "tests/dice.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;
using testing_support::TrainFixture;

/// A model with its batch, and how it is cut.
struct RandomRecipe {
  std::string family;
  std::vector<std::string> model, layout;
  int ranks = 1;
};

std::string setting(const std::string& key, int value) { return key + "=" + std::to_string(value); }

RandomRecipe make_recipe(uint64_t seed) {
  testing_support::Dice dice(seed);
  RandomRecipe made;
  made.family = dice.one_of<const char*>({"llama", "llama", "gpt2", "mlp"});
  const int data = dice.one_of({1, 1, 2, 3}), micro = dice.one_of({1, 1, 2}), layers = 2 + dice.below(5);
  const int most = 8, pipeline = std::min(1 + dice.below(4), most / data), tensor = pipeline * data * 2 <= most && dice.once_in(3) ? 2 : 1;
  const int micro_batches = data * (1 + dice.below(4)) + (data > 1 ? dice.below(data) : 0);
  made.ranks = pipeline * data * tensor;
  made.model = {setting("model.layers", layers),
                setting("batch.micro_size", micro),
                setting("batch.global_size", micro * micro_batches),
                setting("run.seed", dice.below(100)),
                "run.steps=2",
                "run.threads=1",
                "optim.name=sgd",
                "optim.lr=0.1",
                "comm.timeout_s=60"};
  if (dice.once_in(3)) made.model.push_back("model.dropout=0.1");
  if (made.family != "mlp" && dice.once_in(3)) made.model.push_back("model.tie_embeddings=true");
  if (made.family == "llama" && dice.once_in(2)) made.model.push_back("model.kv_heads=2");
  if (dice.once_in(4)) made.model.push_back("loss.z_loss=0.001");
  if (tensor == 1 && dice.once_in(5)) made.model.push_back("precision.compute=bf16");

  auto& layout = made.layout;
  layout = {setting("mesh.pp", pipeline), setting("mesh.tp", tensor)};
  const int stage = dice.below(4);
  layout.push_back(setting("zero.stage", stage));
  layout.push_back(setting(stage > 0 ? "mesh.dp_shard" : "mesh.dp_replicate", data));
  if (stage > 0 && dice.once_in(2)) layout.push_back("zero.accumulate=whole");
  if (stage == 3) {
    if (dice.once_in(2)) layout.push_back("zero.reshard_after_forward=false");
    layout.push_back(setting("zero.prefetch", dice.below(4)));
    if (dice.once_in(4)) layout.push_back("zero.wrap=**");
  } else if (dice.once_in(2)) {
    layout.push_back("zero.bucket_bytes=5000");
  }
  if (pipeline > 1) {
    const int chunks = dice.once_in(2) ? 2 : 1;
    layout.push_back(setting("pipeline.virtual_stages", chunks));
    layout.push_back("pipeline.schedule=" + std::string(chunks == 1 ? dice.one_of<const char*>({"gpipe", "1f1b", "zb_h1", "naive"})
                                                                    : dice.one_of<const char*>({"interleaved", "breadth_first", "zb_v", "dualpipev"})));
  }
  if (tensor > 1 && made.family != "mlp" && dice.once_in(2)) layout.push_back("tensor.sequence_parallel=true");
  if (tensor > 1 && dice.once_in(2)) layout.push_back("tensor.overlap=true");
  if (dice.once_in(3)) layout.push_back("recompute.mode=" + std::string(made.family != "mlp" && dice.once_in(2) ? "selective" : "full"));
  if (stage == 0 && dice.once_in(5)) layout.push_back("run.deterministic=true");
  return made;
}

class RandomPipelines : public TrainFixture {
 protected:
  /// Whether the recipe is one; what is refused is other tests' business.
  static bool is_lawful(const Config& config, int ranks) {
    try {
      validate(config, ranks);
      check_pipeline(config, mesh_shape(config.mesh, config.zero.stage, ranks));
      check_modules(config, mesh_shape(config.mesh, config.zero.stage, ranks));
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  }

  /// False where the recipe is none.
  bool agrees_with_one_device(uint64_t seed) const {
    const RandomRecipe recipe = make_recipe(seed);
    std::vector<std::string> sets = recipe.model;
    const Config one = config(recipe.family, sets);
    sets.insert(sets.end(), recipe.layout.begin(), recipe.layout.end());
    const Config many = config(recipe.family, sets);
    if (!is_lawful(one, 1) || !is_lawful(many, recipe.ranks)) return false;
    std::string text = "seed " + std::to_string(seed) + ": " + recipe.family + " on " + std::to_string(recipe.ranks) + " ranks";
    for (const std::string& one_set : sets) text += " --set " + one_set;
    SCOPED_TRACE(text);
    try {
      const Trace got = train(many, recipe.ranks, {}, /*recorded_step=*/1), want = train(one, 1, {}, 1);
      EXPECT_LT(difference(got.gradients, want.gradients), kGradients);
      for (size_t step = 0; step < want.steps.size(); ++step) {
        EXPECT_NEAR(got.steps[step].loss, want.steps[step].loss, kLosses * want.steps[step].loss) << "step " << step;
        // Behind an update a weight's last bit of fp32 decides which neighbour it is in bf16.
        const double bound = step > 0 && many.precision.compute == "bf16" ? 1e-3 : 2e-5;
        EXPECT_NEAR(got.steps[step].grad_norm, want.steps[step].grad_norm, bound * want.steps[step].grad_norm) << "step " << step;
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    return true;
  }

  void run_seeds(uint64_t begin, uint64_t end) const {
    uint64_t ran = 0;
    for (uint64_t seed = begin; seed < end && !HasFailure(); ++seed) ran += agrees_with_one_device(seed) ? 1 : 0;
    if (!HasFailure()) EXPECT_GE(2 * ran, end - begin) << "most recipes are refused: the dice test nothing";
  }
};

TEST_F(RandomPipelines, TrainAsOneDeviceDoes) { run_seeds(0, 16); }
TEST_F(RandomPipelines, DISABLED_Many) {
  const auto [begin, end] = testing_support::seeds_asked(16, 3000);
  run_seeds(begin, end);
}

}  // namespace
}  // namespace tessera
