// An unmodified model of libtorch in two pipeline stages:
//   pipeline_split --print                                        the stage graph alone
//   pipeline_split                                                both stages on one rank
//   tessera run --nproc_per_node 2 path/to/pipeline_split         a stage on each
// The model is built on meta, recorded and cut in front of "layers.1"; each rank gives memory to its own stage, and four micro-batches a step pass by 1F1B. The
// last lines compare with the whole model in one piece.
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"

namespace {

namespace pipeline = tessera::pipeline;
using pipeline::SplitPoint;

struct LayerImpl : torch::nn::Module {
  LayerImpl() : fc(3, 3) { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) { return torch::relu(fc(x)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Layer);

struct ModelImpl : torch::nn::Module {
  ModelImpl() : emb(10, 3), lm(3, 10) {
    register_module("emb", emb);
    register_module("layers", layers);
    layers->push_back(Layer());
    layers->push_back(Layer());
    register_module("lm", lm);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = emb(tokens);
    for (const auto& layer : *layers) x = layer->as<Layer>()->forward(x);
    return lm(x);
  }
  torch::nn::Embedding emb;
  torch::nn::ModuleList layers;
  torch::nn::Linear lm;
};
TORCH_MODULE(Model);

constexpr int kMicroBatches = 4, kSteps = 5;
constexpr uint64_t kSeed = 1;
const at::Tensor kTokens = at::tensor({1, 2, 4, 5}, at::kLong);

/// Learns to name the token behind.
at::Tensor tokens_of(int micro_batch) { return (kTokens + micro_batch) % 10; }
at::Tensor loss_of(const at::Tensor& logits, int micro_batch) {
  return torch::nn::functional::cross_entropy(logits, (tokens_of(micro_batch) + 1) % 10) / kMicroBatches;
}

std::vector<double> train_whole() {
  Model model = tessera::on_meta([] { return Model(); });
  tessera::materialize(model, kSeed);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.5);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    losses.push_back(0);
    for (int i = 0; i < kMicroBatches; ++i) {
      const at::Tensor loss = loss_of(model(tokens_of(i)), i);
      loss.backward();
      losses.back() += loss.item<double>();
    }
    optimizer.step();
  }
  return losses;
}

void run(bool print_only) {
  Model model = tessera::on_meta([] { return Model(); });
  const auto split = pipeline::split(model, {kTokens}, {{"layers.1", SplitPoint::Beginning}});
  if (print_only) {
    std::printf("%s", split.to_string().c_str());
    return;
  }

  auto world = tessera::comm::World::from_environment();
  const auto ranks = world.group();
  tessera::require(ranks.size() <= split.stages(), "pipeline_split: ", ranks.size(), " ranks for ", split.stages(), " stages; start at most ", split.stages());
  split.check_agreement(ranks);
  if (ranks.rank() == 0) std::printf("%s\n", split.to_string().c_str());

  // One rank has both stages, of two each has one.
  const auto schedule = ranks.size() == 1 ? tessera::schedules::naive(1, kMicroBatches, split.stages()) : tessera::schedules::one_f_one_b(2, kMicroBatches);
  double loss_of_step = 0;
  std::vector<std::unique_ptr<pipeline::TracedStage>> stages;
  std::map<int, pipeline::Stage*> by_number;
  std::vector<at::Tensor> parameters;
  for (const int number : schedule.stages_of(ranks.rank())) {
    const auto own = split.module(number);
    tessera::materialize(*own, kSeed);
    for (const at::Tensor& parameter : own->parameters()) parameters.push_back(parameter);
    stages.push_back(std::make_unique<pipeline::TracedStage>(
        split, number, [](int micro_batch) { return std::vector<at::Tensor>{tokens_of(micro_batch)}; },
        [&](int micro_batch, const std::vector<at::Tensor>& logits) {
          const at::Tensor loss = loss_of(logits[0], micro_batch);
          loss_of_step += loss.item<double>();
          return loss;
        }));
    by_number[number] = stages.back().get();
  }

  pipeline::Executor executor(schedule, split.crossings(), by_number, {.ranks = ranks});
  torch::optim::SGD optimizer(parameters, /*lr=*/0.5);
  const bool is_last = ranks.rank() + 1 == ranks.size();
  const std::vector<double> whole = is_last ? train_whole() : std::vector<double>();
  bool equal = true;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of_step = 0;
    executor.run();
    optimizer.step();
    if (!is_last) continue;
    std::printf("step %d  loss %.9f\n", step + 1, loss_of_step);
    equal &= loss_of_step == whole[static_cast<size_t>(step)];
  }
  if (is_last)
    std::printf("%d stages on %d rank%s: losses %s the whole model's\n", split.stages(), ranks.size(), ranks.size() == 1 ? "" : "s",
                equal ? "equal" : "DIFFER from");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 && std::strcmp(argv[1], "--print") == 0);
    return 0;
  } catch (const tessera::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
