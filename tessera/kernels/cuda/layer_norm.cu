#include "tessera/kernels/cuda/common.cuh"
#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

template <class X, class W, class Y>
__global__ void forward_kernel(Y* out, float* means, float* rstds, const X* x, const W* weight, const W* bias, int64_t dim, float eps) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * dim;
  float sum = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) sum += load(x, first + i);
  const float mean = sum_block(sum) / static_cast<float>(dim);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float centered = load(x, first + i) - mean;
    squares += centered * centered;
  }
  const float rstd = 1.0f / sqrtf(sum_block(squares) / static_cast<float>(dim) + eps);
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    rstds[blockIdx.x] = rstd;
  }
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) store(out, first + i, (load(x, first + i) - mean) * rstd * load(weight, i) + load(bias, i));
}

template <class G, class X, class W>
__global__ void dx_kernel(X* dx, const G* grad, const X* x, const W* weight, const float* means, const float* rstds, int64_t dim) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * dim;
  const float mean = means[blockIdx.x], rstd = rstds[blockIdx.x];
  float dot = 0, total = 0;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float g = load(grad, first + i) * load(weight, i);
    dot += g * (load(x, first + i) - mean) * rstd;
    total += g;
  }
  const float along = sum_block(dot) / static_cast<float>(dim), shift = sum_block(total) / static_cast<float>(dim);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads)
    store(dx, first + i, rstd * (load(grad, first + i) * load(weight, i) - shift - (load(x, first + i) - mean) * rstd * along));
}

/// In a grid_of_columns.
template <class G, class X>
__global__ void partial_kernel(float* partial, const G* grad, const X* x, const float* means, const float* rstds, int64_t rows, int64_t dim) {
  const int64_t column = own_column();
  if (column >= dim) return;
  const int64_t first = first_row(), last = min(first + kRmsNormBlock, rows);
  float of_weight = 0, of_bias = 0;
  for (int64_t row = first; row < last; ++row) {
    const float given = load(grad, row * dim + column);
    of_weight += given * (load(x, row * dim + column) - means[row]) * rstds[row];
    of_bias += given;
  }
  float* const own = partial + blockIdx.x * 2 * dim;
  own[column] = of_weight;
  own[dim + column] = of_bias;
}

void forward(const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& input, const at::Tensor& added,
             const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (rstd.numel() == 0) return;
  if (added.defined()) add_elements(sum, input, added);
  const at::Tensor& x = added.defined() ? sum : input;
  with_types(x.scalar_type(), weight.scalar_type(), out.scalar_type(), [&](auto a, auto b, auto c) {
    using X = decltype(a);
    using W = decltype(b);
    using Y = decltype(c);
    forward_kernel<<<rstd.numel(), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(out.data_ptr<Y>(), mean.data_ptr<float>(), rstd.data_ptr<float>(),
                                                                                     x.const_data_ptr<X>(), weight.const_data_ptr<W>(),
                                                                                     bias.const_data_ptr<W>(), weight.size(0), static_cast<float>(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void backward(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad,
              const at::Tensor& grad_sum, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd) {
  const int64_t rows = rstd.numel(), dim = weight.size(0), blocks = partial.size(0);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  with_types(grad.scalar_type(), x.scalar_type(), weight.scalar_type(), [&](auto a, auto b, auto c) {
    using G = decltype(a);
    using X = decltype(b);
    using W = decltype(c);
    const float *means = mean.const_data_ptr<float>(), *rstds = rstd.const_data_ptr<float>();
    if (rows > 0) {
      dx_kernel<<<rows, kThreads, 0, stream>>>(dx.data_ptr<X>(), grad.const_data_ptr<G>(), x.const_data_ptr<X>(), weight.const_data_ptr<W>(), means, rstds,
                                               dim);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      const Grid grid = grid_of_columns(rows, dim);
      partial_kernel<<<dim3(grid.x, grid.y), kThreads, 0, stream>>>(partial.data_ptr<float>(), grad.const_data_ptr<G>(), x.const_data_ptr<X>(), means, rstds,
                                                                    rows, dim);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    const float* const sums = partial.const_data_ptr<float>();
    sum_blocks_kernel<<<blocks_for(dim), kThreads, 0, stream>>>(d_weight.data_ptr<W>(), sums, blocks, 2 * dim, dim);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    sum_blocks_kernel<<<blocks_for(dim), kThreads, 0, stream>>>(d_bias.data_ptr<W>(), sums + dim, blocks, 2 * dim, dim);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  if (grad_sum.defined()) add_elements(dx, dx, grad_sum);
}

}  // namespace

LayerNormRoutines layer_norm_routines() {
  LayerNormRoutines all;
  all.forward = forward;
  all.backward = backward;
  return all;
}

}  // namespace tessera::kernels::cuda
