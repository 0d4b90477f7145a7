#include "tessera/pipeline/split/summed_gradients.h"

#include <ATen/ops/any.h>
#include <c10/core/GradMode.h>

#include "tessera/nn/gradient_dispatcher.h"

namespace tessera::pipeline {

/// Cleared by zero_grad(set_to_none = false) it is the same tensor: that is read where it was written.
bool SummedGradients::Noted::stands(const at::Tensor& now) const {
  if (!now.defined() || now.unsafeGetTensorImpl() != gradient) return false;
  const c10::NoGradGuard no_grad;
  return now._version() == version || now.is_meta() || at::any(now).item<bool>();
}

void SummedGradients::note(const std::string& name, const at::Tensor& parameter) {
  auto& noted = noted_[name];
  if (!noted) {
    noted = std::make_shared<Noted>();
    listening_[name] = nn::GradientDispatcher::of(parameter).watch_arriving([known = std::weak_ptr(noted)](const at::Tensor& parameter) {
      const auto noted = known.lock();
      if (!noted || noted->arrived) return;
      noted->arrived = true;
      noted->added = noted->stands(parameter.grad());
    });
  }
  const at::Tensor& gradient = parameter.grad();
  noted->gradient = gradient.unsafeGetTensorImpl();
  noted->version = gradient._version();
  noted->arrived = noted->added = false;
}

SummedGradients::State SummedGradients::of(const std::string& name, const at::Tensor& parameter) const {
  const auto found = noted_.find(name);
  if (found == noted_.end()) return State::Own;
  const Noted& noted = *found->second;
  if (noted.arrived) return noted.added ? State::Added : State::Own;
  return noted.stands(parameter.grad()) ? State::Summed : State::Own;
}

}  // namespace tessera::pipeline
