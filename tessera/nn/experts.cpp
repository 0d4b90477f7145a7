#include "tessera/nn/experts.h"

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include "tessera/core/error.h"
#include "tessera/kernels/grouped_linear.h"
#include "tessera/kernels/swiglu.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/dry_sizes.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/shared_casts.h"
#include "tessera/nn/weight_gradients.h"

namespace tessera::nn {

GroupedExpertsImpl::GroupedExpertsImpl(int64_t experts, int64_t dim, int64_t ffn_dim, double std, double residual_std)
    : experts_(experts), dim_(dim), ffn_dim_(ffn_dim) {
  require(experts >= 1 && dim >= 1 && ffn_dim >= 1, "GroupedExperts: experts = ", experts, ", dim = ", dim, " and ffn_dim = ", ffn_dim, " must be positive");
  const auto add = [&](const char* name, int64_t rows, int64_t columns, double deviation) {
    const at::Tensor weight = register_parameter(name, at::empty({experts * rows, columns}));
    set_init(weight, InitRule::normal(0, deviation));
    torch::nn::init::normal_(weight, 0, deviation);
    return weight;
  };
  w1 = add("w1", ffn_dim, dim, std);
  w2 = add("w2", dim, ffn_dim, residual_std);
  w3 = add("w3", ffn_dim, dim, std);
}

at::Tensor GroupedExpertsImpl::forward(const at::Tensor& x, const at::Tensor& counts) {
  if (bypassed(*this)) return call(*this, x, counts);
  require(x.dim() == 2 && x.size(1) == dim_ && counts.dim() == 1, "GroupedExperts: expects sorted tokens [N, ", dim_, "] and counts [E], not ", x.sizes(),
          " and ", counts.sizes());
  const auto dtype = compute_dtype().value_or(in_use(w1).scalar_type());
  const auto sizes = kernels::group_sizes(counts, x.size(0), fp8_ ? DryGroupsScope::now() : 0);
  const at::Tensor tokens = cast(x, dtype);
  const auto fp8 = fp8_ ? std::optional(Fp8Products{.out_dtype = dtype, .scaling = *fp8_}) : std::nullopt;
  const auto multiply = [&](const at::Tensor& rows, const at::Tensor& weight) {
    const at::Tensor used = fp8 ? in_use(weight) : cast_weight(in_use(weight), dtype);
    return grouped_with_weights_later(rows, used.view({counts.size(0), -1, used.size(1)}), weight, sizes, fp8);
  };
  return multiply(kernels::swiglu(multiply(tokens, w1), multiply(tokens, w3)), w2);
}

void GroupedExpertsImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::GroupedExperts(experts=" << experts_ << ", dim=" << dim_ << ", ffn_dim=" << ffn_dim_ << ")";
}

}  // namespace tessera::nn
