#pragma once

#include <cstdint>

#include <ATen/DeviceGuard.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include "tessera/kernels/activation.h"
#include "tessera/kernels/loss_terms.h"

/// What a device must bring to run the fused kernels. The operators (rms_norm.cpp and so on) check their arguments and allocate every result and temporary; a
/// routine only computes into what it is given. So a dry run on the meta device allocates exactly what a real one does, by running the same code with routines
/// that do nothing.
namespace tessera::kernels {

/// A routine of a device. Whatever device was the current one, the first tensor's is while it runs: a kernel goes to the current device's stream, and libtorch
/// makes none current for operators that are registered for all devices at once.
template <class Signature>
class Routine;

template <class... Arguments>
class Routine<void(const at::Tensor&, Arguments...)> {
 public:
  using Function = void (*)(const at::Tensor&, Arguments...);

  constexpr Routine() = default;
  constexpr Routine(Function run) : run_(run) {}
  void operator()(const at::Tensor& first, Arguments... others) const {
    const c10::OptionalDeviceGuard guard(at::device_of(first));
    run_(first, others...);
  }

 private:
  Function run_ = nullptr;
};

/// Of a residual stream that grows and is normalized in one pass, `added` is what it grows by, and `sum` the stream from there on; both may be undefined. Its
/// gradient that comes by other ways than the norm, `grad_sum`, is added to dx. Rows of all are contiguous.
struct RmsNormRoutines {
  /// out, rstd [rows], sum <- x, added, weight
  Routine<void(const at::Tensor& out, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight,
               double eps)>
      forward;
  /// dx, d_weight <- grad, grad_sum; partial [ceil(rows / kRmsNormBlock), D] fp32 is scratch
  Routine<void(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& grad_sum,
               const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd)>
      backward;
};

struct LayerNormRoutines {
  /// out, mean [rows], rstd [rows], sum <- x, added, weight, bias
  Routine<void(const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& x, const at::Tensor& added,
               const at::Tensor& weight, const at::Tensor& bias, double eps)>
      forward;
  /// dx, d_weight, d_bias <- grad, grad_sum; partial [ceil(rows / kRmsNormBlock), 2, D] fp32 is scratch
  Routine<void(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad,
               const at::Tensor& grad_sum, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd)>
      backward;
};

struct PointwiseRoutines {
  /// gate, up, and in backward the results, are [rows, F] with contiguous rows
  Routine<void(const at::Tensor& out, const at::Tensor& gate, const at::Tensor& up, Activation activation)> swiglu;
  Routine<void(const at::Tensor& d_gate, const at::Tensor& d_up, const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up, Activation activation)>
      swiglu_backward;
  /// x [rows, F] contiguous, bias [F]; partial [ceil(rows / kRmsNormBlock), F] fp32 is scratch
  Routine<void(const at::Tensor& out, const at::Tensor& x, const at::Tensor& bias, Activation activation)> bias_activation;
  Routine<void(const at::Tensor& dx, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias,
               Activation activation)>
      bias_activation_backward;
  /// sum [V, D] fp32 += rows [N, D] at ids [N], each in order; rows of padding_row are left out
  Routine<void(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row)> embedding_gradient;
  /// x [B, S, H, D] with contiguous features; sign -1 turns backwards
  Routine<void(const at::Tensor& out, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign)> rope;
  Routine<void(const at::Tensor& out, const at::Tensor& x, double p, int64_t key, const at::Tensor& rows, int64_t feature_offset, int64_t feature_total)>
      dropout;
  /// sum [n] fp32 <- term, or += term
  Routine<void(const at::Tensor& sum, const at::Tensor& term, bool first)> accumulate;
};

/// Loss and gradient are those of LossTerms; rows of negative labels have neither.
struct CrossEntropyRoutines {
  /// loss, lse [T] <- logits [T, V]
  Routine<void(const at::Tensor& loss, const at::Tensor& lse, const at::Tensor& logits, const at::Tensor& labels, const LossTerms& terms)> forward;
  /// d_logits <- gradient * grad_loss []
  Routine<void(const at::Tensor& d_logits, const at::Tensor& grad_loss, const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse,
               const LossTerms& terms)>
      backward;
  /// loss [T]; logits <- gradient * scale
  Routine<void(const at::Tensor& logits, const at::Tensor& loss, const at::Tensor& labels, double scale, const LossTerms& terms)> in_place;
  /// most, sum, target [T] <- logits [T, V], the columns `first` .. `first + V` of the whole (VocabularyParts)
  Routine<void(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target, const at::Tensor& logits, const at::Tensor& labels, int64_t first,
               const LossTerms& terms)>
      part;
  /// logits <- gradient * scale; lse [T] over all columns
  Routine<void(const at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& lse, double scale, const LossTerms& terms)> part_gradient;
  /// total [] <- sum of rows [T], in one order
  Routine<void(const at::Tensor& total, const at::Tensor& rows)> sum;
  /// refuses labels that are neither in [0, vocabulary) nor -100; where the host would have to wait for them, a kernel asserts it, which ends the device's work
  Routine<void(const at::Tensor& labels, int64_t vocabulary)> check_labels;
};

/// See dispatch.h. What is empty does not come here.
struct DispatchRoutines {
  /// chosen [T, K] <- the K largest of scores [T, E], the lower index of equal ones first
  Routine<void(const at::Tensor& chosen, const at::Tensor& scores)> choose;
  /// slots [T, K], order [N], counts [E] <- chosen [T, K]
  Routine<void(const at::Tensor& slots, const at::Tensor& order, const at::Tensor& counts, const at::Tensor& chosen, int64_t capacity)> plan;
  /// out[n] <- x[order[n] / k], times weights[order[n]] where they are defined; zero where order[n] < 0
  Routine<void(const at::Tensor& out, const at::Tensor& x, const at::Tensor& order, int64_t k, const at::Tensor& weights)> gather;
  /// out[t] <- sum over k of rows[slots[t, k]], each times weights[t, k] where they are defined
  Routine<void(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& slots, const at::Tensor& weights)> combine;
  /// out [T, K] fp32 <- rows[slots[t, k]] . grad[t]
  Routine<void(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& grad, const at::Tensor& slots)> weigh;
};

struct Routines {
  RmsNormRoutines rms_norm;
  LayerNormRoutines layer_norm;
  PointwiseRoutines pointwise;
  CrossEntropyRoutines cross_entropy;
  DispatchRoutines dispatch;
  bool (*multiplies_bf16)(c10::DeviceIndex device) = nullptr;  ///< whether the device has bf16 products; null: the CPU's own rules, or every device has
};

/// Rows whose contributions to the gradient of a norm's weight, or of a bias, are summed into one partial row.
inline constexpr int64_t kRmsNormBlock = 64;

/// Called once per device type when the library loads.
void register_routines(c10::DeviceType device, const Routines& routines);

/// The routines of the tensor's device. Throws ConfigError where there are none.
const Routines& routines_for(const at::Tensor& tensor);

/// Whether a type of device has any.
bool has_routines(c10::DeviceType device);

/// Routines::multiplies_bf16 of a type of device; null where it has no routines.
bool (*device_multiplies_bf16(c10::DeviceType device))(c10::DeviceIndex);

}  // namespace tessera::kernels
