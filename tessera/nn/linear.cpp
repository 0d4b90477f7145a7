#include "tessera/nn/linear.h"

#include <cmath>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include "tessera/core/error.h"
#include "tessera/kernels/products.h"
#include "tessera/kernels/widen.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/shared_casts.h"
#include "tessera/nn/weight_gradients.h"

namespace tessera::nn {

at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) { return dtype ? kernels::widen(tensor, *dtype) : tensor; }

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) { return kernels::linear(x, weight, bias); }

LinearImpl::LinearImpl(const LinearOptions& options) : options(options) {
  require(options.in_features() >= 0 && options.out_features() >= 0, "Linear: in_features ", options.in_features(), " and out_features ",
          options.out_features(), " must not be negative");
  weight = register_parameter("weight", at::empty({options.out_features(), options.in_features()}));
  if (options.bias()) bias = register_parameter("bias", at::empty({options.out_features()}));
  const double bound = options.in_features() > 0 ? 1.0 / std::sqrt(static_cast<double>(options.in_features())) : 0.0;
  for (const at::Tensor& parameter : parameters(/*recurse=*/false)) set_init(parameter, InitRule::uniform(-bound, bound));
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  const double bound = init_of(weight)->b;
  for (const at::Tensor& parameter : parameters(/*recurse=*/false)) torch::nn::init::uniform_(parameter, -bound, bound);
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  if (product_) {
    const at::Tensor y = product_(cast(x, compute_dtype())), added = bias_left_out_ ? at::Tensor() : in_use(bias);
    return added.defined() ? y + cast(added, y.scalar_type()) : y;
  }
  const at::Tensor used = in_use(weight), added = bias_left_out_ ? at::Tensor() : in_use(bias);
  const auto dtype = compute_dtype().value_or(used.scalar_type());
  if (fp8_) return linear_with_weights_later(x, used, weight, added, bias, Fp8Products{.out_dtype = dtype, .scaling = *fp8_});
  return linear_with_weights_later(cast(x, dtype), cast_weight(used, dtype), weight, added.defined() ? cast(added, dtype) : added, bias);
}

void LinearImpl::set_product(std::function<at::Tensor(const at::Tensor& x)> product) {
  product_ = std::move(product);
  called_ = true;
  if (!weight.defined()) return;
  parameters_.erase("weight");
  weight = at::Tensor();
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::Linear(in_features=" << options.in_features() << ", out_features=" << options.out_features() << ", bias=" << std::boolalpha
         << options.bias() << ")";
}

}  // namespace tessera::nn
