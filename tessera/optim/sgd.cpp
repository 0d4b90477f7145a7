#include "tessera/optim/sgd.h"

#include <optional>
#include <utility>

#include <ATen/ops/_fused_sgd.h>

namespace tessera::optim {

Sgd::Sgd(std::vector<ParameterGroup> groups, SgdOptions options) : Optimizer(std::move(groups)), options_(options) {
  if (options_.momentum != 0) momentum_buffer_ = zeros_like_parameters();
}

std::vector<StateTensor> Sgd::state() const { return named_state("momentum_buffer", momentum_buffer_); }

void Sgd::hold(size_t index) {
  if (!momentum_buffer_.empty() && !momentum_buffer_[index].defined()) momentum_buffer_[index] = zeros_like_parameter(index);
}

void Sgd::update(const Batch& batch) {
  std::vector<at::Tensor> buffers;
  if (!momentum_buffer_.empty()) {
    for (const size_t i : batch.indices) buffers.push_back(momentum_buffer_[i]);
  }
  const auto skip = batch.skip.defined() ? std::optional(batch.skip) : std::nullopt;
  // A buffer of zeros takes the gradient as it is at the first update, so there is no first step to tell apart, and none to remember over a restart.
  at::_fused_sgd_(batch.parameters, batch.gradients_as_parameters(), buffers, batch.weight_decay, options_.momentum, batch.lr, /*dampening=*/0,
                  /*nesterov=*/false,
                  /*maximize=*/false,
                  /*is_first_step=*/false, /*grad_scale=*/{}, skip);
  count_writes(batch.parameters);
}

}  // namespace tessera::optim
