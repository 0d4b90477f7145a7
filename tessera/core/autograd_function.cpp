#include "tessera/core/autograd_function.h"

#include "tessera/core/error.h"
#include "tessera/core/function_node.h"

namespace tessera {
namespace detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kKept = "tessera.function";

struct KeptFunction : torch::CustomClassHolder {
  KeptFunction(FunctionCall::Backward backward, std::vector<bool> is_tensor) : backward(backward), is_tensor(std::move(is_tensor)) {}
  const FunctionCall::Backward backward;
  const std::vector<bool> is_tensor;
};

struct AnyFunction : torch::autograd::Function<AnyFunction> {
  static variable_list forward(AutogradContext* context, const at::TensorList&, c10::function_ref<variable_list(AutogradContext*)> forward,
                               const c10::intrusive_ptr<KeptFunction>& kept) {
    context->saved_data[kKept] = c10::IValue::make_capsule(kept);
    return forward(context);
  }

  // What T::backward gives is a gradient for each argument of T::forward; libtorch expects one for each tensor of the list above, and two for what came with
  // it.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptFunction>(context->saved_data[kKept].toCapsule());
    variable_list given = kept->backward(context, grads), of_tensors;
    const auto& is_tensor = kept->is_tensor;
    invariant(given.size() >= is_tensor.size(), "a function of ", is_tensor.size(), " arguments returned ", given.size(), " gradients");
    for (size_t i = 0; i < given.size(); ++i) {
      if (i < is_tensor.size() && is_tensor[i]) {
        of_tensors.push_back(std::move(given[i]));
      } else {
        invariant(!given[i].defined(), "a function returned a gradient of its argument ", i + 1, ", which is no tensor");
      }
    }
    of_tensors.resize(of_tensors.size() + 2);
    return of_tensors;
  }
};

}  // namespace

variable_list apply_function(FunctionCall call, c10::function_ref<variable_list(AutogradContext*)> forward, FunctionCall::Backward backward) {
  return AnyFunction::apply(at::TensorList(call.tensors), forward, c10::make_intrusive<KeptFunction>(backward, std::move(call.is_tensor)));
}

}  // namespace detail

const c10::IValue* saved_by(const torch::autograd::Node& node, const std::string& key) {
  const auto* const ours = dynamic_cast<const torch::autograd::CppNode<detail::AnyFunction>*>(&node);
  if (ours == nullptr) return nullptr;
  const auto found = ours->ctx_.saved_data.find(key);
  return found == ours->ctx_.saved_data.end() ? nullptr : &found->second;
}

}  // namespace tessera
