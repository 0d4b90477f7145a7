#pragma once

#include <functional>

#include <torch/nn/options/linear.h>

#include "tessera/kernels/fp8.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

using LinearOptions = torch::nn::LinearOptions;

/// y = x weight^T + bias, as torch::nn::Linear: same options, parameter names, shapes and initial distribution.
///   x [..., I]   any dtype; cast to the compute dtype where it has another; with set_fp8, rounded to fp8 with a scale instead
///   y [..., O]   in the compute dtype
/// `weight` [O, I] and `bias` [O] stay in their own dtype: they are cast once per call, and autograd casts their gradients into their grad_dtype().
/// Kept for backward: x and the cast weight (fp8: both as they are).
class LinearImpl : public Module {
 public:
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const LinearOptions& options);

  at::Tensor forward(const at::Tensor& x);
  void reset_parameters();  ///< draws again from libtorch's generator, as a plain torch::nn::Linear does
  void pretty_print(std::ostream& stream) const override;

  /// Lets the matrix products of forward and backward run in fp8 (kernels::fp8_linear); nothing: in the compute dtype.
  void set_fp8(std::optional<kernels::Fp8Scaling> scaling) noexcept { fp8_ = scaling; }
  bool computes_in_fp8() const noexcept { return fp8_.has_value(); }

  /// Leaves the bias to whoever adds the ranks' products up, so that it is added once.
  void leave_bias_out(bool left_out) noexcept { bias_left_out_ = left_out; }

  /// Lets `product` compute x weight^T, x in the compute dtype, from here on: of a weight that is kept in fewer bits, say. The layer lets go of its own, which
  /// is no parameter any more.
  void set_product(std::function<at::Tensor(const at::Tensor& x)> product);

  /// Says that what it gives is not x weight^T + bias alone (set_product; terms that an interceptor adds): who would compute products in its place calls it.
  void set_called(bool called) noexcept { called_ = called; }
  bool has_to_be_called() const noexcept { return called_; }

  LinearOptions options;
  at::Tensor weight, bias;

 private:
  std::optional<kernels::Fp8Scaling> fp8_;
  std::function<at::Tensor(const at::Tensor& x)> product_;
  bool bias_left_out_ = false, called_ = false;
};
TESSERA_MODULE(Linear);

/// x weight^T + bias of one dtype, as at::linear; 16-bit products that the device lacks are widened (kernels/products.h). `bias` may be undefined.
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// `tensor` in `dtype`, differentiable; itself where it has that dtype or no dtype is asked for. The gradient of a 16-bit parameter in a wider type is handed
/// on unrounded (kernels/widen.h).
at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

/// In which type statistics and sums of `x` are computed, and what is made of them: fp64 where it is of that, otherwise fp32.
inline at::ScalarType wide_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace tessera::nn
