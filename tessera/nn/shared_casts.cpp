#include "tessera/nn/shared_casts.h"

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/core/ambient.h"
#include "tessera/core/autograd_function.h"
#include "tessera/kernels/widen.h"
#include "tessera/nn/saved_tensors.h"

// Each micro-batch needs a node of its own in its graph, but the numbers behind it are the same. So the graph's tensors are aliases of one storage, and the
// scope knows it by a weak reference: who holds it are the graphs.

namespace tessera::nn {

/// Of leaves, by their addresses: a parameter outlives the scope, where a tensor that stands for it may go and leave its address to another.
struct CastsInFlight {
  struct Copy {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes{}, strides{};
    int64_t version = 0;
    at::ScalarType dtype = at::kFloat;
  };
  std::unordered_map<const c10::TensorImpl*, Copy> copies;
};

namespace {

const Ambient<std::shared_ptr<CastsInFlight>> sharing;

struct SharedCast : AutogradFunction<SharedCast> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& parameter, const at::Tensor& copy) {
    // Where the copy is the wider one, its gradient is handed on as it is (kernels::widen).
    const bool narrows = c10::promoteTypes(parameter.scalar_type(), copy.scalar_type()) == parameter.scalar_type();
    ctx->saved_data["back_to"] = static_cast<int64_t>(narrows ? parameter.scalar_type() : copy.scalar_type());
    const at::AutoDispatchBelowADInplaceOrView below;
    return at::alias(copy);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list& grads) {
    return {grads[0].to(static_cast<at::ScalarType>(ctx->saved_data["back_to"].toInt())), at::Tensor()};
  }
};

at::Tensor copy_of(const at::Tensor& parameter, at::ScalarType dtype, CastsInFlight& in_flight) {
  auto& known = in_flight.copies
                    .try_emplace(parameter.unsafeGetTensorImpl(),
                                 CastsInFlight::Copy{.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>())})
                    .first->second;
  const int64_t version = version_of(parameter);
  if (known.version == version && known.dtype == dtype && parameter.sizes() == at::IntArrayRef(known.sizes)) {
    if (auto storage = known.storage.lock()) {
      at::Tensor copy = at::empty({0}, parameter.options().dtype(dtype));
      return copy.set_(at::Storage(std::move(storage)), 0, known.sizes, known.strides);
    }
  }
  const at::NoGradGuard no_grad;
  at::Tensor copy = parameter.to(dtype);
  known = {.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(copy.storage().getWeakStorageImpl()),
           .sizes = copy.sizes().vec(),
           .strides = copy.strides().vec(),
           .version = version,
           .dtype = dtype};
  return copy;
}

}  // namespace

ShareCasts::ShareCasts() { *sharing = std::make_shared<CastsInFlight>(); }
ShareCasts::~ShareCasts() { sharing->reset(); }

at::Tensor cast_weight(const at::Tensor& used, at::ScalarType dtype) {
  if (used.scalar_type() == dtype) return used;
  const std::shared_ptr<CastsInFlight> in_flight = *sharing;
  // What is computed again keeps no copy, and must find the same operators both times.
  const bool kept = at::GradMode::is_enabled() && used.is_leaf() && !saved_tensors_are_computed_again();
  if (!in_flight || !kept) return kernels::widen(used, dtype);
  const at::Tensor copy = copy_of(used, dtype, *in_flight);
  return used.requires_grad() ? SharedCast::apply(used, copy) : copy;
}

}  // namespace tessera::nn
