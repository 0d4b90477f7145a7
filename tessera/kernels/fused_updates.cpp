#include "tessera/kernels/fused_updates.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw_cpu_dispatch.h>
#include <ATen/ops/_fused_sgd_cpu_dispatch.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/adamw.h"
#include "tessera/kernels/replace_operators.h"

// Compiled without contraction of products and sums (CMakeLists.txt): an element's bits must not depend on whether it falls into a vectorized loop's body. The
// operators stay libtorch's, and get kernels that hand everything on unless the guard says otherwise (as kernels/fp32_products.cpp does): so meta kernels,
// recorders, and accelerators that compute on the host know the update by its name.

namespace tessera::kernels {

namespace {

constexpr int64_t kGrain = 1 << 14;

const Ambient<const UpdatesByElement::Besides*> by_element;  // null: libtorch's

/// Side by side in memory, in one order and, but for those of a kind that may be narrower, one type.
bool lie_alike(std::initializer_list<at::TensorList> lists, at::TensorList of_any_type = {}) {
  const at::TensorList& first = *lists.begin();
  for (size_t i = 0; i < first.size(); ++i) {
    if (!first[i].is_non_overlapping_and_dense()) return false;
    for (const at::TensorList& list : lists) {
      if (list.empty()) continue;
      const at::Tensor& other = list[i];
      if (other.sizes() != first[i].sizes() || other.strides() != first[i].strides() || other.scalar_type() != first[i].scalar_type()) return false;
    }
    if (!of_any_type.empty() && (of_any_type[i].sizes() != first[i].sizes() || of_any_type[i].strides() != first[i].strides())) return false;
  }
  return true;
}

bool is_skipped(const std::optional<at::Tensor>& found_inf) { return found_inf && found_inf->const_data_ptr<float>()[0] != 0; }

void adamw_of_doubles(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const AdamWStep& step) {
  auto* const p = parameter.data_ptr<double>();
  const auto* const g = gradient.const_data_ptr<double>();
  auto *const m = exp_avg.data_ptr<double>(), *const v = exp_avg_sq.data_ptr<double>();
  const auto count = static_cast<double>(step.step);
  const double kept = 1 - step.lr * step.weight_decay, step_size = step.lr / (1 - std::pow(step.beta1, count)),
               root = std::sqrt(1 - std::pow(step.beta2, count)), eps = step.eps, beta1 = step.beta1, beta2 = step.beta2, scale = step.gradient_scale;
  parallel_for(0, parameter.numel(), kGrain, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const double gradient = g[i] * scale;
      m[i] = beta1 * m[i] + (1 - beta1) * gradient;
      v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
      p[i] = kept * p[i] - step_size * m[i] / (std::sqrt(v[i]) / root + eps);
    }
  });
}

void fused_adamw(at::TensorList parameters, at::TensorList gradients, at::TensorList averages, at::TensorList squares, at::TensorList most,
                 at::TensorList steps, double lr, double beta1, double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                 const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  const UpdatesByElement::Besides* const besides = *by_element;
  bool ours = besides != nullptr && !amsgrad && !maximize && !grad_scale && lie_alike({parameters, averages, squares}, gradients);
  for (size_t i = 0; ours && i < parameters.size(); ++i) {
    const at::ScalarType type = parameters[i].scalar_type(), of_gradient = gradients[i].scalar_type();
    ours = type == at::kFloat ? of_gradient == at::kFloat || of_gradient == at::kBFloat16 || of_gradient == at::kHalf
                              : type == at::kDouble && of_gradient == at::kDouble;
  }
  if (!ours) {
    invariant(besides == nullptr || (besides->gradient_scale == 1 && besides->copies == nullptr),
              "an update of AdamW in one pass of tensors that it cannot take");
    return at::cpu::_fused_adamw_(parameters, gradients, averages, squares, most, steps, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, grad_scale,
                                  found_inf);
  }
  if (is_skipped(found_inf)) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const AdamWStep step{.lr = lr,
                         .beta1 = beta1,
                         .beta2 = beta2,
                         .eps = eps,
                         .weight_decay = weight_decay,
                         .step = static_cast<int64_t>(steps[i].const_data_ptr<float>()[0]),
                         .gradient_scale = besides->gradient_scale};
    if (parameters[i].scalar_type() == at::kFloat) {
      adamw_(parameters[i], gradients[i], averages[i], squares[i], step, besides->copies != nullptr ? (*besides->copies)[i] : at::Tensor());
    } else {
      adamw_of_doubles(parameters[i], gradients[i], averages[i], squares[i], step);
    }
  }
}

struct SgdStep {
  double lr, momentum, weight_decay;
};

/// `buffer` is null without momentum.
template <class T>
void sgd_elements(T* p, const T* g, T* buffer, int64_t count, const SgdStep& step) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto lr = static_cast<Wide>(step.lr), momentum = static_cast<Wide>(step.momentum), decay = static_cast<Wide>(step.weight_decay);
  parallel_for(0, count, kGrain, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto weight = static_cast<Wide>(p[i]);
      Wide direction = static_cast<Wide>(g[i]) + decay * weight;
      if (buffer != nullptr) {
        direction = momentum * static_cast<Wide>(buffer[i]) + direction;
        buffer[i] = static_cast<T>(direction);
      }
      p[i] = static_cast<T>(weight - lr * direction);
    }
  });
}

void fused_sgd(at::TensorList parameters, at::TensorList gradients, at::TensorList buffers, double weight_decay, double momentum, double lr, double dampening,
               bool nesterov, bool maximize, bool is_first_step, const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  const bool ours = *by_element != nullptr && dampening == 0 && !nesterov && !maximize && !is_first_step && !grad_scale &&
                    lie_alike({parameters, gradients, buffers}) &&
                    std::ranges::all_of(parameters, [](const at::Tensor& p) { return p.is_floating_point() && p.element_size() > 1; });
  if (!ours) {
    return at::cpu::_fused_sgd_(parameters, gradients, buffers, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, grad_scale,
                                found_inf);
  }
  if (is_skipped(found_inf)) return;
  const SgdStep step{.lr = lr, .momentum = momentum, .weight_decay = weight_decay};
  for (size_t i = 0; i < parameters.size(); ++i) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, parameters[i].scalar_type(), "fused_sgd", [&] {
      sgd_elements(parameters[i].data_ptr<scalar_t>(), gradients[i].const_data_ptr<scalar_t>(), buffers.empty() ? nullptr : buffers[i].data_ptr<scalar_t>(),
                   parameters[i].numel(), step);
    });
  }
}

[[maybe_unused]] const torch::Library replaced = replace_operators(__FILE__, __LINE__, [](torch::Library& library) {
  library.impl("_fused_adamw_", fused_adamw);
  library.impl("_fused_sgd_", fused_sgd);
});

}  // namespace

UpdatesByElement::UpdatesByElement(const Besides& besides) : besides_(besides), former_(std::exchange(*by_element, &besides_)) {}
UpdatesByElement::~UpdatesByElement() { *by_element = former_; }

}  // namespace tessera::kernels
