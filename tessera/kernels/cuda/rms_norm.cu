#include "tessera/kernels/cuda/common.cuh"
#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

template <class X, class W, class Y>
__global__ void forward_kernel(Y* out, float* rstd, const X* x, const W* weight, int64_t dim, float eps) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * dim;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float value = load(x, first + i);
    squares += value * value;
  }
  const float scale = 1.0f / sqrtf(sum_block(squares) / static_cast<float>(dim) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) store(out, first + i, load(x, first + i) * scale * load(weight, i));
}

template <class G, class X, class W>
__global__ void dx_kernel(X* dx, const G* grad, const X* x, const W* weight, const float* rstd, int64_t dim) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * dim;
  const float scale = rstd[blockIdx.x];
  float dot = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) dot += load(grad, first + i) * load(weight, i) * load(x, first + i) * scale;
  const float mean = sum_block(dot) / static_cast<float>(dim);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads)
    store(dx, first + i, scale * (load(grad, first + i) * load(weight, i) - load(x, first + i) * scale * mean));
}

/// In a grid_of_columns.
template <class G, class X>
__global__ void partial_kernel(float* partial, const G* grad, const X* x, const float* rstd, int64_t rows, int64_t dim) {
  const int64_t column = own_column();
  if (column >= dim) return;
  const int64_t first = first_row(), last = min(first + kRmsNormBlock, rows);
  float sum = 0;
  for (int64_t row = first; row < last; ++row) sum += load(grad, row * dim + column) * load(x, row * dim + column) * rstd[row];
  partial[blockIdx.x * dim + column] = sum;
}

void forward(const at::Tensor& out, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& input, const at::Tensor& added, const at::Tensor& weight,
             double eps) {
  if (rstd.numel() == 0) return;
  if (added.defined()) add_elements(sum, input, added);
  const at::Tensor& x = added.defined() ? sum : input;
  with_types(x.scalar_type(), weight.scalar_type(), out.scalar_type(), [&](auto a, auto b, auto c) {
    using X = decltype(a);
    using W = decltype(b);
    using Y = decltype(c);
    forward_kernel<<<rstd.numel(), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(out.data_ptr<Y>(), rstd.data_ptr<float>(), x.const_data_ptr<X>(),
                                                                                     weight.const_data_ptr<W>(), weight.size(0), static_cast<float>(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void backward(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& grad_sum,
              const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd) {
  const int64_t rows = rstd.numel(), dim = weight.size(0), blocks = partial.size(0);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  with_types(grad.scalar_type(), x.scalar_type(), weight.scalar_type(), [&](auto a, auto b, auto c) {
    using G = decltype(a);
    using X = decltype(b);
    using W = decltype(c);
    if (rows > 0) {
      dx_kernel<<<rows, kThreads, 0, stream>>>(dx.data_ptr<X>(), grad.const_data_ptr<G>(), x.const_data_ptr<X>(), weight.const_data_ptr<W>(),
                                               rstd.const_data_ptr<float>(), dim);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      const Grid grid = grid_of_columns(rows, dim);
      partial_kernel<<<dim3(grid.x, grid.y), kThreads, 0, stream>>>(partial.data_ptr<float>(), grad.const_data_ptr<G>(), x.const_data_ptr<X>(),
                                                                    rstd.const_data_ptr<float>(), rows, dim);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    sum_blocks_kernel<<<blocks_for(dim), kThreads, 0, stream>>>(d_weight.data_ptr<W>(), partial.const_data_ptr<float>(), blocks, dim, dim);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  if (grad_sum.defined()) add_elements(dx, dx, grad_sum);
}

}  // namespace

RmsNormRoutines rms_norm_routines() {
  RmsNormRoutines all;
  all.forward = forward;
  all.backward = backward;
  return all;
}

}  // namespace tessera::kernels::cuda
