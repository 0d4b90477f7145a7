#include "tessera/quantize/quantize.h"

#include <cmath>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parameter.h"
#include "tessera/quantize/sharded_weights.h"

// One weight after the other is made whole, brought into its codes, and let go of, so that a model need not fit in its own type. Scales are those of the whole,
// of which every rank that holds a part makes all: no rank has to ask another, and a block that is cut has one scale.

namespace tessera::quantize {
namespace {

/// Of fp32 on the host, without memory of its size.
bool is_finite(const at::Tensor& whole) {
  if (whole.numel() == 0) return true;
  const auto [least, most] = at::aminmax(whole);  // a NaN is both
  return std::isfinite(least.item<float>()) && std::isfinite(most.item<float>());
}

/// In the order of the model, each once.
std::vector<std::pair<std::string, nn::LinearImpl*>> linears_named(torch::nn::Module& root, const std::vector<std::string>& patterns, bool part_of_model) {
  std::vector<std::pair<std::string, nn::LinearImpl*>> linears;
  std::unordered_set<const torch::nn::Module*> taken;
  for (const std::string& pattern : patterns) {
    if (!part_of_model) nn::modules_matching(root, pattern);  // or a refusal with the nearest path
    std::string other;
    bool any = part_of_model;
    for (const auto& item : root.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
      if (!nn::matches(pattern, item.key())) continue;
      other = item.key();
      require(dynamic_cast<const torch::nn::LinearImpl*>(item.value().get()) == nullptr, "quantize: '", other,
              "' is libtorch's own Linear, which multiplies by nothing but its weight; build it as tessera::nn::Linear");
      auto* const linear = dynamic_cast<nn::LinearImpl*>(item.value().get());
      if (linear == nullptr) continue;
      any = true;
      if (linear->weight.defined() && taken.insert(linear).second) linears.emplace_back(item.key(), linear);
    }
    require(any, "quantize: '", pattern, "' names '", other, "' and no linear layer; name linear layers, such as layers.*.attention.*");
  }
  return linears;
}

kernels::MatrixPart part_of(const Slice& held) {
  invariant(held.boxes.size() <= 1, "'", held.name, "' is in several boxes, and cannot be quantized");
  kernels::MatrixPart part{.whole_columns = held.shape.at(1)};
  if (held.boxes.empty()) return part;
  const Box& box = held.boxes.front();
  return {.row = box.offset[0], .rows = box.size[0], .column = box.offset[1], .columns = box.size[1], .whole_columns = held.shape.at(1)};
}

using Product = std::function<at::Tensor(const at::Tensor& x)>;

Product product_of(std::shared_ptr<const kernels::QuantizedMatrix> matrix) {
  return [matrix = std::move(matrix)](const at::Tensor& x) { return kernels::quantized_linear(x, matrix); };
}

Product product_of(std::shared_ptr<ShardedWeights> weights, size_t index, const Sharding& sharding) {
  return [weights = std::move(weights), index, group = sharding.group, stays = !sharding.reshard_after_forward](const at::Tensor& x) {
    if (at::GradMode::is_enabled() && x.requires_grad()) group.in_backward().by_graphs = true;  // or by what is computed again there
    if (stays) return kernels::quantized_linear(x, weights->gather(index));
    return kernels::quantized_linear(x, [weights, index] { return weights->gather(index); });
  };
}

}  // namespace

std::vector<std::string> weights_named(torch::nn::Module& root, const std::vector<std::string>& modules) {
  nn::assign_paths(root);
  std::vector<std::string> names;
  for (const auto& [path, linear] : linears_named(root, modules, /*part_of_model=*/false)) names.push_back(nn::slice_of(linear->weight).name);
  return names;
}

Report quantize_weights(torch::nn::Module& root, const Options& options, at::Device device, const Fill& fill, bool part_of_model) {
  nn::assign_paths(root);
  Report report;
  const auto shares = std::make_shared<ShardedWeights>(options.sharding.prefetch);
  for (const auto& [path, linear] : linears_named(root, options.modules, part_of_model)) {
    const Slice held = nn::slice_of(linear->weight);
    require(
        !linear->weight.requires_grad(), "quantize: '", held.name,
        "' is to be trained, and a weight in fewer bits takes no gradient; freeze it (lora.modules trains matrices beside frozen weights), or leave it out of "
        "quantize.modules and lora.trained");
    require(!nn::keeps_memory(linear->weight), "quantize: '", held.name, "' is a part of a sharded unit; call quantize_weights before fully_shard");
    at::Tensor whole;
    if (!device.is_meta()) {
      require(fill || (!linear->weight.is_meta() && held.is_whole()), "quantize: '", held.name,
              linear->weight.is_meta() ? "' is on meta" : "' is cut over ranks",
              ", and blocks are of whole matrices; give quantize_weights a `fill`, which brings each whole weight");
      whole = fill ? at::empty(held.shape, at::TensorOptions(at::kCPU).dtype(at::kFloat)) : linear->weight.detach().to(at::kCPU, at::kFloat);
      if (fill) fill(linear->weight, whole);
      require(is_finite(whole), "quantize: '", held.name,
              "' holds numbers that are not finite, which no code stands for; take weights from elsewhere, or leave it out of quantize.modules");
    }
    const MemoryScope scope(MemoryCategory::Parameters);
    const auto matrix = std::make_shared<kernels::QuantizedMatrix>(kernels::quantize(whole, options.form, part_of(held), device));
    const bool shared = options.sharding.group.size() > 1 && !nn::matches(options.sharding.whole, path);
    report.weights.push_back(held.name);
    if (!shared) {
      linear->set_product(product_of(matrix));
      report.elements += matrix->part.rows * matrix->part.columns;
      report.bytes += matrix->bytes();
      continue;
    }
    const size_t index = shares->add(ShardedMatrix(*matrix, options.sharding.group));
    linear->set_product(product_of(shares, index, options.sharding));
    report.elements += shares->at(index).rows() * matrix->part.columns;
    report.bytes += shares->at(index).bytes();
  }
  return report;
}

}  // namespace tessera::quantize
