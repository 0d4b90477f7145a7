#include <algorithm>

#include "tessera/nn/layers.h"
#include "tests/pipeline/split_training.h"

/// Every number of stages and chunks: stages of unequal length and without parameters, tied ends, frozen first layers, micro-batches of unequal shapes.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;

constexpr int kLayers = 48, kCount = 8;

struct SquashImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x * 1.5); }
};
TESSERA_MODULE(Squash);

/// A path of every layer is a place to split: each third one announces its calls and has no parameters.
struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(bool tied) : tied(tied) {
    register_module("emb", emb);
    register_module("layers", layers);
    for (int i = 0; i < kLayers; ++i) i % 3 == 2 ? layers->push_back(Squash()) : layers->push_back(torch::nn::Linear(4, 4));
    if (!tied) register_module("head", head);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = emb(tokens);
    for (const auto& layer : *layers)
      x = layer->as<SquashImpl>() ? nn::call(*layer->as<SquashImpl>(), x) : x + layer->as<torch::nn::LinearImpl>()->forward(x) / 4;
    return tied ? torch::nn::functional::linear(x, emb->weight) : head(x);
  }
  bool tied;
  torch::nn::Embedding emb{9, 4};
  torch::nn::ModuleList layers;
  torch::nn::Linear head{4, 9};
};
TORCH_MODULE(Deep);

/// The first stage has what the others leave.
pipeline::SplitSpec last_layers(int stages) {
  pipeline::SplitSpec splits;
  for (int i = kLayers - stages + 1; i < kLayers; ++i) splits.push_back({"layers." + std::to_string(i), Beginning});
  return splits;
}

MicroBatches unequal_tokens() {
  MicroBatches inputs;
  for (int64_t i = 0; i < kCount; ++i) {
    inputs.push_back({at::randint(9, {1 + i % 3, 2 + i % 4}, at::detail::createCPUGenerator(30 + static_cast<uint64_t>(i)), at::kLong)});
  }
  return inputs;
}

void expect_every_number(bool tied, const Training& training) {
  const auto build = [tied] { return Deep(tied); };
  const MicroBatches inputs = unequal_tokens();
  const TrainingResult whole = train_whole(build, inputs, training);
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int chunks : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << chunks << " chunks");
      const MakeSchedule schedule = [chunks](int p, int m) {
        return chunks == 1 ? schedules::one_f_one_b(p, m) : chunks == 2 ? schedules::zb_v(p, m) : schedules::interleaved(p, m, chunks);
      };
      expect_near(train_in_stages(ranks, build, last_layers(ranks * chunks), inputs, schedule, training), whole, training.bound);
    }
  }
}

TEST(SplitNumbers, TiedEnds) { expect_every_number(/*tied=*/true, {.steps = 1, .max_norm = 0.5, .example = {}, .before = {}}); }

TEST(SplitNumbers, FrozenFirstLayers) {
  Training training{.steps = 1, .max_norm = 0.5, .example = {}, .before = {}};
  training.before = [](torch::nn::Module& module, int /*step*/) {
    for (const auto& item : module.named_parameters()) {
      const bool frozen = item.key().starts_with("emb") || item.key().starts_with("layers.0") || item.key().starts_with("layers.1.");
      item.value().set_requires_grad(!frozen);
    }
  };
  expect_every_number(/*tied=*/false, training);
}

}  // namespace
}  // namespace tessera
