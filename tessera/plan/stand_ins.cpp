#include "tessera/plan/stand_ins.h"

#include <algorithm>
#include <exception>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/memory/memory.h"

namespace tessera::plan {
namespace {

using torch::jit::Stack;

bool is_on_meta(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_meta();
  if (value.isTensorList()) return std::ranges::any_of(value.toTensorVector(), [](const at::Tensor& tensor) { return tensor.defined() && tensor.is_meta(); });
  return false;
}

/// Whether something computes it on meta. What libtorch calls instead of a kernel that is missing throws, and does not count.
bool is_computed_on_meta(const c10::FunctionSchema& schema) {
  using c10::DispatchKey;
  const auto op = c10::Dispatcher::singleton().findOp(schema.operator_name());
  return !op || std::ranges::any_of(std::vector{DispatchKey::Meta, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional,
                                                DispatchKey::CompositeImplicitAutograd},
                                    [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); });
}

int64_t extent_of(const at::Tensor& tensor) {
  int64_t last = tensor.numel() == 0 ? -1 : 0;
  if (last == 0) {
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

int64_t bytes_of(const c10::IValue& value) {
  int64_t bytes = 0;
  if (value.isTensor() && value.toTensor().defined()) bytes += extent_of(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) bytes += tensor.defined() ? extent_of(tensor) : 0;
  }
  return bytes;
}

at::Tensor zeros_for(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta()) return tensor;
  at::Tensor zeros = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  return zeros.zero_();
}

c10::IValue on_cpu(const c10::IValue& value) {
  if (value.isTensor()) return zeros_for(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> zeros;
    for (const at::Tensor& tensor : value.toTensorVector()) zeros.push_back(zeros_for(tensor));
    return zeros;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

at::Tensor like(const at::Tensor& made) {
  if (!made.defined()) return made;
  return at::empty_strided(made.sizes(), made.strides(), made.options().device(at::kMeta));
}

/// What stands for a result: the argument that it is, a view of it, or a tensor of its own.
c10::IValue on_meta(const c10::IValue& made, const c10::Argument& declared, const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given) {
  if (made.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : made.toTensorVector()) all.push_back(like(tensor));
    return all;
  }
  if (!made.isTensor()) return made;
  if (declared.alias_info() == nullptr) return like(made.toTensor());
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !given[i].isTensor() || alias->beforeSets() != declared.alias_info()->beforeSets()) continue;
    if (alias->isWrite()) return given[i];
    const at::Tensor& result = made.toTensor();
    return given[i].toTensor().as_strided(result.sizes(), result.strides(), result.storage_offset());
  }
  return like(made.toTensor());
}

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw ConfigError(detail::concat("operator ", name, ": has no meta kernel, from which a plan would know the shapes of what it makes, and ", why,
                                   "; register one that makes its results with at::empty_like or at::empty: TORCH_LIBRARY_IMPL(",
                                   name.substr(0, name.find(':')), ", Meta, m) { m.impl(...); }"));
}

}  // namespace

void StandIns::call(nn::OperatorCall& operation) {
  const c10::FunctionSchema& schema = operation.schema();
  const auto [known, fresh] = computed_.try_emplace(&schema, true);
  if (fresh) known->second = is_computed_on_meta(schema);
  if (known->second || std::ranges::none_of(operation.arguments(), is_on_meta)) return operation.run();
  run_on_zeros(operation);
}

void StandIns::run_on_zeros(nn::OperatorCall& operation) {
  const c10::FunctionSchema& schema = operation.schema();
  const auto arguments = operation.arguments();
  const std::vector<c10::IValue> given(arguments.begin(), arguments.end());
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(schema.name().c_str(), schema.overload_name().c_str());
  const std::string& name = operation.name();
  int64_t bytes = 0;
  for (const c10::IValue& value : given) bytes += bytes_of(value);
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) refuse(name, "none for a CPU, which would show them");
  if (bytes > kMostBytes) refuse(name, "its arguments, " + format_bytes(bytes) + ", are too many to be shown to the kernel of a CPU");
  Stack ran;
  try {
    MemoryTracker unread;
    const TrackMemory track(unread);
    for (const c10::IValue& value : given) ran.push_back(on_cpu(value));
    op.callBoxed(&ran);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    refuse(name, "that of a CPU refuses zeros (" + text.substr(0, text.find('\n')) + ")");
  }
  names_.insert(name);
  Stack& stack = operation.stack();
  stack.resize(stack.size() - given.size());
  for (size_t i = 0; i < schema.returns().size(); ++i) stack.push_back(on_meta(ran[i], schema.returns()[i], schema, given));
}

}  // namespace tessera::plan
