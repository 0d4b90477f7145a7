#include "tessera/optim/tentative_update.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::optim {

std::vector<at::Tensor> TentativeUpdate::changed() const {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters_) tensors.push_back(parameter.tensor.detach());
  for (const StateTensor& state : optimizer_.state()) tensors.push_back(state.tensor);
  return tensors;
}

void TentativeUpdate::make(double lr) {
  invariant(!made_, "an update on top of one that is not known to stand");
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  counts_ = optimizer_.update_counts();
  for (const at::Tensor& tensor : changed()) before_.push_back(tensor.clone());
  made_ = true;
  optimizer_.step(lr);
}

void TentativeUpdate::keep() {
  made_ = false;
  before_.clear();
}

void TentativeUpdate::take_back() {
  invariant(made_, "there is no update to take back");
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> now = changed();
  invariant(now.size() == before_.size(), "the update made state, which cannot be taken back");
  for (size_t i = 0; i < now.size(); ++i) at::Tensor(now[i]).copy_(before_[i]);
  optimizer_.set_update_counts(counts_);
  keep();
}

}  // namespace tessera::optim
