#include "tests/support/default_device.h"

#include <algorithm>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "tests/on_the_cpu.h"

// Factories pass the key BackendSelect, where libtorch has a kernel for each that reads the device from its options. Those are replaced by one that knows what
// device is meant where the options name none.

namespace tessera::testing_support {

namespace {

std::optional<c10::DeviceType> default_type;  // where nobody asks for the CPU
bool (*inside_operator)() = nullptr;

c10::Device default_device() { return c10::impl::VirtualGuardImpl(*default_type).getDevice(); }

std::optional<size_t> position(const c10::FunctionSchema& schema, const char* name) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return i;
  }
  return std::nullopt;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& a) { return a.type()->str().find("Tensor") != std::string::npos; });
}

/// Whether what is made is drawn by a generator of the host, which draws nothing on a device.
bool is_drawn_on_host(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  const auto generator = position(schema, "generator");
  return generator && stack[first + *generator].isGenerator() && stack[first + *generator].toGenerator().device().is_cpu();
}

void make(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const auto argument = [&](const char* name) -> c10::IValue& { return (*stack)[first + *position(schema, name)]; };
  auto& device = argument("device");
  const bool pinned = argument("pin_memory").isBool() && argument("pin_memory").toBool();
  const bool strided = argument("layout").isNone() || argument("layout").toLayout() == at::kStrided;
  const bool moves = has_default_device() && device.isNone() && !pinned && strided && !(inside_operator && inside_operator());
  const bool on_host_first = moves && is_drawn_on_host(schema, *stack, first);
  if (moves) device = on_host_first ? c10::Device(c10::kCPU) : default_device();
  const auto key =
      c10::computeDispatchKey(argument("dtype").toOptional<at::ScalarType>(), argument("layout").toOptional<at::Layout>(), device.toOptional<at::Device>());
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  if (on_host_first) stack->back() = stack->back().toTensor().to(default_device());
}

/// Tests hold what different ranks have against each other, and against the CPU's.
bool equal(const at::Tensor& one, const at::Tensor& other) { return at::equal(one.cpu(), other.cpu()); }

}  // namespace

void make_default_device(c10::DeviceType type, bool (*inside)()) {
  default_type = type;
  inside_operator = inside;
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}  // that kernels are replaced
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static auto* const leniency =
      new torch::Library(torch::Library::IMPL, "aten", c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type)), __FILE__, __LINE__);
  leniency->impl("equal", &equal);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("aten::") || !op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) continue;
    const auto& schema = op->schema();
    if (takes_tensors(schema) || !position(schema, "device") || !position(schema, "dtype") || !position(schema, "layout") || !position(schema, "pin_memory"))
      continue;
    library->impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(), torch::CppFunction::makeFromBoxedFunction<&make>());
  }
}

bool has_default_device() { return default_type.has_value() && !OnTheCpu::now(); }

}  // namespace tessera::testing_support

// at::tensor writes its values into what at::empty gives it, which the host cannot write to on a device. In a program that has these definitions they are taken
// before libtorch's.
namespace at {

#define TESSERA_TENSOR(T, S)                                                                                                        \
  Tensor tensor(ArrayRef<T> values, const TensorOptions& options) {                                                                 \
    const bool elsewhere = !options.device().is_cpu() || (tessera::testing_support::has_default_device() && !options.has_device()); \
    const Tensor host = at::empty({static_cast<int64_t>(values.size())}, at::dtype(k##S).device(kCPU));                             \
    std::copy(values.begin(), values.end(), host.data_ptr<T>());                                                                    \
    const auto wanted = options.has_dtype() ? options : options.dtype(k##S);                                                        \
    if (!elsewhere) return host.to(wanted.device(kCPU));                                                                            \
    return host.to(wanted.has_device() ? wanted : wanted.device(tessera::testing_support::default_device()));                       \
  }
AT_FORALL_SCALAR_TYPES_AND3(Bool, Half, BFloat16, TESSERA_TENSOR)
AT_FORALL_COMPLEX_TYPES(TESSERA_TENSOR)
#undef TESSERA_TENSOR

}  // namespace at
