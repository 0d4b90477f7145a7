#include "tessera/nn/auxiliary_loss.h"

#include <ATen/ops/full.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"

namespace tessera::nn {

namespace {

struct WithLoss : AutogradFunction<WithLoss> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& carrier, const at::Tensor& loss, double weight) {
    context->saved_data["weight"] = weight;
    return carrier.view_as(carrier);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    return {grads[0], at::full({}, context->saved_data["weight"].toDouble(), grads[0].options().dtype(at::kFloat)), at::Tensor()};
  }
};

}  // namespace

at::Tensor with_auxiliary_loss(const at::Tensor& carrier, const at::Tensor& loss, double weight) {
  require(loss.dim() == 0, "with_auxiliary_loss: the loss must be one number, not a tensor of shape ", loss.sizes());
  return WithLoss::apply(carrier, loss, weight);
}

}  // namespace tessera::nn
