#include "tessera/precision/gradient_dtype.h"

#include <memory>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/memory/memory.h"

namespace tessera::precision {

namespace {

/// Before autograd adds a gradient up: a sum of two dtypes would convert in memory of its own, which differs between devices. A hook by register_hook may not
/// change the dtype, one of this kind may. It cannot be taken back, so it can be switched off.
class Convert final : public torch::autograd::FunctionPreHook {
 public:
  Convert(at::ScalarType dtype, std::shared_ptr<const bool> active) : dtype_(dtype), active_(std::move(active)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (!*active_ || !gradients.at(0).defined()) return gradients;
    const MemoryScope moment(MemoryCategory::Other);  // until it is added to what counts as the gradient, or becomes it
    return {gradients[0].to(dtype_)};
  }

 private:
  at::ScalarType dtype_;
  std::shared_ptr<const bool> active_;
};

}  // namespace

Attachment keep_gradients_in(at::ScalarType dtype, const std::vector<nn::NamedParameter>& parameters) {
  const auto active = std::make_shared<bool>(true);
  for (const auto& parameter : parameters) {
    if (!parameter.tensor.requires_grad() || parameter.tensor.scalar_type() == dtype) continue;
    torch::autograd::impl::hooks(parameter.tensor).push_back(std::make_unique<Convert>(dtype, active));  // add_hook would have it be the only one
  }
  return Attachment([active] { *active = false; });
}

}  // namespace tessera::precision
