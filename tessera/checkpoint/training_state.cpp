#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/core/error.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

namespace {

Slice renamed(Slice slice, std::string name) {
  slice.name = std::move(name);
  return slice;
}

}  // namespace

std::vector<SlicedTensor> parameter_tensors(const torch::nn::Module& model) {
  std::vector<SlicedTensor> tensors;
  for (const auto& parameter : nn::unique_parameters(model)) tensors.push_back({parameter.tensor, renamed(nn::slice_of(parameter.tensor), parameter.name)});
  return tensors;
}

std::vector<SlicedTensor> gradient_tensors(const torch::nn::Module& model) {
  auto tensors = parameter_tensors(model);
  for (auto& held : tensors) held.tensor = held.tensor.grad();
  return tensors;
}

std::vector<SlicedTensor> training_tensors(const torch::nn::Module& model, const optim::Optimizer* optimizer) {
  auto tensors = parameter_tensors(model);
  for (auto& held : tensors) held.slice.name.insert(0, "model.");
  for (const auto& buffer : model.named_buffers()) {
    if (buffer.value().defined()) tensors.push_back({buffer.value(), Slice::whole("buffer." + buffer.key(), buffer.value().sizes().vec())});
  }
  if (optimizer == nullptr) return tensors;
  for (auto& state : optimizer->state()) {
    tensors.push_back({state.tensor, renamed(std::move(state.slice), "optimizer." + state.state + "." + state.parameter)});
  }
  return tensors;
}

nlohmann::json optimizer_json(const optim::Optimizer& optimizer) { return {{"kind", optimizer.kind()}, {"update_counts", optimizer.update_counts()}}; }

void restore_optimizer(const nlohmann::json& saved, optim::Optimizer& optimizer) {
  try {
    const auto kind = saved.at("kind").get<std::string>();
    require(kind == optimizer.kind(), "optim.name = ", optimizer.kind(), ": the checkpoint's optimizer is ", kind);
    std::map<std::string, int64_t> counts;
    for (const auto& [name, count] : saved.at("update_counts").items()) counts[name] = to_integer(count);
    optimizer.set_update_counts(counts);
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("the checkpoint's optimizer entry cannot be read: ", error.what()));
  }
}

}  // namespace tessera::checkpoint
