#include "tessera/kernels/fp8.h"

#include <limits>

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/kernels/operator.h"

namespace tessera::kernels {

namespace {

double largest_of(at::ScalarType dtype) {
  if (dtype == at::kFloat8_e4m3fn) return std::numeric_limits<c10::Float8_e4m3fn>::max();
  require(dtype == at::kFloat8_e5m2, "to_fp8: dtype ", c10::toString(dtype), ": expected Float8_e4m3fn or Float8_e5m2");
  return std::numeric_limits<c10::Float8_e5m2>::max();
}

struct Fp8LinearFunction : AutogradFunction<Fp8LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, at::ScalarType out_dtype,
                            int64_t scaling) {
    context->save_for_backward({x, weight});
    context->saved_data["out_dtype"] = static_cast<int64_t>(out_dtype);
    context->saved_data["scaling"] = scaling;
    return fp8_product(x, at::kFloat8_e4m3fn, weight, at::kFloat8_e4m3fn, out_dtype, static_cast<Fp8Scaling>(scaling));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    const auto out_dtype = static_cast<at::ScalarType>(context->saved_data["out_dtype"].toInt());
    const auto scaling = static_cast<Fp8Scaling>(context->saved_data["scaling"].toInt());
    at::Tensor dx, d_weight;
    if (context->needs_input_grad(0)) dx = fp8_linear_input_gradient(dy, weight, x, out_dtype, scaling);
    if (context->needs_input_grad(1)) d_weight = fp8_linear_weight_gradient(dy, x, weight.scalar_type(), out_dtype, scaling);
    return {dx, d_weight, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor fp8_product(const at::Tensor& left, at::ScalarType left_dtype, const at::Tensor& right, at::ScalarType right_dtype, at::ScalarType out_dtype,
                       Fp8Scaling scaling) {
  if (left.numel() == 0 || right.numel() == 0) return at::zeros({left.size(0), right.size(0)}, left.options().dtype(out_dtype));
  // What is contracted lies side by side in both, as tensor cores want it.
  const Fp8Matrix a = to_fp8(left, left_dtype, scaling), b = to_fp8(right, right_dtype, scaling);
  // On a CPU oneDNN has a fast product for scales by row alone, so there one scale is repeated; a dry run holds the CPU's memory.
  const bool by_row = scaling == Fp8Scaling::Row || !left.is_cuda();
  const auto scale_of = [&](const Fp8Matrix& matrix) {
    return by_row ? at::empty({matrix.values.size(0), 1}, matrix.scale.options()).copy_(matrix.scale) : matrix.scale;
  };
  const at::Tensor b_scale = scale_of(b);
  return at::_scaled_mm(a.values, b.values.t(), scale_of(a), by_row ? b_scale.t() : b_scale, /*bias=*/{}, /*scale_result=*/{}, out_dtype,
                        /*use_fast_accum=*/false);
}

Fp8Matrix to_fp8(const at::Tensor& x, at::ScalarType dtype, Fp8Scaling scaling) {
  require(x.dim() == 2, "to_fp8: x ", x.sizes(), " must be a matrix");
  const at::Tensor wide = x.to(at::kFloat);
  const std::vector<int64_t> over = scaling == Fp8Scaling::Row ? std::vector<int64_t>{1} : std::vector<int64_t>{0, 1};
  const at::Tensor largest = at::amax(wide.abs(), over, /*keepdim=*/scaling == Fp8Scaling::Row);
  // No subnormal scale, which is rounded by up to a half of itself, so that what is divided by it is beyond the format: rows so small become zeros.
  const at::Tensor quotient = largest.div(largest_of(dtype)).clamp_min_(std::numeric_limits<float>::min());
  const at::Tensor scale = at::where(largest.gt(0), quotient, 1.0).to(at::kFloat).contiguous();
  return {.values = wide.div(scale).to(dtype).contiguous(), .scale = scale};
}

at::Tensor fp8_linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& x, at::ScalarType out_dtype, Fp8Scaling scaling) {
  return fp8_product(as_rows(dy), at::kFloat8_e5m2, weight.t(), at::kFloat8_e4m3fn, out_dtype, scaling).to(x.scalar_type()).view(x.sizes());
}

at::Tensor fp8_linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::ScalarType dtype, at::ScalarType out_dtype, Fp8Scaling scaling) {
  return fp8_product(as_rows(dy).t(), at::kFloat8_e5m2, as_rows(x).t(), at::kFloat8_e4m3fn, out_dtype, scaling).to(dtype);
}

at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::ScalarType out_dtype, Fp8Scaling scaling) {
  require(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), "fp8_linear: x ", x.sizes(), " and weight ", weight.sizes(),
          " must have one number of features");
  require(out_dtype == at::kBFloat16 || out_dtype == at::kFloat, "fp8_linear: out_dtype ", c10::toString(out_dtype), ": expected BFloat16 or Float");
  const at::Tensor rows = as_rows(x);
  const int64_t tokens = rows.size(0), features = rows.size(1);
  if (x.is_cuda()) {
    constexpr int64_t multiple = 16;
    require(tokens % multiple == 0 && features % multiple == 0 && weight.size(0) % multiple == 0, "precision.compute = fp8: a product of ", tokens,
            " tokens with a weight ", weight.sizes(), " has a size that is no multiple of ", multiple,
            ", which this device needs; change the model's sizes, or set precision.compute = bf16");
  }
  const at::Tensor y = Fp8LinearFunction::apply(rows, weight, out_dtype, static_cast<int64_t>(scaling));
  auto shape = x.sizes().vec();
  shape.back() = weight.size(0);
  const at::Tensor shaped = y.view(shape);
  return bias ? shaped + bias->to(out_dtype) : shaped;
}

}  // namespace tessera::kernels
