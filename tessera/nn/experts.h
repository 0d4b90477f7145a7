#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/fp8.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// E gated feed-forward networks, w2(silu(w1 x) * w3 x) (arXiv:2002.05202), each applied to the tokens that were sorted to it.
///   x [N, D]       tokens in the order of experts (kernels::Dispatch)
///   counts [E]     int64: how many of them each expert has; rows behind the last are not looked at, and give zero
///   result [N, D]  in the compute dtype
/// Weights are stacked row by row, so that all that cuts rows (ZeRO, fully_shard, experts over ranks) cuts them finely: w1, w3 [E * F, D], w2 [E * D, F];
/// expert e has the rows e * F .. (e + 1) * F, or e * D .. How many experts are here follows from `counts`, so a rank that holds the rows of some experts runs
/// the same code on their tokens. Sorted tokens in, tokens out: the place to attach what sends tokens to other ranks.
/// Kept for backward: x, three products [N, F], and the cast weights (fp8: the weights as they are).
class GroupedExpertsImpl : public Module {
 public:
  /// `std`, `residual_std`: of the initial weights w1, w3 and of w2.
  GroupedExpertsImpl(int64_t experts, int64_t dim, int64_t ffn_dim, double std, double residual_std);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& counts);
  void pretty_print(std::ostream& stream) const override;
  /// As nn::Linear's: products in fp8, each expert's operands by scales of their own.
  void set_fp8(std::optional<kernels::Fp8Scaling> scaling) noexcept { fp8_ = scaling; }
  int64_t experts() const noexcept { return experts_; }  ///< of the whole module, wherever they are
  int64_t ffn_dim() const noexcept { return ffn_dim_; }  ///< of a whole expert

  at::Tensor w1, w2, w3;

 private:
  int64_t experts_, dim_, ffn_dim_;
  std::optional<kernels::Fp8Scaling> fp8_;
};
TESSERA_MODULE(GroupedExperts);

}  // namespace tessera::nn
