#include "tessera/nn/late_parameters.h"

#include <functional>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"

namespace tessera::nn {
namespace {

/// Of the tensors' addresses: one in another's place counts as well. No name is made.
size_t sum_over_registered(const torch::nn::Module& module) {
  size_t sum = 0;
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) sum += std::hash<const void*>()(parameter.unsafeGetTensorImpl());
  for (const auto& child : module.children()) sum += sum_over_registered(*child);
  return sum;
}

bool is_unclaimed(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return false;
  const auto* const dispatcher = GradientDispatcher::find(parameter);
  return dispatcher == nullptr || dispatcher->owner() == nullptr;
}

}  // namespace

LateParameters::LateParameters(const torch::nn::Module& module, ParameterFilter only)
    : module_(module), only_(std::move(only)), known_(sum_over_registered(module)) {}

void LateParameters::refuse(const std::string& technique) const {
  if (sum_over_registered(module_) == known_) return;
  std::string names;
  for (const NamedParameter& parameter : unique_parameters(module_, only_)) {
    if (is_unclaimed(parameter.tensor)) names += (names.empty() ? "'" : ", '") + parameter.name + "'";
  }
  require(
      names.empty(), technique, ": ", names, " of module '", module_.name(), "' came after it was wrapped: gradients stay each rank's own, and ranks drift ",
      "apart in silence; register all before (where a first forward builds layers, run one under NoGradGuard before wrapping), wrap what is new by itself, ",
      "or freeze it (requires_grad_(false))");
}

}  // namespace tessera::nn
