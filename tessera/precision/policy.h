#pragma once

#include <functional>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include "tessera/config/config.h"
#include "tessera/kernels/fp8.h"
#include "tessera/nn/parameter.h"

namespace tessera::precision {

/// Which dtype carries what. Norms, softmax, loss and the residual stream are fp32 whatever it says.
struct Policy {
  at::ScalarType params = at::kFloat;           ///< the weights that forward and backward use
  at::ScalarType compute = at::kFloat;          ///< operands of matrix products and attention, and what layers hand to each other between them
  at::ScalarType reduce = at::kFloat;           ///< gradients on the network
  at::ScalarType master = at::kFloat;           ///< the copy that the optimizer updates; params' own dtype: there is no second copy
  std::optional<kernels::Fp8Scaling> fp8 = {};  ///< linear layers multiply in fp8; everything around them is in `compute`
  bool tf32 = false;                            ///< fp32 products may round their operands to TF32 on a device that has it

  /// The optimizer keeps weights apart from those of the model.
  bool has_masters() const { return params != at::kFloat && master == at::kFloat; }
  /// The model's 16-bit weights are the only ones: updates are rounded stochastically.
  bool rounds_stochastically() const { return params != at::kFloat && master != at::kFloat; }

  /// What gradients are summed in, over micro-batches and ranks, where it is not the parameters' own dtype: fp32 under 16-bit weights, unless those are bf16
  /// and `reduce` is, too. A sum of fp16 gradients would overflow.
  std::optional<at::ScalarType> gradient_dtype() const;
};

/// Throws ConfigError naming the key where `device` has no product of a dtype that `policy` computes in: each is tried on a few numbers. Nothing on meta.
void require_support(const Policy& policy, at::Device device);

/// Reads `precision.*` of a configuration that has passed validate() and, where it says `auto`, settle_compute().
Policy policy_from(const PrecisionConfig& config);

/// Gives every interceptable module below `root` its compute dtype, and every parameter the dtype of `policy.params`. To be called before memory is given
/// (on_meta), or at once after construction: values are rounded, and what was taken of a parameter before (gradient hooks) is lost. Plain torch::nn modules
/// compute in the dtype of their parameters: throws ConfigError, naming precision.compute, where no module with parameters takes another one, or, of fp8, no
/// linear layer of ours.
void apply(torch::nn::Module& root, const Policy& policy);

/// Which parameters below `root` their only use casts to `policy.compute` first: weights and biases of interceptable linear layers, and those of experts, that
/// are no one else's, where weights are wider than `compute` and products are not in fp8 (which rounds them by itself). Gathered in that dtype already
/// (FullyShardOptions::param_dtype and cast), they give the same bits at half the traffic, and no copy of theirs is kept for backward.
std::function<bool(const nn::NamedParameter&)> cast_at_use(const torch::nn::Module& root, const Policy& policy);

/// Allows or forbids TF32 in fp32 products and convolutions. The switch is libtorch's and holds for the whole process, so ranks that are threads share it.
/// Returns whether `device` multiplies in TF32 now: a CPU never does, and computes in fp32.
bool use_tf32(bool allowed, at::Device device);

}  // namespace tessera::precision
