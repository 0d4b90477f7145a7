// A small vision transformer of libtorch's own modules, trained in a pipeline by four schedules, the same number of updates of the same number of images each:
//   tessera run --nproc_per_node 4 path/to/vit_digits digits.bin [--seed N] [--lr F] [--epochs N] [--optimizer adamw|sgd]
//   1f1b           an update of 32 images in 4 micro-batches, then the pipeline drains
//   pipedream      each stage updates behind every micro-batch of 32 images; rank i computes with weights that lack up to p - 1 - i updates
//   vertical sync  the same, with the weights that a micro-batch met on the first stage: all stages lack up to p - 1
//   2BW            an update of 32 images in p micro-batches; weights lack one update
// The three asynchronous ones drain at the end of an epoch. `digits.bin` holds 65 bytes an image: 8 rows of 8 pixels, 0 to 16, and the digit
// (bench/staleness.py writes it from scikit-learn's digits). 1440 of them train, the last 352 test. One line a schedule: test accuracy after a third of
// the epochs and after all, and the training loss of the last.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"

namespace {

namespace pipeline = tessera::pipeline;
namespace schedules = tessera::schedules;

constexpr int64_t kSide = 8, kPatch = 2, kPatches = (kSide / kPatch) * (kSide / kPatch), kClasses = 10;
constexpr int64_t kTrained = 1440, kTested = 352, kBatch = 32;
constexpr int64_t kWidth = 32, kHeads = 4, kLayers = 4;

struct VitImpl : torch::nn::Module {
  VitImpl() : embed(kPatch * kPatch, kWidth), norm(torch::nn::LayerNormOptions({kWidth})), head(kWidth, kClasses) {
    register_module("embed", embed);
    positions = register_parameter("positions", at::randn({kPatches, 1, kWidth}) * 0.1);
    register_module("layers", layers);
    for (int64_t i = 0; i < kLayers; ++i)
      layers->push_back(torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads).dim_feedforward(2 * kWidth).dropout(0)));
    register_module("norm", norm);
    register_module("head", head);
  }

  /// images [B, 64] -> [B, 10]; between the layers [patches, B, width].
  at::Tensor forward(const at::Tensor& images) {
    constexpr int64_t row = kSide / kPatch;
    at::Tensor patches = images.view({-1, row, kPatch, row, kPatch}).permute({1, 3, 0, 2, 4}).reshape({kPatches, -1, kPatch * kPatch});
    at::Tensor x = embed(patches) + positions;
    for (const auto& layer : *layers) x = layer->as<torch::nn::TransformerEncoderLayer>()->forward(x);
    return head(norm(x.mean(0)));
  }

  torch::nn::Linear embed;
  at::Tensor positions;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Vit);

struct Digits {
  at::Tensor images, labels;

  explicit Digits(const std::string& path) {
    constexpr int64_t record = kSide * kSide + 1;
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const int64_t count = static_cast<int64_t>(bytes.size()) / record;
    tessera::require(count >= kTrained + kTested, path, ": ", bytes.size(), " bytes; ", kTrained + kTested, " images of ", record, " bytes are needed");
    const at::Tensor all = at::from_blob(bytes.data(), {count, record}, at::kByte);
    images = all.narrow(1, 0, record - 1).to(at::kFloat).div(8).sub(1);
    labels = all.select(1, record - 1).to(at::kLong);
  }
};

struct Settings {
  std::string file;
  int64_t seed = 1, epochs = 30;
  double lr = 1e-3;
  std::string optimizer = "adamw";
};

struct Way {
  const char* name;
  int64_t micro;  ///< images of a micro-batch
  int steps;      ///< of an epoch: each ends with a pipeline that is empty
  std::function<schedules::Schedule(int ranks, int micro_batches)> schedule;
};

std::vector<Way> ways(int ranks) {
  constexpr int updates = kTrained / kBatch;
  return {{"1f1b", kBatch / 4, updates, [](int p, int m) { return schedules::one_f_one_b(p, m); }},
          {"pipedream", kBatch, 1, [](int p, int m) { return schedules::pipedream(p, m); }},
          {"vertical sync", kBatch, 1, [](int p, int m) { return schedules::pipedream(p, m, /*vertical_sync=*/true); }},
          {"2BW", kBatch / ranks, 1, [](int p, int m) { return schedules::pipedream_2bw(p, m, p); }}};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Settings& settings, const std::vector<at::Tensor>& parameters) {
  if (settings.optimizer == "sgd") return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(settings.lr).momentum(0.9));
  tessera::require(settings.optimizer == "adamw", "--optimizer = ", settings.optimizer, ": adamw or sgd");
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(settings.lr).weight_decay(0.01));
}

void train(const Settings& settings, const Digits& digits, const Way& way, const tessera::comm::Group& ranks) {
  Vit model = tessera::on_meta([] { return Vit(); });
  pipeline::SplitSpec points;
  for (int64_t s = 1; s < ranks.size(); ++s) points.push_back({"layers." + std::to_string(s * kLayers / ranks.size()), pipeline::SplitPoint::Beginning});
  const auto split = pipeline::split(model, {digits.images.narrow(0, 0, way.micro)}, points);
  split.check_agreement(ranks);
  const int number = ranks.rank();
  const auto own = split.module(number);
  tessera::materialize(*own, static_cast<uint64_t>(settings.seed));

  const int in_step = static_cast<int>(kTrained / way.micro) / way.steps;
  const auto schedule = way.schedule(static_cast<int>(ranks.size()), in_step);
  const int64_t in_update = kBatch / way.micro;
  at::Tensor order = at::arange(kTrained + kTested);
  int64_t first = 0;  // image of the step, in `order`
  const auto rows = [&](int micro_batch) { return order.narrow(0, first + micro_batch * way.micro, way.micro); };
  double loss_sum = 0;
  int64_t right = 0;
  pipeline::TracedStage stage(
      split, number, [&](int micro_batch) { return std::vector<at::Tensor>{digits.images.index_select(0, rows(micro_batch))}; },
      [&](int micro_batch, const std::vector<at::Tensor>& logits) {
        const at::Tensor labels = digits.labels.index_select(0, rows(micro_batch));
        const at::Tensor loss = torch::nn::functional::cross_entropy(logits[0], labels);
        loss_sum += loss.item<double>() * static_cast<double>(way.micro);
        right += logits[0].argmax(1).eq(labels).sum().item<int64_t>();
        return loss / in_update;
      });

  const auto optimizer = make_optimizer(settings, own->parameters());
  const auto update = [&] {
    optimizer->step();
    optimizer->zero_grad();
  };
  pipeline::ExecutorOptions options{.ranks = ranks};
  options.weights[number] = own->parameters();
  options.update = [&](int) { update(); };
  pipeline::Executor executor(schedule, split.crossings(), {{number, &stage}}, options);
  // The test images through the same stages, forwards alone; on the last rank, which sees them come out.
  auto forwards = schedules::gpipe(static_cast<int>(ranks.size()), static_cast<int>(kTested / way.micro));
  for (auto& actions : forwards.actions) std::erase_if(actions, [](const schedules::Action& action) { return action.kind != schedules::Kind::Forward; });
  pipeline::Executor tester(forwards, split.crossings(), {{number, &stage}}, {.ranks = ranks});
  const auto accuracy = [&] {
    const at::NoGradGuard no_grad;
    const double trained_loss = loss_sum;
    first = kTrained;
    right = 0;
    tester.run();
    loss_sum = trained_loss;
    return static_cast<double>(right) / kTested;
  };
  double early = 0;
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    if (epoch == settings.epochs / 3) early = accuracy();
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(settings.seed * 1000 + epoch));
    order = at::cat({at::randperm(kTrained, generator), at::arange(kTrained, kTrained + kTested)});
    loss_sum = 0;
    for (int step = 0; step < way.steps; ++step) {
      first = step * kTrained / way.steps;
      executor.run();
      if (!schedule.is_asynchronous()) update();
    }
  }
  if (ranks.rank() + 1 == ranks.size())
    std::printf("%-14s test accuracy %.4f then %.4f  training loss %.5f\n", way.name, early, accuracy(), loss_sum / kTrained);
  else
    accuracy();
}

Settings read(int argc, char** argv) {
  Settings settings;
  tessera::require(argc >= 2 && argc % 2 == 0, "usage: vit_digits digits.bin [--seed N] [--lr F] [--epochs N] [--optimizer adamw|sgd]");
  settings.file = argv[1];
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--seed") {
      settings.seed = std::atoll(value.c_str());
    } else if (flag == "--lr") {
      settings.lr = std::atof(value.c_str());
    } else if (flag == "--epochs") {
      settings.epochs = std::atoll(value.c_str());
    } else {
      tessera::require(flag == "--optimizer", flag, ": no such flag; there are --seed, --lr, --epochs and --optimizer");
      settings.optimizer = value;
    }
  }
  return settings;
}

void run(int argc, char** argv) {
  const Settings settings = read(argc, argv);
  at::set_num_threads(1);
  const Digits digits(settings.file);
  auto world = tessera::comm::World::from_environment({.backend = "gloo"});  // waits asleep: many small messages, and few cores
  const auto ranks = world.group();
  tessera::require(ranks.size() == 2 || ranks.size() == 4, "vit_digits: ", ranks.size(), " ranks for ", kLayers, " layers; start 2 or 4");
  for (const Way& way : ways(static_cast<int>(ranks.size()))) train(settings, digits, way, ranks);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return 0;
  } catch (const tessera::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
