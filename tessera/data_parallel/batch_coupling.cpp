#include "tessera/data_parallel/batch_coupling.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/core/error.h"
#include "tessera/nn/sync_batch_norm.h"

namespace tessera {
namespace {

template <class BatchNormImpl>
bool normalizes_by_batch(const torch::nn::Module& module) {
  const auto* norm = dynamic_cast<const BatchNormImpl*>(&module);
  return norm != nullptr && (norm->is_training() || !norm->options.track_running_stats());
}

/// Divides each row's gradient by how often the micro-batch looks it up.
template <class EmbeddingImpl>
bool scales_by_frequency(const torch::nn::Module& module) {
  const auto* embedding = dynamic_cast<const EmbeddingImpl*>(&module);
  return embedding != nullptr && embedding->options.scale_grad_by_freq() && embedding->weight.requires_grad();
}

/// A SyncBatchNorm has the statistics of every rank of its group, but of one micro-batch; in eval mode without running statistics, of this rank alone.
void collect_synchronized(const torch::nn::Module& module, const std::string& path, int ranks, int64_t accumulation, std::vector<BatchCoupledModule>& found) {
  const auto* norm = dynamic_cast<const nn::SyncBatchNormImpl*>(&module);
  if (norm == nullptr || !(norm->is_training() || !norm->options.track_running_stats())) return;
  const int together = norm->is_training() ? norm->group().size() : 1;
  if (together < ranks || accumulation > 1) found.push_back({path, "SyncBatchNorm"});
}

void collect(const torch::nn::Module& module, const std::string& path, int ranks, int64_t accumulation, std::vector<BatchCoupledModule>& found) {
  if (normalizes_by_batch<torch::nn::BatchNorm1dImpl>(module)) found.push_back({path, "BatchNorm1d"});
  if (normalizes_by_batch<torch::nn::BatchNorm2dImpl>(module)) found.push_back({path, "BatchNorm2d"});
  if (normalizes_by_batch<torch::nn::BatchNorm3dImpl>(module)) found.push_back({path, "BatchNorm3d"});
  collect_synchronized(module, path, ranks, accumulation, found);
  if (scales_by_frequency<torch::nn::EmbeddingImpl>(module)) found.push_back({path, "Embedding with scale_grad_by_freq"});
  if (scales_by_frequency<torch::nn::EmbeddingBagImpl>(module)) found.push_back({path, "EmbeddingBag with scale_grad_by_freq"});
  for (const auto& child : module.named_children()) {
    collect(*child.value(), path.empty() ? child.key() : path + "." + child.key(), ranks, accumulation, found);
  }
}

}  // namespace

std::vector<BatchCoupledModule> find_batch_coupled(const torch::nn::Module& root, int ranks, int64_t accumulation) {
  std::vector<BatchCoupledModule> found;
  collect(root, "", ranks, accumulation, found);
  return found;
}

std::string batch_coupling_report(const torch::nn::Module& root, int ranks, int64_t accumulation) {
  if (ranks <= 1 && accumulation <= 1) return {};
  const std::vector<BatchCoupledModule> found = find_batch_coupled(root, ranks, accumulation);
  if (found.empty()) return {};
  constexpr size_t max_named = 8;
  std::string names;
  for (size_t i = 0; i < std::min(found.size(), max_named); ++i) {
    names += detail::concat(i ? ", '" : "'", found[i].path, "' (", found[i].type, ")");
  }
  if (found.size() > max_named) names += detail::concat(" and ", found.size() - max_named, " more");
  return detail::concat(
      names, found.size() == 1 ? " goes" : " go", " by the statistics of one micro-batch on one rank, not of the global batch (", ranks,
      " data-parallel ranks x ", accumulation,
      " micro-batches), so training differs from one device with the whole batch: share them between ranks with SyncBatchNorm and synchronize_batch_norms, "
      "with one micro-batch per rank (accumulation is no bigger batch to it), use LayerNorm or GroupNorm, freeze the running statistics "
      "with eval(), leave scale_grad_by_freq out, train on one rank with batch.micro_size = batch.global_size, or accept it with run.batch_coupled = "
      "\"report\"");
}

}  // namespace tessera
