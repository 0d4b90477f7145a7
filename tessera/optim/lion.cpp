#include "tessera/optim/lion.h"

#include <utility>

#include "tessera/kernels/lion.h"

namespace tessera::optim {

Lion::Lion(std::vector<ParameterGroup> groups, LionOptions options) : Optimizer(std::move(groups)), options_(options), exp_avg_(zeros_like_parameters()) {}

void Lion::update(const Batch& batch) {
  const kernels::LionStep step{.lr = batch.lr, .beta1 = options_.beta1, .beta2 = options_.beta2, .weight_decay = batch.weight_decay};
  for (size_t i = 0; i < batch.indices.size(); ++i) kernels::lion_(batch.parameters[i], batch.gradients[i], exp_avg_[batch.indices[i]], step);
}

void Lion::hold(size_t index) {
  if (!exp_avg_[index].defined()) exp_avg_[index] = zeros_like_parameter(index);
}

}  // namespace tessera::optim
