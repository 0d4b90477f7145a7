#include "tessera/pipeline/split/zeros.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

namespace tessera::tape {

namespace {

/// The device type whose autocast is on.
std::optional<at::DeviceType> casting() {
  for (const at::DeviceType type : {at::kCPU, at::kCUDA}) {
    if (at::autocast::is_autocast_enabled(type)) return type;
  }
  return std::nullopt;
}

class NoCastCache {
 public:
  NoCastCache() : before_(at::autocast::is_autocast_cache_enabled()) { at::autocast::set_autocast_cache_enabled(false); }
  ~NoCastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;

 private:
  bool before_;
};

/// Whether what it gives is new memory.
bool makes_new(const c10::FunctionSchema& schema) {
  const auto aliases = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  return std::ranges::none_of(schema.arguments(), aliases) && std::ranges::none_of(schema.returns(), aliases);
}

/// Also lstm, with its dropout between layers, and attention.
bool draws(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name().starts_with("dropout") && stack[first + i].isDouble() && stack[first + i].toDouble() > 0) return true;
  }
  return false;
}

/// The same tensor on another device, as far as its looks go.
at::Tensor like(const at::Tensor& tensor, at::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).requires_grad(false));
}

/// What is drawn meanwhile is given back.
class KeepGenerator {
 public:
  explicit KeepGenerator(at::DeviceType type) : generator_(at::globalContext().defaultGenerator(type)) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepGenerator(const KeepGenerator&) = delete;
  KeepGenerator& operator=(const KeepGenerator&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

void run_on_zeros(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first, at::DeviceType type) {
  const NoCastCache no_cache;
  std::optional<KeepGenerator> generator;
  if (draws(op, stack, first)) generator.emplace(type);
  const auto& arguments = op.schema().arguments();
  for (size_t i = first; i < stack.size(); ++i) {
    if (arguments[i - first].name() == "device" && stack[i].isDevice()) stack[i] = c10::Device(type);
    stack[i] = for_tensors(stack[i], [&](const at::Tensor& tensor) { return like(tensor, type).zero_().set_requires_grad(tensor.requires_grad()); });
  }
  op.callBoxed(stack);
  for (size_t i = first; i < stack.size(); ++i) {
    stack[i] = for_tensors(stack[i], [](const at::Tensor& tensor) {
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "it gives a tensor of layout ", tensor.layout());
      const at::Tensor looks = like(tensor, at::kMeta);
      return tensor.requires_grad() ? looks.set_requires_grad(true).clone() : looks;  // no leaf: it may be written in place
    });
  }
}

}  // namespace

void run_without_data(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  const bool is_new = makes_new(op.schema());
  bool takes_tensors = false;
  for (size_t i = first; i < stack.size(); ++i) takes_tensors |= stack[i].isTensor() || stack[i].isTensorList() || stack[i].isOptionalTensorList();
  if (const auto type = casting(); type && is_new && takes_tensors) return run_on_zeros(op, stack, first, *type);
  const torch::jit::Stack arguments(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
  try {
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    if (!is_new) throw;
    stack.resize(first);
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    run_on_zeros(op, stack, first, at::kCPU);
  }
}

}  // namespace tessera::tape
