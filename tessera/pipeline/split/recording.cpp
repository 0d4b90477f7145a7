#include "tessera/pipeline/split/recording.h"

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/core/hash.h"

namespace tessera::tape {

namespace {

/// Whether some split point lies in the module, so that its call must not be one node.
bool is_above_a_split(const std::string& path, const pipeline::SplitSpec& splits) {
  for (const pipeline::Split& split : splits) {
    if (split.path != path && is_under(split.path, path)) return true;
  }
  return splits.empty() && path.empty();
}

uint64_t fingerprint_of(const Graph& graph, const Stages& stages) {
  const std::string text = to_string(graph);
  Hasher hasher;
  hasher.update(text.data(), text.size());
  for (const StagePlan& stage : stages.stages) hasher.update(&stage.begin, sizeof stage.begin);
  for (const Crossing& crossing : stages.crossings) {
    hasher.update(&crossing.gradient, sizeof crossing.gradient);
    for (const int one : {crossing.value, crossing.from, crossing.to}) hasher.update(&one, sizeof one);  // no operator shows what a module hooks
  }
  constexpr size_t most = 1 << 16;  // of a constant, so that a large one costs nothing
  std::set<int> written;            // by operators, and nothing before
  for (const Node& node : graph.nodes) {
    for (const int value : node.writes) written.insert(graph.values[static_cast<size_t>(value)].storage);
  }
  for (const Value& value : graph.values) {
    if (value.kind != Value::Kind::Constant || written.contains(value.storage) || !value.constant.defined() || !value.constant.is_cpu() ||
        !value.constant.is_contiguous())
      continue;
    hasher.update(value.constant.const_data_ptr(), std::min(value.constant.nbytes(), most));
  }
  return hasher.value();
}

}  // namespace

State state_of(const torch::nn::Module& root) {
  State state;
  for (const auto& item : root.named_parameters()) state.emplace(item.key(), item.value());
  for (const auto& item : root.named_buffers()) state.emplace(item.key(), item.value());
  return state;
}

Recording make_recording(torch::nn::Module& root, const Forward& forward, const std::vector<at::Tensor>& inputs, const pipeline::SplitSpec& splits,
                         const State& state, const Graph* compared) {
  const auto inside = [&](const std::string& path) { return is_above_a_split(path, splits); };
  const auto graph = std::make_shared<const Graph>(record(root, forward, inputs, inside, compared));
  Recording recording{
      .graph = graph, .stages = plan_stages(*graph, choose_cuts(root, *graph, splits)), .programs = {}, .by_layout = storages_by_layout(*graph)};
  for (int stage = 0; stage < recording.stages.size(); ++stage) recording.programs.emplace_back(graph, recording.stages, stage, state);
  recording.fingerprint = fingerprint_of(*graph, recording.stages);
  return recording;
}

std::string mode_of(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::string mode = at::GradMode::is_enabled() ? "gradients" : "no gradients";
  mode += to_string(Autocast::now());
  // The number of modules in each run of one mode: short for all of a large model.
  size_t run = 0;
  for (size_t i = 0; i < modules.size(); ++i, ++run) {
    if (i == 0 || modules[i]->is_training() != modules[i - 1]->is_training()) {
      if (i > 0) mode += std::to_string(run);
      mode += modules[i]->is_training() ? ", training " : ", evaluating ";
      run = 0;
    }
  }
  return mode + std::to_string(run);
}

}  // namespace tessera::tape
