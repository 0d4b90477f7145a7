#pragma once

#include <torch/nn/options/batchnorm.h>

#include "tessera/comm/group.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

using BatchNormOptions = torch::nn::BatchNormOptions;

/// Batch normalization (arXiv:1502.03167) by the statistics of the samples of every rank of a group, as torch.nn.SyncBatchNorm: output, gradients and running
/// statistics are those of one device that holds the whole batch. Ranks may hold different numbers of samples, also none.
///   x [N, C, ...]   any float dtype; the arithmetic is fp32, of fp64 in its own
///   y [N, C, ...]   in x's dtype
/// Options, parameters (`weight`, `bias`) and buffers (`running_mean`, `running_var`, `num_batches_tracked`) are named as torch::nn::BatchNorm2d's. In
/// eval mode it communicates nothing: it uses the running statistics, or where it tracks none those of this rank's samples. Without `synchronize` the group is
/// of one: plain batch normalization.
///   traffic  training: one all-gather of 2 C + 1 numbers a rank forward, one all-reduce of 2 C backward
/// The batch is what one call sees on all ranks: under gradient accumulation each micro-batch has its own statistics, and accumulation is NOT a bigger batch.
class SyncBatchNormImpl : public Module {
 public:
  explicit SyncBatchNormImpl(int64_t num_features) : SyncBatchNormImpl(BatchNormOptions(num_features)) {}
  explicit SyncBatchNormImpl(const BatchNormOptions& options);

  at::Tensor forward(const at::Tensor& x);
  void reset_parameters();
  bool reset_buffers() override;
  void pretty_print(std::ostream& stream) const override;

  /// Shares statistics over `group` from the next call on.
  void synchronize(comm::Group group) { group_ = std::move(group); }
  const comm::Group& group() const noexcept { return group_; }

  BatchNormOptions options;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  void track(const at::Tensor& mean, const at::Tensor& variance, const at::Tensor& count);

  comm::Group group_;
};
TESSERA_MODULE(SyncBatchNorm);

/// Lets every SyncBatchNorm at or below `root` share its statistics over `group` (the data axes). Returns how many there are.
int64_t synchronize_batch_norms(torch::nn::Module& root, const comm::Group& group);

}  // namespace tessera::nn
