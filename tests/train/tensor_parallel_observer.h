#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/config/config.h"
#include "tessera/layout/slice.h"
#include "tessera/models/model.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tests/test_device.h"

/// One forward and backward pass under tensor parallelism, as probes around and inside of every module and a recorder on each rank see it.
namespace tessera::testing_support {

inline constexpr int64_t kPositions = 6, kHidden = 8, kFeedForward = 12, kHeads = 4, kVocabulary = 16;

/// One call of a module on one rank. Counts are of the collectives that had begun by then.
struct Call {
  std::string path;
  std::array<int64_t, 2> input{}, taken{}, made{}, output{};  ///< outside of what is attached, inside of it, and back
  size_t entered = 0, began = 0, ended = 0, left = 0;
  Slice weight{};       ///< no shape where the module has none, or one of a single dimension
  at::Tensor source{};  ///< what went in, kept so that no later tensor takes its place in memory

  const void* identity() const { return source.const_data_ptr(); }
};

/// What one rank sees of a pass.
struct Log {
  std::vector<Call> calls;
  std::vector<CollectiveEvent> records;
  size_t forward = 0;  ///< of the records
};

/// Positions and features of [1, S, ...]; a scalar is [1, 1].
inline std::array<int64_t, 2> matrix(const at::Tensor& x) {
  if (x.dim() == 0) return {1, 1};
  return {x.dim() == 1 ? x.size(0) : x.size(1), x.dim() <= 2 ? 1 : x.numel() / x.size(0) / x.size(1)};
}

class Observer {
 public:
  explicit Observer(std::shared_ptr<comm::Recorder> recorder) : recorder_(std::move(recorder)) {}
  size_t begun() const { return recorder_->records().size(); }
  Log log;
  std::vector<size_t> open;  ///< calls under way, the innermost last

 private:
  std::shared_ptr<comm::Recorder> recorder_;
};

/// Outside of what tensor parallelism attaches.
class Outer final : public nn::Interceptor {
 public:
  explicit Outer(std::shared_ptr<Observer> observer) : observer_(std::move(observer)) {}
  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    Observer& seen = *observer_;
    const size_t index = seen.log.calls.size();
    Call call{.path = module.path(), .input = matrix(inputs[0].toTensor()), .entered = seen.begun()};
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      if (parameter.value().dim() == 2) call.weight = nn::slice_of(parameter.value());
    }
    seen.log.calls.push_back(call);
    seen.open.push_back(index);
    nn::Values outputs = next(std::move(inputs));
    seen.open.pop_back();
    seen.log.calls[index].output = matrix(outputs[0].toTensor());
    seen.log.calls[index].left = seen.begun();
    return outputs;
  }

 private:
  std::shared_ptr<Observer> observer_;
};

/// Inside of it.
class Inner final : public nn::Interceptor {
 public:
  explicit Inner(std::shared_ptr<Observer> observer) : observer_(std::move(observer)) {}
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    Observer& seen = *observer_;
    const size_t index = seen.open.back();
    seen.log.calls[index].taken = matrix(inputs[0].toTensor());
    seen.log.calls[index].source = inputs[0].toTensor().detach();
    seen.log.calls[index].began = seen.begun();
    nn::Values outputs = next(std::move(inputs));
    seen.log.calls[index].made = matrix(outputs[0].toTensor());
    seen.log.calls[index].ended = seen.begun();
    return outputs;
  }

 private:
  std::shared_ptr<Observer> observer_;
};

inline ModelConfig one_block() {
  Config config;
  config.model.family = "llama";
  config.model.dim = kHidden;
  config.model.ffn_dim = kFeedForward;
  config.model.heads = kHeads;
  config.model.layers = 1;
  config.model.vocab_size = kVocabulary;
  config.data.seq_len = kPositions;
  resolve(config);
  return config.model;
}

/// A linear layer by itself.
struct OneLinearImpl : nn::Module {
  OneLinearImpl() : w(nn::LinearOptions(kHidden, kFeedForward).bias(false)) {
    register_module("w", w);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return w(x); }
  nn::Linear w;
};
TESSERA_MODULE(OneLinear);

/// What is shown: a module that is made on each rank, its plan, and a pass that ends with backward.
struct Scene {
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<ParallelPlan(torch::nn::Module&)> plan;
  std::vector<std::string> probed;
  std::function<void(torch::nn::Module&, int rank, int ranks)> pass;
};

inline Scene language_model(bool sequence_parallel) {
  return {.make = [] { return std::static_pointer_cast<torch::nn::Module>(make_model(one_block())); },
          .plan = [=](torch::nn::Module& module) { return parallel_plan(dynamic_cast<LanguageModel&>(module), sequence_parallel); },
          .probed = {"embed_tokens", "layers.0.*_norm", "layers.0.attention", "layers.0.attention.*", "layers.0.feed_forward", "layers.0.feed_forward.*",
                     "norm", "head"},
          .pass =
              [](torch::nn::Module& module, int, int) {
                const at::Tensor tokens = at::arange(kPositions, at::kLong).unsqueeze(0);
                dynamic_cast<LanguageModel&>(module).loss_sum(tokens, tokens).backward();
              }};
}

inline Scene one_linear(const ParallelStyle& style, bool takes_part) {
  return {.make = [] { return OneLinear().ptr(); },
          .plan = [=](torch::nn::Module&) { return ParallelPlan{{"w", style}}; },
          .probed = {"w"},
          .pass =
              [=](torch::nn::Module& module, int rank, int ranks) {
                const auto [begin, size] = takes_part ? chunk(kHidden, ranks, rank) : std::pair<int64_t, int64_t>(0, kHidden);
                const at::Tensor x = at::ones({1, kPositions, kHidden}).narrow(2, begin, size).requires_grad_();
                nn::call(dynamic_cast<OneLinearImpl&>(module), x).sum().backward();
              }};
}

inline Log observe(const Scene& scene, comm::World& world, int ranks) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const comm::GroupInfo info{.name = "tp", .rank = world.rank(), .size = ranks, .timeout = std::chrono::seconds(60)};
  const comm::Group group = ranks == 1 ? comm::Group::self() : comm::Group(info, comm::make_record_engine(recorder, info, world.group().engine()));
  const auto module = on_meta(scene.make);
  const auto observer = std::make_shared<Observer>(recorder);
  std::vector<Attachment> probes;
  for (const auto& pattern : scene.probed) probes.push_back(nn::attach(*module, pattern, std::make_shared<Inner>(observer)));
  const auto tensor = ranks == 1 ? nullptr : parallelize_module(*module, group, scene.plan(*module), {.watch_terms = false});
  for (const auto& pattern : scene.probed) probes.push_back(nn::attach(*module, pattern, std::make_shared<Outer>(observer)));
  materialize(*module, 1, testing_support::test_device());
  scene.pass(*module, world.rank(), ranks);
  Log log = std::move(observer->log);
  log.records = recorder->records();
  for (const Call& call : log.calls) log.forward = std::max(log.forward, call.left);
  return log;
}

/// What each of `ranks` ranks sees; one rank has the whole and no plan.
inline std::vector<Log> observe(const Scene& scene, int ranks) {
  std::vector<Log> logs(ranks);
  comm::run_ranks(ranks, [&](comm::World& world) { logs[world.rank()] = observe(scene, world, ranks); });
  return logs;
}

}  // namespace tessera::testing_support
