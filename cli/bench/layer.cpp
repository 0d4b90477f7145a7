#include "cli/bench/layer.h"

#include <map>
#include <memory>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include "cli/bench/measure.h"
#include "cli/bench/workload.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/engine.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/models/llama.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/precision/policy.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::bench {
namespace {

constexpr const char* kBlock = "layers.0";

/// A model of one block; embedding and head, which nobody calls, are as small as they can be.
ModelConfig model_config(const LayerCase& what, int ranks) {
  Config config;
  config.model.family = "llama";
  config.model.dim = what.hidden;
  config.model.heads = what.heads;
  config.model.layers = 1;
  config.model.vocab_size = ranks;
  config.data.seq_len = what.tokens;
  resolve(config);
  return config.model;
}

template <class Module>
Module& module_at(torch::nn::Module& root, const std::string& path) {
  const auto found = std::dynamic_pointer_cast<Module>(nn::modules_matching(root, path).at(0).second);
  invariant(found != nullptr, path, " is another module");
  return *found;
}

/// The block of this rank, with everything that a pass needs.
class Layer {
 public:
  Layer(const comm::Group& group, const LayerCase& what) : device_(what.device) {
    const ModelConfig config = model_config(what, group.size());
    model_ = on_meta([&] { return make_model(config); });
    precision::apply(*model_, {.compute = what.compute});
    ParallelPlan plan = parallel_plan(*model_, what.sequence_parallel);
    // In a model the embedding hands parts of the sequence on; here the block is handed the whole.
    if (what.sequence_parallel) plan.emplace_back(kBlock, PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Sequence});
    tensor_ = parallelize_module(*model_, group, plan, {.overlap = what.overlap, .watch_terms = false});  // it would be timed, and nothing is updated
    materialize(*model_, /*seed=*/1, device_);
    block_ = &module_at<LlamaBlockImpl>(*model_, kBlock);
    std::tie(cos_, sin_) = nn::call(module_at<nn::RotaryEmbeddingImpl>(*model_, "rotary"), what.tokens, std::optional<at::Tensor>(), device_);
    const int64_t own = what.sequence_parallel ? chunk(what.tokens, group.size(), group.rank()).second : what.tokens;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);  // the same x on every rank
    x_ = at::randn({1, what.tokens, what.hidden}, generator).to(device_);
    gradient_ = at::randn({1, own, what.hidden}, generator).to(device_);
  }

  /// Forward and backward; gradients of parameters are made anew, as after zero_grad.
  void pass() {
    const std::optional<at::Tensor> none;
    nn::call(*block_, x_, cos_, sin_, none, none).backward(gradient_);
    for (auto& parameter : block_->parameters()) parameter.mutable_grad().reset();
    wait_for(device_);
  }

 private:
  at::Device device_;
  std::shared_ptr<LanguageModel> model_;
  std::unique_ptr<TensorParallel> tensor_;
  LlamaBlockImpl* block_ = nullptr;
  at::Tensor cos_, sin_, x_, gradient_;
};

/// The collectives of a pass on tensors of their own.
class Replay {
 public:
  Replay(const comm::Group& group, const std::vector<CollectiveEvent>& records, at::Device device) {
    for (const auto& record : records) {
      auto& workload = workloads_[{record.op, record.bytes}];
      if (!workload)
        workload = std::make_unique<bench::Workload>(group, bench::Case{.op = record.op, .bytes = record.bytes, .dtype = record.dtype, .device = device});
      order_.push_back(workload.get());
    }
  }
  void run() {
    for (auto* workload : order_) workload->run();
  }

 private:
  std::map<std::pair<std::string, int64_t>, std::unique_ptr<bench::Workload>> workloads_;
  std::vector<bench::Workload*> order_;
};

/// A group of the same size whose collectives return at once, and are recorded.
comm::Group dry(const comm::Group& group, std::shared_ptr<comm::Recorder> recorder) {
  const comm::GroupInfo info{.name = "tp", .rank = group.rank(), .size = group.size(), .timeout = group.timeout()};
  return {info, comm::make_dry_engine(std::move(recorder), info)};
}

/// What a pass sends where nothing overlaps: whole collectives, as replayed alone.
std::vector<CollectiveEvent> collectives_of(const comm::Group& group, LayerCase what) {
  what.overlap = false;
  const auto recorder = std::make_shared<comm::Recorder>();
  Layer(dry(group, recorder), what).pass();
  return recorder->records();
}

/// What the layer costs where collectives return at once; counts on the way.
void measure_compute(const comm::Group& group, LayerRow& row, const bench::Limits& limits) {
  const auto recorder = std::make_shared<comm::Recorder>();
  Layer layer(dry(group, recorder), row.what);
  const auto counter = std::make_shared<nn::FlopCounter>();
  {
    const nn::OperatorScope counted(counter);
    layer.pass();
  }
  row.flops = counter->flops();
  for (const auto& record : recorder->records()) row.sent_bytes += record.sent_bytes;
  row.compute = bench::measure(
      group,
      [&] {
        layer.pass();
        recorder->clear();
      },
      limits);
}

}  // namespace

LayerRow measure_layer(const comm::Group& group, const LayerCase& what, const bench::Limits& limits) {
  LayerRow row{.what = what, .ffn_dim = model_config(what, group.size()).ffn_dim.value(), .ranks = group.size(), .backend = engine_for(group, what.device)};
  measure_compute(group, row, limits);
  Replay collectives(group, collectives_of(group, what), what.device);
  row.communication = bench::measure(group, [&] { collectives.run(); }, limits);
  Layer layer(group, what);
  row.layer = bench::measure(group, [&] { layer.pass(); }, limits);
  return row;
}

}  // namespace tessera::bench
