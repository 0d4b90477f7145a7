#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/products.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/precision/policy.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/train/recompute_blocks.h"
#include "tessera/train/stepper.h"

/// What a layer that is cut keeps from forward to backward, and what whole models send, against the formulas of docs/tensor-parallel.md.
namespace tessera {
namespace {

/// Which numbers go from layer to layer.
enum class Stream {
  Narrow,  ///< 16 bits everywhere: parameters of bf16 and no policy
  Wide,    ///< precision.compute = bf16: fp32 parameters and residual stream
};

struct Layer {
  std::string family = "gpt2";
  int64_t b = 2, s = 512, h = 1024, heads = 16, kv_heads = 16, ffn = 4096;
  int t = 2;
  bool sequence = false, keep_gathered = false;
  bool flash = true;  ///< false: attention of plain operators, which keeps its weights
  std::string recompute = "none";
  Stream stream = Stream::Narrow;

  double stream_elements() const { return static_cast<double>(b * s * h); }
  double scores() const { return static_cast<double>(heads * b * s * s); }
  double log_sum_exp() const { return 4.0 * static_cast<double>(heads * b * s); }
  std::string name() const {
    return fmt::format("{}: b {} s {} h {} heads {}/{} ffn {} t {}{}{}{} recompute {}{}", family, b, s, h, heads, kv_heads, ffn, t, sequence ? " sequence" : "",
                       keep_gathered ? " kept" : "", flash ? "" : " unfused", recompute, stream == Stream::Wide ? " wide" : "");
  }
};

Config config_of(const Layer& layer, int64_t layers) {
  Config config;
  config.model.family = layer.family;
  config.model.dim = layer.h;
  config.model.layers = layers;
  config.model.heads = layer.heads;
  config.model.kv_heads = layer.kv_heads;
  config.model.ffn_dim = layer.ffn;
  config.model.vocab_size = 64;
  config.model.max_seq_len = layer.s;
  config.model.dropout = layer.family == "gpt2" ? 0.1 : 0.0;
  config.recompute.mode = layer.recompute;
  return config;
}

void set_precision(LanguageModel& model, Stream stream) {
  const bool narrow = stream == Stream::Narrow;
  precision::apply(model, {.params = narrow ? at::kBFloat16 : at::kFloat, .compute = at::kBFloat16});
  if (!narrow) return;
  model.apply([](torch::nn::Module& module) {
    if (auto* ours = dynamic_cast<nn::Module*>(&module)) ours->set_compute_dtype(std::nullopt);
  });
}

/// Attention's core in plain operators.
struct Unfused : nn::Interceptor {
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next&) override {
    const at::Tensor q = inputs[0].toTensor(), places = kernels::consecutive(0, q.size(1), q.device());
    const at::Tensor visible = places.unsqueeze(1).ge(places.unsqueeze(0)).unsqueeze(0).unsqueeze(0);
    return {nn::masked_attention(q, inputs[1].toTensor(), inputs[2].toTensor(), visible)};
  }
};

/// Bytes alive on one rank after a forward pass of a model of so many layers, above those before it.
int64_t kept(const Layer& layer, int64_t layers, const comm::Group& group, at::Device device) {
  const Config config = config_of(layer, layers);
  const auto model = on_meta([&] { return make_model(config.model); });
  set_precision(*model, layer.stream);
  const auto tensor = parallelize_module(*model, group, parallel_plan(*model, layer.sequence, layer.keep_gathered));
  const Attachment plain = layer.flash ? Attachment() : nn::attach(*model, model->attention_pattern(), std::make_shared<Unfused>());
  const Attachment recomputed = recompute_blocks(config, *model, pipeline_layout(config, 1));
  materialize(*model, 1, device);
  const at::Tensor tokens = at::zeros({layer.b, layer.s}, at::TensorOptions(at::kLong).device(device));
  const nn::SampleScope samples({.seed = 1, .step = 1});
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const at::Tensor loss = nn::call(*model, tokens, std::optional(tokens));
  return tracker.current();
}

/// Of one layer, by the difference of two models: embedding, head and loss drop out. All ranks together.
double bytes_per_layer(const Layer& layer) {
  int64_t bytes = 0;
  for (int rank = 0; rank < layer.t; ++rank) {
    const auto world = comm::World::dry(layer.t, rank, std::make_shared<comm::Recorder>());
    bytes += kept(layer, 2, world.group(), at::kMeta) - kept(layer, 1, world.group(), at::kMeta);
  }
  return static_cast<double>(bytes);
}

/// Sizes that t divides, and some that it does not.
std::vector<Layer> shapes(const Layer& base) {
  std::vector<Layer> shapes;
  for (const int t : {2, 3, 4, 8}) {
    for (const bool even : {true, false}) {
      Layer layer = base;
      layer.t = t;
      if (!even) layer.b = 1, layer.s = 509, layer.h = 1152, layer.heads = layer.kv_heads = 9, layer.ffn = layer.family == "gpt2" ? 4 * 1152 : 3001;
      shapes.push_back(layer);
    }
  }
  return shapes;
}

/// `formula`: bytes of a layer on all ranks together. 1%: two statistics a row and norm, and the places of a dropout mask's rows.
void expect_bytes(const std::vector<Layer>& layers, const std::function<double(const Layer&)>& formula) {
  const kernels::Bf16ProductsGuard multiplies(/*native=*/true);  // a processor without them keeps scores in fp32
  for (const Layer& layer : layers) {
    const double expected = formula(layer);
    EXPECT_NEAR(bytes_per_layer(layer), expected, 0.01 * expected) << layer.name();
  }
}

TEST(TensorMemory, OfAGpt2LayerIs8And24OverT) {
  expect_bytes(shapes({}), [](const Layer& l) { return l.stream_elements() * (8 * l.t + 24) + l.log_sum_exp(); });
  expect_bytes(shapes({.flash = false}), [](const Layer& l) { return l.stream_elements() * (8 * l.t + 24) + 2 * l.scores(); });
  expect_bytes(shapes({.flash = false, .recompute = "selective"}), [](const Layer& l) { return l.stream_elements() * (8 * l.t + 24); });
  expect_bytes(shapes({.recompute = "full"}), [](const Layer& l) { return l.stream_elements() * 2 * l.t; });
}

TEST(TensorMemory, OfAGpt2LayerWithSequencesIs32OverT) {
  expect_bytes(shapes({.sequence = true}), [](const Layer& l) { return l.stream_elements() * 32 + l.log_sum_exp(); });
  expect_bytes(shapes({.sequence = true, .flash = false}), [](const Layer& l) { return l.stream_elements() * 32 + 2 * l.scores(); });
  expect_bytes(shapes({.sequence = true, .flash = false, .recompute = "selective"}), [](const Layer& l) { return l.stream_elements() * 32; });
  expect_bytes(shapes({.sequence = true, .recompute = "full"}), [](const Layer& l) { return l.stream_elements() * 2; });
  expect_bytes(shapes({.sequence = true, .keep_gathered = true}), [](const Layer& l) { return l.stream_elements() * (32 + 4 * (l.t - 1)) + l.log_sum_exp(); });
}

TEST(TensorMemory, OfALlamaLayerFollowsItsWidths) {
  for (const bool sequence : {false, true}) {
    Layer grouped{.family = "llama", .kv_heads = 8, .ffn = 2816, .sequence = sequence};
    auto layers = shapes(grouped);
    grouped.kv_heads = 4, grouped.ffn = 2731;
    for (const int t : {2, 3, 4}) layers.push_back(grouped), layers.back().t = t;
    expect_bytes(layers, [&](const Layer& l) {
      const double f = static_cast<double>(l.ffn) / static_cast<double>(l.h), k = static_cast<double>(l.kv_heads) / static_cast<double>(l.heads);
      return l.stream_elements() * (8 * (sequence ? 1 : l.t) + 4 + 4 * k + 6 * f) + l.log_sum_exp();
    });
  }
}

/// A residual stream of fp32 is twice as wide where norms take it, and each product keeps the bf16 copy of its weight.
TEST(TensorMemory, OfTheUsualPrecisionHasAWideStreamAndCopiesOfWeights) {
  const auto copies = [](const Layer& l) { return 2.0 * 12 * static_cast<double>(l.h * l.h); };
  expect_bytes(shapes({.stream = Stream::Wide}), [&](const Layer& l) { return l.stream_elements() * (12 * l.t + 24) + l.log_sum_exp() + copies(l); });
  expect_bytes(shapes({.sequence = true, .stream = Stream::Wide}), [&](const Layer& l) { return l.stream_elements() * 36 + l.log_sum_exp() + copies(l); });
}

TEST(TensorMemory, OfADryRunIsThatOfARealOne) {
  for (const bool sequence : {false, true}) {
    for (const std::string family : {"gpt2", "llama"}) {
      const Layer layer{.family = family, .s = 15, .h = 24, .heads = 4, .kv_heads = 4, .ffn = 40, .t = 3, .sequence = sequence, .flash = family == "llama"};
      const auto body = [&](comm::World& world) {
        const auto dry = comm::World::dry(layer.t, world.rank(), std::make_shared<comm::Recorder>());
        EXPECT_EQ(kept(layer, 2, world.group(), at::kCPU), kept(layer, 2, dry.group(), at::kMeta)) << layer.name() << " rank " << world.rank();
      };
      comm::run_ranks(layer.t, body, {.backend = "shm"});
    }
  }
}

// Traffic.

constexpr int64_t kBatch = 2, kLength = 48, kDim = 48, kCostLayers = 2;
constexpr int64_t kStream = kBatch * kLength * kDim, kTokens = kBatch * kLength;

Config traffic_config(const std::string& family, std::vector<std::string> sets) {
  sets.insert(sets.end(), {"data.cache_dir=/", "model.family=" + family});
  if (family == "gpt2") sets.emplace_back("model.dropout=0.1");
  Config config = parse_config(
      "[model]\ndim = 48\nlayers = 2\nheads = 8\nffn_dim = 96\nvocab_size = 288\n[data]\nfiles = [\"none\"]\nseq_len = 48\n[batch]\nglobal_size = 2\n"
      "micro_size = 2\n[optim]\nlr = 1e-3\n[run]\nsteps = 2\nthreads = 1\n",
      "/", sets);
  resolve(config);
  return config;
}

/// What rank 0 of `world_size` sends in its second step. A layer counts as one, tensor parallelism's sums once a step as "step"; dp_shard's by operation.
std::map<std::string, int64_t> sent(const Config& config, int world_size) {
  validate(config, world_size);
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto world = comm::World::dry(world_size, 0, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  RankScope scope(config, 1);
  Stepper stepper(config, mesh, at::kMeta, scope);
  for (int step = 1; step <= 2; ++step) {
    recorder->clear();
    stepper.step(data::dry_batch(loader_options(config, mesh), step, at::kMeta));
  }
  std::map<std::string, int64_t> elements;
  for (const auto& record : recorder->records()) {
    if (record.dtype != at::kFloat) continue;  // the norm and the report, in fp64
    std::string place = record.group == "dp_shard" ? record.op : record.site.substr(0, record.site.find('.'));
    if (place == "layers") place = record.site.substr(0, record.site.find('.', place.size() + 1));
    if (record.group == "tp" || record.group == "dp_shard") elements[place == "tensor_parallel" ? "step" : place] += record.sent_bytes / 4;
  }
  return elements;
}

/// Elements that a rank sends to have S of them gathered or scattered. An all-reduce is two of these.
int64_t share(int t, int64_t elements) { return (t - 1) * elements / t; }

struct Form {
  std::vector<std::string> sets;
  int64_t gpt2, llama;  ///< gathers and scatters of the stream in a layer and micro-batch
};

const std::string kSequenceParallel = "tensor.sequence_parallel=true", kFullRecompute = "recompute.mode=full";

TEST(TensorTraffic, OfWholeModelsIsThatOfTheFormulas) {
  // Recompute ends with the last operator that saved something: a dropout after the last sum of a block, or the product before it.
  const std::vector<Form> forms = {{{}, 8, 8},
                                   {{kSequenceParallel}, 10, 10},
                                   {{kSequenceParallel, "tensor.keep_gathered=true"}, 8, 8},
                                   {{"recompute.mode=selective"}, 8, 8},
                                   {{kSequenceParallel, "recompute.mode=selective"}, 10, 10},
                                   {{kFullRecompute}, 12, 10},
                                   {{kSequenceParallel, kFullRecompute}, 12, 11},
                                   {{kSequenceParallel, kFullRecompute, "tensor.keep_gathered=true"}, 12, 11},
                                   {{"tensor.overlap=true"}, 8, 8},
                                   {{kSequenceParallel, "tensor.overlap=true"}, 10, 10},
                                   {{kSequenceParallel, kFullRecompute, "tensor.overlap=true"}, 12, 11}};
  for (const auto& [t, m] : {std::pair<int, int64_t>{2, 3}, {3, 1}, {4, 3}, {8, 1}}) {
    for (const std::string family : {"gpt2", "llama"}) {
      for (const Form& form : forms) {
        SCOPED_TRACE(fmt::format("{} t {} m {} {}", family, t, m, ::testing::PrintToString(form.sets)));
        auto sets = form.sets;
        sets.insert(sets.end(), {"mesh.tp=" + std::to_string(t), "batch.global_size=" + std::to_string(2 * m)});
        auto elements = sent(traffic_config(family, sets), t);
        const bool gpt2 = family == "gpt2", sequence = !form.sets.empty() && form.sets[0] == kSequenceParallel;
        for (int64_t layer = 0; layer < kCostLayers; ++layer) {
          EXPECT_EQ(elements["layers." + std::to_string(layer)], m * (gpt2 ? form.gpt2 : form.llama) * share(t, kStream));
        }
        EXPECT_EQ(elements["embed_tokens"], m * 2 * share(t, kStream));
        EXPECT_EQ(elements["head"], m * (2 * share(t, kStream) + 3 * 2 * share(t, kTokens)));
        // Weights of norms; GPT-2's biases of norms and row-wise layers, and the embedding of positions.
        const int64_t norms = (2 * kCostLayers + 1) * kDim, gpt2s = gpt2 ? norms + 2 * kCostLayers * kDim + kLength * kDim : 0;
        EXPECT_EQ(elements["step"], sequence ? 2 * share(t, norms + gpt2s) : 0);
        int64_t rest = 0;
        for (const auto& [place, sum] : elements) rest += sum;
        for (const char* place : {"layers.0", "layers.1", "embed_tokens", "head", "step"}) rest -= elements[place];
        EXPECT_EQ(rest, 0) << "nothing else";
      }
    }
  }
}

TEST(TensorTraffic, OfSharedKeysIsTheirGradientsOnceAStep) {
  const int64_t keys_and_values = 2 * 2 * (kDim / 8) * kDim * kCostLayers;  // two heads
  EXPECT_EQ(sent(traffic_config("llama", {"mesh.tp=4", "model.kv_heads=2", "batch.global_size=6"}), 4)["step"], 2 * share(4, keys_and_values));
  EXPECT_EQ(sent(traffic_config("llama", {"mesh.tp=2", "model.kv_heads=2"}), 2)["step"], 0) << "a head each";
}

TEST(TensorTraffic, OfTwoDimensionsIsBoth) {
  for (const std::string family : {"gpt2", "llama"}) {
    const int n = 2, t = 2, m = 3;
    const std::vector<std::string> sets{"mesh.tp=2", kSequenceParallel, "batch.global_size=12"};
    auto both = sets;
    both.insert(both.end(), {"mesh.dp_shard=2", "zero.stage=3", "zero.prefetch=0"});  // else what the next pass begins with is not gathered again
    auto elements = sent(traffic_config(family, both), n * t);
    EXPECT_EQ(elements["layers.0"], m * 10 * share(t, kStream)) << family;
    // Of the slices that tensor parallelism leaves: gathered for forward and for backward, and their gradients scattered.
    const auto model = on_meta([&] { return make_model(traffic_config(family, both).model); });
    const auto tensor = parallelize_module(*model, comm::World::dry(t, 0, std::make_shared<comm::Recorder>()).group(), parallel_plan(*model, true));
    int64_t slices = 0;
    for (const auto& parameter : model->parameters()) slices += parameter.numel();
    const int64_t padded = family == "llama" ? slices + kDim : slices;  // its norm and head are an odd number of rows
    EXPECT_EQ(elements["all_gather"], m * 2 * share(n, padded)) << family;
    EXPECT_EQ(elements["reduce_scatter"], m * share(n, padded)) << family;
  }
}

}  // namespace
}  // namespace tessera
