#include "tessera/nn/meta.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/init_tape.h"
#include "tessera/nn/parameter.h"

// Constructors of torch::nn take no device, and at::empty in them means the CPU's memory. A dispatch key above all that compute (DeferredInit, which libtorch
// reserves and does not use) sees each operator of this thread first, turns the device that it asks for into meta, and lets it go on. So any constructor works
// unchanged, and what it does to its tensors is seen on the way and put on tape.

namespace tessera::nn {

namespace {

thread_local std::shared_ptr<InitTape> recording;
thread_local bool inside = false;

/// Operators that an operator is made of are not recorded beside it, and what they ask of the host they get: it is no part of the model (repeat keeps counts
/// in a tensor). What is made for the model has the device that the operator was given.
class Inside {
 public:
  Inside() : recorded_(std::exchange(recording, nullptr)), inside_(std::exchange(inside, true)) {}
  ~Inside() {
    recording = std::move(recorded_);
    inside = inside_;
  }
  const std::shared_ptr<InitTape>& tape() const { return recorded_; }

 private:
  std::shared_ptr<InitTape> recorded_;
  bool inside_;
};

/// Every operator that is asked for a device is asked for meta instead; then it goes on as it would without us, and what it does to its tensors is noted.
void make_on_meta(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; !inside && i < arguments.size(); ++i) {
    if (arguments[i].name() == "device") (*stack)[first + i] = c10::Device(c10::kMeta);
    if (arguments[i].name() == "pin_memory") (*stack)[first + i] = c10::IValue();
  }
  auto noted = recording ? recording->begin(op, *stack) : nullptr;
  const Inside made_of;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::DeferredInit), stack);
  if (noted) InitTape::end(made_of.tape(), std::move(noted), *stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&make_on_meta>()); }

}  // namespace

struct OnMeta::Guard {
  // Only what is materialized counts: the whole model's meta tensors go on a tracker that nobody reads.
  MemoryTracker unread;
  TrackMemory track{unread};
  c10::impl::IncludeDispatchKeyGuard include{c10::DispatchKey::DeferredInit};
  std::shared_ptr<InitTape> tape = recording ? nullptr : std::make_shared<InitTape>();  // one for guards inside each other

  Guard() {
    if (tape) recording = tape;
  }
  ~Guard() {
    if (!tape) return;
    recording = nullptr;
    tape->close();
  }
};

OnMeta::OnMeta() : guard_(std::make_unique<Guard>()) {}
OnMeta::~OnMeta() = default;

void refuse_without_memory(const c10::Error& error) {
  const std::string what = error.what_without_backtrace();
  const size_t named = what.find(": attempted to run this operator with Meta tensors");
  const bool read = what.find("data is not allocated yet") != std::string::npos;
  if (named == std::string::npos && !read) return;
  throw ConfigError(::tessera::detail::concat(
      "on_meta: a constructor ",
      read ? "looks into a tensor's memory (torch::tensor of a vector, data_ptr, an accessor), and on meta there is none"
           : "calls " + what.substr(0, named) + ", which libtorch cannot do without memory",
      ". Make the tensor by other operators (arange, linspace; cos + 1i * sin in place of polar; torch::from_blob(values, sizes).clone() for numbers of the ",
      "program's own), have reset() or `init` of on_meta fill it, or build the model without on_meta"));
}

void materialize_storage(const at::Tensor& tensor, at::Device device) {
  const auto sizes = has_slice(tensor) ? slice_of(tensor).local_shape() : tensor.sizes().vec();
  const MemoryScope scope(MemoryCategory::Parameters);
  const at::Tensor memory = at::empty(sizes, tensor.options().device(device).requires_grad(false));
  // set_data would refuse to change the device; the same tensor with other keys, storage and sizes keeps every handle and hook.
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->_change_backend_component_keys(memory.device());
  impl->set_storage_keep_dtype(memory.storage());
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(memory.sizes(), memory.strides());
}

}  // namespace tessera::nn
