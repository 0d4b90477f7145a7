#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/optim/clip.h"

namespace tessera {

/// Clips the gradients of `model` by their global 2-norm, as torch.nn.utils.clip_grad_norm_ does on one process: multiplies them by
/// min(1, max_norm / (norm + 1e-6)). Right for a model without a wrapper and under every one (DistributedDataParallel, ShardedDataParallel,
/// FullyShardedDataParallel, several in one model), between backward and the optimizer's step: where gradients lie in parts, their terms are added up over the
/// ranks that hold them, tied parameters once. Returns the norm before clipping, an fp64 scalar on the gradients' device; nothing is read on the host.
/// Layers that parallelize_module or expert_parallel have cut are counted over those ranks, too, each element once; where ranks have terms of a gradient
/// (sequence parallelism, keys and values that they share) nn::sum_terms comes before. Collective where gradients lie in parts. Traffic: of each wrapper an
/// all-reduce of one number, and one for each group of ranks that cuts its layers besides. Throws ConfigError where a part of a wrapped module is asked for,
/// for terms that were never summed, for layers of which nothing says over which ranks they are cut, and for a part of a model whose other parts lie on other
/// ranks (the stages of pipeline::split).
at::Tensor clip_grad_norm(const torch::nn::Module& model, double max_norm);

/// The same of what one wrapper synchronizes.
at::Tensor clip_grad_norm(const GradientSynchronizer& synchronizer, double max_norm);

namespace optim {

/// The parameters of `model` as clip_grad_norm takes them together, whichever wrappers hold them: for whoever adds further ranks' (a pipeline's stages). Throws
/// what clip_grad_norm throws, but for a model without parameters, of which there are no groups.
std::vector<NormGroup> norm_groups(const torch::nn::Module& model);

}  // namespace optim

template <class Contained>
at::Tensor clip_grad_norm(const torch::nn::ModuleHolder<Contained>& model, double max_norm) {
  return clip_grad_norm(static_cast<const torch::nn::Module&>(*model.ptr()), max_norm);
}

}  // namespace tessera
