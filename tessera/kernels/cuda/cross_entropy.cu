#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/cuda/common.cuh"
#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

struct RowSums {
  float most;    ///< largest logit
  double total;  ///< sum of exp(logit - most)
};

template <class T>
__device__ RowSums sums_of(const T* x, int64_t n) {
  float most = -INFINITY;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) most = fmaxf(most, load(x, i));
  most = reduce_block(most, [](float a, float b) { return fmaxf(a, b); });
  double total = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) total += expf(load(x, i) - most);
  return {most, sum_block(total)};
}

/// The logit that a target expects, minus `shift` for each logit; `label` out of range: it is not among these. For every thread of the block.
template <class T>
__device__ double expected_logit(const T* x, int64_t n, int64_t label, float shift, const LossTerms& terms) {
  const double at_label = label >= 0 && label < n ? terms.label * (static_cast<double>(load(x, label)) - shift) : 0;
  if (terms.each == 0) return at_label;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += load(x, i) - shift;
  return at_label + terms.each * sum_block(sum);
}

/// out = exp(x - shift) * factor - each, and `at_label` less at the label; out may be x. `sum` of exp(x - shift).
template <class T>
__device__ void write_gradient(const T* x, T* out, int64_t n, float shift, double sum, int64_t label, float scale, double lse, const LossTerms& terms) {
  const float factor = static_cast<float>(scale * (1 + 2 * terms.z * lse) / sum), each = static_cast<float>(scale * terms.each),
              at_label = static_cast<float>(scale * terms.label);
  for (int64_t i = threadIdx.x; i < n; i += kThreads) store(out, i, expf(load(x, i) - shift) * factor - (i == label ? at_label + each : each));
}

template <class T>
__device__ void write_zeros(T* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += kThreads) store(out, i, 0.0f);
}

__global__ void check_labels_kernel(int64_t n, const int64_t* labels, int64_t vocabulary) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) CUDA_KERNEL_ASSERT(labels[i] == kIgnoredLabel || (labels[i] >= 0 && labels[i] < vocabulary));
}

template <class T>
__global__ void forward_kernel(float* loss, float* lse, const T* logits, const int64_t* labels, int64_t vocabulary, LossTerms terms) {
  const int64_t row = blockIdx.x, label = labels[row];
  if (label < 0) {
    if (threadIdx.x == 0) loss[row] = lse[row] = 0.0f;
    return;
  }
  const T* x = logits + row * vocabulary;
  const RowSums sums = sums_of(x, vocabulary);
  const double expected = expected_logit(x, vocabulary, label, sums.most, terms);
  if (threadIdx.x != 0) return;
  const double log_sum = log(sums.total), row_lse = log_sum + sums.most;
  loss[row] = static_cast<float>(log_sum - expected + terms.z * row_lse * row_lse);
  lse[row] = static_cast<float>(row_lse);
}

template <class T>
__global__ void backward_kernel(T* d_logits, const float* grad_loss, const T* logits, const int64_t* labels, const float* lse, int64_t vocabulary,
                                LossTerms terms) {
  const int64_t row = blockIdx.x, label = labels[row];
  T* out = d_logits + row * vocabulary;
  if (label < 0) {
    write_zeros(out, vocabulary);
  } else {
    write_gradient(logits + row * vocabulary, out, vocabulary, lse[row], 1, label, *grad_loss, lse[row], terms);
  }
}

template <class T>
__global__ void in_place_kernel(T* logits, float* loss, const int64_t* labels, int64_t vocabulary, float scale, LossTerms terms) {
  const int64_t row = blockIdx.x, label = labels[row];
  T* x = logits + row * vocabulary;
  if (label < 0) {
    if (threadIdx.x == 0) loss[row] = 0.0f;
    write_zeros(x, vocabulary);
    return;
  }
  const RowSums sums = sums_of(x, vocabulary);
  const double expected = expected_logit(x, vocabulary, label, sums.most, terms), log_sum = log(sums.total), lse = log_sum + sums.most;
  if (threadIdx.x == 0) loss[row] = static_cast<float>(log_sum - expected + terms.z * lse * lse);
  __syncthreads();  // everyone has read the label's logit
  write_gradient(x, x, vocabulary, sums.most, sums.total, label, scale, lse, terms);
}

template <class T>
__global__ void part_kernel(float* most, float* sum, float* target, const T* logits, const int64_t* labels, int64_t vocabulary, int64_t first,
                            LossTerms terms) {
  const int64_t row = blockIdx.x, label = labels[row] - first;
  const T* x = logits + row * vocabulary;
  const RowSums sums = sums_of(x, vocabulary);
  const double expected = expected_logit(x, vocabulary, label, 0, terms);
  if (threadIdx.x != 0) return;
  most[row] = sums.most;
  sum[row] = static_cast<float>(sums.total);
  target[row] = static_cast<float>(expected);
}

template <class T>
__global__ void part_gradient_kernel(T* logits, const int64_t* labels, const float* lse, int64_t vocabulary, int64_t first, float scale, LossTerms terms) {
  const int64_t row = blockIdx.x;
  T* x = logits + row * vocabulary;
  if (labels[row] < 0) {
    write_zeros(x, vocabulary);
  } else {
    write_gradient(x, x, vocabulary, lse[row], 1, labels[row] - first, scale, lse[row], terms);
  }
}

__global__ void sum_kernel(float* total, const float* rows, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += rows[i];
  sum = sum_block(sum);
  if (threadIdx.x == 0) *total = static_cast<float>(sum);
}

void forward(const at::Tensor& loss, const at::Tensor& lse, const at::Tensor& logits, const at::Tensor& labels, const LossTerms& terms) {
  if (logits.size(0) == 0) return;
  with_type(logits.scalar_type(), [&](auto t) {
    using T = decltype(t);
    forward_kernel<<<logits.size(0), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        loss.data_ptr<float>(), lse.data_ptr<float>(), logits.const_data_ptr<T>(), labels.const_data_ptr<int64_t>(), logits.size(1), terms);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void backward(const at::Tensor& d_logits, const at::Tensor& grad_loss, const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse,
              const LossTerms& terms) {
  if (logits.size(0) == 0) return;
  with_type(logits.scalar_type(), [&](auto t) {
    using T = decltype(t);
    backward_kernel<<<logits.size(0), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(d_logits.data_ptr<T>(), grad_loss.const_data_ptr<float>(),
                                                                                        logits.const_data_ptr<T>(), labels.const_data_ptr<int64_t>(),
                                                                                        lse.const_data_ptr<float>(), logits.size(1), terms);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void in_place(const at::Tensor& logits, const at::Tensor& loss, const at::Tensor& labels, double scale, const LossTerms& terms) {
  if (logits.size(0) == 0) return;
  with_type(logits.scalar_type(), [&](auto t) {
    using T = decltype(t);
    in_place_kernel<<<logits.size(0), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        logits.data_ptr<T>(), loss.data_ptr<float>(), labels.const_data_ptr<int64_t>(), logits.size(1), static_cast<float>(scale), terms);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void part(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target, const at::Tensor& logits, const at::Tensor& labels, int64_t first,
          const LossTerms& terms) {
  if (logits.size(0) == 0) return;
  with_type(logits.scalar_type(), [&](auto t) {
    using T = decltype(t);
    part_kernel<<<logits.size(0), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(most.data_ptr<float>(), sum.data_ptr<float>(), target.data_ptr<float>(),
                                                                                    logits.const_data_ptr<T>(), labels.const_data_ptr<int64_t>(),
                                                                                    logits.size(1), first, terms);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void part_gradient(const at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& lse, double scale, const LossTerms& terms) {
  if (logits.size(0) == 0) return;
  with_type(logits.scalar_type(), [&](auto t) {
    using T = decltype(t);
    part_gradient_kernel<<<logits.size(0), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        logits.data_ptr<T>(), labels.const_data_ptr<int64_t>(), lse.const_data_ptr<float>(), logits.size(1), first, static_cast<float>(scale), terms);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void sum(const at::Tensor& total, const at::Tensor& rows) {
  sum_kernel<<<1, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(total.data_ptr<float>(), rows.const_data_ptr<float>(), rows.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// Nobody waits for what it finds: the next call that does throws what CUDA makes of a failed assertion.
void check_labels(const at::Tensor& labels, int64_t vocabulary) {
  if (labels.numel() == 0) return;
  check_labels_kernel<<<blocks_for(labels.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(labels.numel(), labels.const_data_ptr<int64_t>(),
                                                                                                      vocabulary);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

CrossEntropyRoutines cross_entropy_routines() {
  CrossEntropyRoutines all;
  all.forward = forward;
  all.backward = backward;
  all.in_place = in_place;
  all.part = part;
  all.part_gradient = part_gradient;
  all.sum = sum;
  all.check_labels = check_labels;
  return all;
}

}  // namespace tessera::kernels::cuda
