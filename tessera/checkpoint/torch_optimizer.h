#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/checkpoint/checkpoint.h"

/// Optimizers of libtorch (Adam, AdamW, SGD, Adagrad, RMSprop) in checkpoints. Their own save() knows parameters by position and holds what one rank has; here
/// state is saved under the parameters' logical names with the slices that the rank holds of them, as that of tessera's optimizers is, so that it loads in any
/// layout. AdamW and SGD use the names that ours do.
namespace tessera::checkpoint {

/// The state that `optimizer` has by now, as views named "optimizer.<state>.<parameter>". Its parameters are those of `model`, or what is updated in their
/// place (ShardedDataParallel::shards). Throws ConfigError for an optimizer of another kind and for a tensor that belongs to another model.
std::vector<SlicedTensor> optimizer_tensors(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer);

/// What is saved beside the tensors: the kind of optimizer, how many updates each parameter has had, and the learning rate of each. Collective: ranks may
/// update different parameters.
nlohmann::json optimizer_json(const torch::nn::Module& model, torch::optim::Optimizer& optimizer, const comm::Group& group);

/// Collective: writes `dir`/step-00000010 with model, buffers and optimizer (save() of checkpoint.h). `progress` is whatever the loop wants back, with
/// numbers that are finite (ConfigError). For a model that is sharded, between steps. Returns the folder.
std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           const comm::Group& group, const nlohmann::json& progress = nlohmann::json::object());
std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const optim::Optimizer& optimizer,
                           const comm::Group& group, const nlohmann::json& progress = nlohmann::json::object());

/// Several optimizers of libtorch, each over parameters of its own (embeddings apart; two wrappers of one module). They load together, in this order.
using Optimizers = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;
std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const Optimizers& optimizers,
                           const comm::Group& group, const nlohmann::json& progress = nlohmann::json::object());

/// The same of a model without an optimizer: an average of weights, a target network, what is done. Loaded by the load() that takes none.
std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const comm::Group& group,
                           const nlohmann::json& progress = nlohmann::json::object());

/// What a checkpoint gave back.
struct Resumed {
  int64_t step = 0;
  nlohmann::json progress;
  LoadReport report;
};

/// Fills model, buffers and optimizer from a checkpoint of any layout: wrap the model and make the optimizer first, as for a fresh start. Not collective.
/// Throws ConfigError, before anything is touched, with the full list of what does not fit. What communication hooks carried ("hook.") is left unread.
Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, torch::optim::Optimizer& optimizer, const LoadOptions& options = {});
Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, optim::Optimizer& optimizer, const LoadOptions& options = {});

Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, const Optimizers& optimizers, const LoadOptions& options = {});

/// The model alone (evaluation, generation).
Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, LoadOptions options = {});

}  // namespace tessera::checkpoint
