#include "tests/support/sim_device/operators.h"

#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tessera/memory/ledger.h"
#include "tests/support/sim_device/aliases.h"
#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/graph.h"
#include "tests/support/sim_device/memory.h"

namespace tessera::sim {

namespace {

using Stack = torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == sim_type(); }

/// What an operator's schema says of it.
struct Known {
  const char* name = "";
  bool touches = true;         ///< memory; false: makes views, or changes shapes
  bool syncs = false;          ///< its result is a number, or has a shape that only the data say
  bool takes_host = false;     ///< tensors on the CPU may stand among its arguments, as on CUDA
  std::vector<bool> writes{};  ///< by argument
};

Known learn(const c10::FunctionSchema& schema) {
  static const std::set<std::string_view> shapes{"aten::resize_",  "aten::set_",       "aten::transpose_",  "aten::t_",
                                                 "aten::squeeze_", "aten::unsqueeze_", "aten::as_strided_", "aten::resize_as_"};
  static const std::set<std::string_view> sized_by_data{"aten::nonzero",    "aten::masked_select",      "aten::_unique2",
                                                        "aten::unique_dim", "aten::unique_consecutive", "aten::_local_scalar_dense"};
  static const std::set<std::string_view> mixed{"aten::index",         "aten::index_put_",   "aten::_index_put_impl_",
                                                "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_"};
  Known known{.name = intern(schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name())};
  bool any_write = false, view = false;
  for (const auto& argument : schema.arguments()) {
    known.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    any_write = any_write || known.writes.back();
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    view = view || (result.alias_info() && !result.alias_info()->isWrite() && !any_write);
    known.syncs = known.syncs || (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType);
  }
  known.touches = !view && !shapes.contains(schema.name());
  known.syncs = (known.syncs || sized_by_data.contains(schema.name())) && schema.name() != "aten::_fused_sdp_choice";
  known.takes_host = mixed.contains(schema.name());
  return known;
}

const Known& known(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const table = new std::unordered_map<const c10::FunctionSchema*, Known>;
  const std::lock_guard lock(mutex);
  const auto found = table->find(&op.schema());
  return found != table->end() ? found->second : table->emplace(&op.schema(), learn(op.schema())).first->second;
}

/// While alive, what this thread allocates on the CPU is an operator's own and on nobody's account.
class Uncounted {
 public:
  Uncounted() : before_(std::exchange(tessera::detail::memory_thread.ledger, nullptr)) {}
  ~Uncounted() { tessera::detail::memory_thread.ledger = before_; }
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;

 private:
  tessera::detail::MemoryLedger* before_;
};

template <class F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) f(*tensor);
    }
  }
}

/// change() of every tensor in the value, in its place.
template <class F>
void replace_tensors(c10::IValue& value, F change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional(change(*tensor)) : tensor);
    value = list;
  }
}

[[noreturn]] void refuse_mixture(const Known& op, const std::string& argument, const c10::Device& one, const std::string& other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "! (when checking argument ",
              argument, " of ", op.name, ")");
}

bool reads_other_devices = false;

/// The device that the arguments name; all tensors have to lie on it, but for numbers on the host.
c10::Device device_of_arguments(const c10::OperatorHandle& op, const Known& known, const Stack& stack, size_t first) {
  std::optional<c10::Device> device;
  std::string on_host;
  if (reads_other_devices) {  // where the operator writes, or this thread works
    const c10::Device current = c10::impl::VirtualGuardImpl(sim_type()).getDevice();
    bool written = false;
    for (size_t i = first; i < stack.size(); ++i) {
      each_tensor(stack[i], [&](const at::Tensor& tensor) {
        if (!on_device(tensor) || written) return;
        written = known.writes[i - first];
        if (written || !device || tensor.device() == current) device = tensor.device();
      });
    }
  }
  for (size_t i = first; i < stack.size(); ++i) {
    const auto& name = op.schema().arguments()[i - first].name();
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (on_device(tensor)) {
        if (device && *device != tensor.device() && (!reads_other_devices || known.writes[i - first])) {
          refuse_mixture(known, name, *device, tensor.device().str());
        }
        if (!device) device = tensor.device();
      } else if (tensor.is_cpu() && tensor.dim() > 0 && on_host.empty()) {
        on_host = name;
      }
    });
    if (!device && stack[i].isDevice() && stack[i].toDevice().type() == sim_type()) device = stack[i].toDevice();
  }
  TORCH_CHECK(device, "simulated device: ", known.name, " has no argument there");
  if (!device->has_index()) device = c10::impl::VirtualGuardImpl(sim_type()).getDevice();
  if (!on_host.empty() && !known.takes_host) refuse_mixture(known, on_host, *device, "cpu");
  return *device;
}

/// Has the graph make the same call on the same memory at each replay, and put what it makes where this one did.
void take_down(Capture& capture, const c10::OperatorHandle& op, const Known& known, Stack arguments, const std::vector<at::Tensor>& results) {
  const Uncounted uncounted;
  Uses uses;
  Aliases aliases;
  for (size_t i = 0; i < arguments.size(); ++i) {
    replace_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) uses.add(tensor, known.writes[i], known.name);
      if (!tensor.defined() || on_device(tensor)) return aliases(tensor);
      at::Tensor number = tensor.clone();  // of the host, as it is now
      number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return number;
    });
    if (arguments[i].isDevice()) arguments[i] = c10::Device(c10::kCPU);
    if (arguments[i].isGenerator()) arguments[i] = at::detail::getDefaultCPUGenerator();
  }
  std::vector<void*> places;
  for (const at::Tensor& result : results) {
    places.push_back(result.defined() && result.storage().data() ? host_of(result.storage().data()) : nullptr);
    if (result.defined()) uses.add(result, true, known.name);
  }
  capture.add([op, arguments, places, uses](int stream) {
    uses.tell(stream);
    const Uncounted none;
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack stack = arguments;
    op.callBoxed(&stack);
    size_t i = 0;
    for (const auto& result : stack) {
      each_tensor(result, [&](const at::Tensor& tensor) {
        if (places[i]) std::memcpy(places[i], tensor.storage().data(), tensor.storage().nbytes());
        ++i;
      });
    }
  });
}

/// The CPU's kernel.
void run(const c10::OperatorHandle& op, Stack* stack) {
  const Known& k = known(op);
  const size_t first = stack->size() - op.schema().arguments().size();
  const c10::Device device = device_of_arguments(op, k, *stack, first);
  const c10::DeviceGuard guard(device);
  const int stream = stream_number(current_stream(device.index()));
  auto& order = HappensBefore::get();
  const uint64_t sequence = order.launch(stream);
  const Running running(k.name);
  Capture* const capture = k.touches ? Capture::of(device.index()) : nullptr;
  if (k.syncs) Capture::refuse(device.index(), k.name);
  const Stack before = capture ? Stack(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end()) : Stack();

  Aliases aliases;
  std::vector<at::Tensor> held, written;  // what is written may be resized first, so it is recorded afterwards
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      held.push_back(tensor);
      if (!k.touches || tensor.device() != device) return;  // of another device's it reads a copy
      if (k.writes[i - first]) {
        written.push_back(tensor);
      } else {
        record_access(tensor, stream, sequence, false, k.name);
      }
    });
    replace_tensors(value, [&](const at::Tensor& tensor) { return aliases(tensor); });
    if (value.isDevice() && value.toDevice().type() == sim_type()) value = c10::Device(c10::kCPU);
    if (value.isGenerator()) {
      const at::Generator& generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == sim_type(), "Expected a '", sim_type(), "' device type for generator but found '", generator.device(), "'");
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
    }
  }
  {
    const Uncounted uncounted;
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  aliases.carry_back(device);
  for (const at::Tensor& tensor : written) record_access(tensor, stream, sequence, true, k.name);
  std::vector<at::Tensor> results;  // those in new memory; undefined for the others
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    replace_tensors((*stack)[i], [&](const at::Tensor& result) {
      bool fresh = false;
      at::Tensor made = aliases.wrap(result, device, fresh);
      results.push_back(fresh ? made : at::Tensor());
      if (fresh) record_access(made, stream, sequence, true, k.name);
      return made;
    });
  }
  if (capture) take_down(*capture, op, k, before, results);
  if (k.syncs) {
    const HappensBefore::SyncReason reason(k.name);
    order.host_waits(order.record(stream));
    after_host_sync();
  }
}

// What makes memory or only looks at it.

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(sim_type())));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(sim_key()), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(sim_type())));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), c10::DispatchKeySet(sim_key()),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage_and_shape(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto* const impl = self.unsafeGetTensorImpl();
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_contiguous({elements});
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_shape(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

void record_on_stream(at::Tensor& self, at::Stream stream) { record_stream(self.storage().data(), stream_number(stream)); }

// What crosses between devices.

/// Copies the bytes as one piece of work of `stream`.
void copy_bytes(const at::Tensor& to, const at::Tensor& from, int stream, const char* name) {
  const uint64_t sequence = HappensBefore::get().launch(stream);
  const Running running(name);
  record_access(from, stream, sequence, false, name);
  record_access(to, stream, sequence, true, name);
  const Uncounted uncounted;
  const at::AutoDispatchBelowADInplaceOrView below;
  Aliases aliases;
  const at::Tensor target = aliases(to), source = aliases(from);
  target.copy_(source);
  if (Capture* const capture = Capture::of((on_device(to) ? to : from).device().index())) {
    Uses uses;
    uses.add(from, false, name);
    uses.add(to, true, name);
    capture->add([target, source, uses](int now) {
      uses.tell(now);
      const Uncounted none;
      const at::AutoDispatchBelowADInplaceOrView inside;
      target.copy_(source);
    });
  }
}

/// Between devices, as CUDA's: on the source's stream, which waits for the destination's and is waited for by it.
void copy_within(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceGuard guard(from.device());
  auto& order = HappensBefore::get();
  const int stream = stream_number(current_stream(from.device().index()));
  if (to.device() == from.device()) return copy_bytes(to, from, stream, "aten::copy_");
  const int other = stream_number(current_stream(to.device().index()));
  order.block(stream, order.record(other));
  copy_bytes(to, from, stream, "aten::copy_ between devices");
  order.block(other, order.record(stream));
}

/// Pinned memory and non_blocking: the host goes on, and may not touch the pinned memory until it has waited. To the device otherwise: it waits unless told
/// not to (pageable memory is staged by the driver before the call returns). From the device otherwise: it waits.
void copy_across(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool out = on_device(from);
  const c10::Device device = (out ? from : to).device();
  const void* const host = (out ? to : from).storage().data();
  const c10::DeviceGuard guard(device);
  auto& order = HappensBefore::get();
  const int stream = stream_number(current_stream(device.index()));
  const bool pinned = host && with_block(host, [](Block& block) { open(block); });  // the copy itself is no access of the host
  if (!non_blocking || !pinned) Capture::refuse(device.index(), "a copy that is not non_blocking from or to pinned memory");
  copy_bytes(to, from, stream, out ? "aten::copy_ to the host" : "aten::copy_ to the device");
  if (non_blocking && pinned) {
    with_block(host, [](Block& block) { close_while_pending(block); });
  } else if (out || !non_blocking) {
    const HappensBefore::SyncReason reason(out ? "aten::copy_ to the host" : "aten::copy_ to the device");
    order.host_waits(order.record(stream));
    after_host_sync();
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  on_device(self) && on_device(source) ? copy_within(self, source) : copy_across(self, source, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  at::Tensor to = destination;
  return copy_(to, self, non_blocking);
}

/// Attention as the CPU chooses it, but that CUDA has no fused kernel for grouped heads in fp32.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout, bool causal,
                     std::optional<double> scale, bool gqa) {
  constexpr int64_t flash = 1;
  int64_t choice = 0;
  if (!gqa || q.scalar_type() != at::kFloat) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Aliases alias;
    choice = at::_fused_sdp_choice(alias(q), alias(k), alias(v), mask ? std::optional(alias(*mask)) : mask, dropout, causal, scale, gqa);
  }
  if (choice == flash) return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, {}, scale, gqa));
}

}  // namespace

void let_operators_read_other_devices() { reads_other_devices = true; }

namespace {

/// The bytes that the tensor may touch; none where it has no memory.
std::optional<Access> access_to(const at::Tensor& tensor, bool writes, const char* by) {
  if (tensor.numel() == 0 || !tensor.storage().data()) return std::nullopt;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  const uintptr_t end = begin + static_cast<size_t>(last + 1) * tensor.itemsize();
  return Access{.begin = begin, .end = end, .writes = writes, .by = by};
}

void note(Access access, int stream, uint64_t sequence) {
  access.stream = stream;
  access.sequence = sequence;
  const auto* const address = reinterpret_cast<const void*>(access.begin);
  with_block(address, [&](Block& block) { HappensBefore::get().access(block.history, access, is_device(address) ? "device memory" : "pinned memory"); });
}

}  // namespace

void record_access(const at::Tensor& tensor, int stream, uint64_t sequence, bool writes, const char* by) {
  if (const auto access = access_to(tensor, writes, by)) note(*access, stream, sequence);
}

void Uses::add(const at::Tensor& tensor, bool writes, const char* by) {
  if (const auto access = access_to(tensor, writes, by)) accesses_.push_back(*access);
}

void Uses::tell(int stream) const {
  const uint64_t sequence = HappensBefore::get().launch(stream);
  for (const Access& access : accesses_) note(access, stream, sequence);
}

void register_operators() {
  static torch::Library* libraries[3];  // for good
  libraries[0] = new torch::Library(torch::Library::IMPL, "aten", sim_key(), __FILE__, __LINE__);
  auto& own = *libraries[0];
  own.impl("empty.memory_format", &empty);
  own.impl("empty_strided", &empty_strided);
  own.impl("as_strided", &as_strided);
  own.impl("view", &view);
  own.impl("_reshape_alias", &reshape_alias);
  own.impl("set_.source_Storage_storage_offset", &set_storage_and_shape);
  own.impl("set_.source_Storage", &set_storage);
  own.impl("set_.source_Tensor", &set_tensor);
  own.impl("record_stream", &record_on_stream);
  own.impl("copy_", &copy_);
  own.impl("_copy_from", &copy_from);
  libraries[1] = new torch::Library(torch::Library::IMPL, "aten", sim_autograd_key(), __FILE__, __LINE__);
  libraries[1]->impl("scaled_dot_product_attention", &attention);
  libraries[2] = new torch::Library(torch::Library::IMPL, "_", sim_key(), __FILE__, __LINE__);
  libraries[2]->fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !name.name.starts_with("aten::") || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op->hasKernelForDispatchKey(sim_key())) continue;
    own.impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace tessera::sim
