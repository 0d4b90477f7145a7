#include "tessera/nn/gradient_guard.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include "tessera/core/error.h"

// A dispatch key of its own brings every operator here before it reaches a kernel. libtorch keeps one for wrappers that it does not use itself; its boxed
// fallback is registered once for the process, and sees only operators that are given a guard.
namespace tessera::nn {
namespace {

constexpr c10::DispatchKey kGuardKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Of a guard and its copies, which are one gradient as those of a tensor with memory are.
struct GuardState {
  using Told = std::function<void(bool to_zeros)>;

  GuardState(std::shared_ptr<const std::string> with_message, Told who_is_told) : message(std::move(with_message)), told(std::move(who_is_told)) {}
  ~GuardState() {
    if (told) told(/*to_zeros=*/false);
  }
  GuardState(const GuardState&) = delete;
  GuardState& operator=(const GuardState&) = delete;

  void clear() {
    cleared = true;
    if (told) told(/*to_zeros=*/true);
  }

  std::shared_ptr<const std::string> message;
  Told told;
  bool cleared = false;
};

class GuardImpl final : public c10::TensorImpl {
 public:
  GuardImpl(c10::IntArrayRef sizes, caffe2::TypeMeta dtype, c10::Device device, std::shared_ptr<GuardState> state)
      : TensorImpl(c10::DispatchKeySet(kGuardKey), dtype, device), state_(std::move(state)) {
    set_sizes_contiguous(sizes);
    set_storage_access_should_throw();
  }

  /// In place of the destructor, while somebody has its name (weak_intrusive_ptr).
  void release_resources() override {
    state_.reset();
    TensorImpl::release_resources();
  }

  /// For Tensor::data() and detach(), with which libtorch's optimizers begin.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& /*version*/, bool /*allow_change*/) const override {
    return c10::make_intrusive<GuardImpl>(sizes(), dtype(), device(), state_);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& /*version*/, bool /*allow_change*/) const override {
    return c10::make_intrusive<GuardImpl>(sizes(), dtype(), device(), state_);
  }

  /// What kernels come to that are called past the dispatcher.
  const c10::Storage& storage() const override { throw ConfigError(*state_->message); }

  GuardState& state() const { return *state_; }

 private:
  const char* tensorimpl_type_name() const override { return "GradientGuard"; }

  std::shared_ptr<GuardState> state_;
};

at::Tensor make_guard(const at::Tensor& like, std::shared_ptr<const std::string> message, GuardState::Told told = {}) {
  return at::detail::make_tensor<GuardImpl>(like.sizes(), like.dtype(), like.device(), std::make_shared<GuardState>(std::move(message), std::move(told)));
}

GuardImpl* guard_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kGuardKey) ? dynamic_cast<GuardImpl*>(tensor.unsafeGetTensorImpl()) : nullptr;
}

GuardImpl* guard_among(const c10::IValue& argument) {
  if (argument.isTensor()) return guard_of(argument.toTensor());
  if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) {
      if (auto* const found = guard_of(tensor)) return found;
    }
  }
  if (argument.isList()) {
    for (const c10::IValue& element : argument.toListRef()) {
      if (auto* const found = guard_among(element)) return found;
    }
  }
  return nullptr;
}

/// What zero_grad makes of a gradient, of a module's or an optimizer's, leaves the guard on the stack as what is returned.
void meet(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  GuardImpl* found = nullptr;
  for (size_t i = stack->size() - op.schema().arguments().size(); found == nullptr && i < stack->size(); ++i) found = guard_among((*stack)[i]);
  invariant(found != nullptr, "an operator came to the gradient guard without one: ", name);
  const bool clears = name == "aten::zero_";
  if (clears) found->state().clear();
  if (clears || name == "aten::detach_" || name == "aten::detach") return;
  throw ConfigError(*found->state().message);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&meet>()); }

}  // namespace

at::Tensor make_gradient_guard(const at::Tensor& parameter, std::string message) {
  return make_guard(parameter, std::make_shared<const std::string>(std::move(message)));
}

at::Tensor make_gradient_guard_like(const at::Tensor& guard, std::function<void(bool to_zeros)> cleared) {
  const auto* const like = guard_of(guard);
  invariant(like != nullptr, "make_gradient_guard_like without a guard");
  return make_guard(guard, like->state().message, std::move(cleared));
}

bool is_gradient_guard(const at::Tensor& gradient) { return guard_of(gradient) != nullptr; }

const void* identity_of_guard(const at::Tensor& gradient) {
  const auto* const found = guard_of(gradient);
  return found != nullptr ? &found->state() : nullptr;
}

bool is_cleared(const at::Tensor& guard) {
  const auto* const found = guard_of(guard);
  return found != nullptr && found->state().cleared;
}

void arm(const at::Tensor& guard) {
  if (const auto* const found = guard_of(guard)) found->state().cleared = false;
}

}  // namespace tessera::nn
