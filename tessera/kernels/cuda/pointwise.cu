#include "tessera/kernels/cuda/common.cuh"
#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

__device__ int64_t element() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// Launches `kernel` with a thread per element.
template <class Kernel, class... Arguments>
void for_elements(int64_t elements, Kernel kernel, Arguments... arguments) {
  if (elements == 0) return;
  kernel<<<blocks_for(elements), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(elements, arguments...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// u and its derivative of an activation x s(u(x)) (kernels/activation.h).
constexpr float kGelu = 1.5957691216f, kCubic = 0.044715f;
__device__ float argument(float x, Activation activation) { return activation == Activation::Silu ? x : x * kGelu * (1.0f + kCubic * x * x); }
__device__ float slope(float x, Activation activation) { return activation == Activation::Silu ? 1.0f : kGelu * (1.0f + 3.0f * kCubic * x * x); }

template <class X, class A>
__global__ void add_kernel(int64_t n, X* out, const X* x, const A* added) {
  const int64_t i = element();
  if (i < n) store(out, i, load(x, i) + load(added, i));
}

template <class X, class B>
__global__ void bias_activation_kernel(int64_t n, X* out, const X* x, const B* bias, int64_t dim, Activation activation) {
  const int64_t i = element();
  if (i >= n) return;
  const float value = load(x, i) + load(bias, i % dim);
  store(out, i, value * sigmoid(argument(value, activation)));
}

/// In a grid_of_columns.
template <class X, class B>
__global__ void bias_activation_backward_kernel(X* dx, float* partial, const X* grad, const X* x, const B* bias, int64_t rows, int64_t dim,
                                                Activation activation) {
  const int64_t column = own_column();
  if (column >= dim) return;
  const int64_t first = first_row(), last = min(first + kRmsNormBlock, rows);
  float sum = 0;
  for (int64_t row = first; row < last; ++row) {
    const int64_t i = row * dim + column;
    const float value = load(x, i) + load(bias, column), s = sigmoid(argument(value, activation));
    const float gradient = load(grad, i) * s * (1.0f + value * (1.0f - s) * slope(value, activation));
    store(dx, i, gradient);
    sum += gradient;
  }
  partial[blockIdx.x * dim + column] = sum;
}

/// A thread per column goes through the tokens in order, so that rows that several look up have one sum.
template <class T>
__global__ void embedding_gradient_kernel(int64_t dim, float* sum, int64_t sums, const T* rows, const int64_t* ids, int64_t count, int64_t padding_row) {
  const int64_t column = element();
  if (column >= dim) return;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t id = ids[row];
    if (id == padding_row) continue;
    CUDA_KERNEL_ASSERT(id >= 0 && id < sums);
    sum[id * dim + column] += load(rows, row * dim + column);
  }
}

template <class T>
__global__ void swiglu_kernel(int64_t n, T* out, const T* gate, const T* up, int64_t dim, int64_t gate_stride, int64_t up_stride, Activation activation) {
  const int64_t i = element();
  if (i >= n) return;
  const int64_t row = i / dim, column = i % dim;
  const float g = load(gate, row * gate_stride + column);
  store(out, i, g * sigmoid(argument(g, activation)) * load(up, row * up_stride + column));
}

template <class T>
__global__ void swiglu_backward_kernel(int64_t n, T* d_gate, T* d_up, const T* grad, const T* gate, const T* up, int64_t dim, int64_t gate_stride,
                                       int64_t up_stride, Activation activation) {
  const int64_t i = element();
  if (i >= n) return;
  const int64_t row = i / dim, column = i % dim;
  const float g = load(gate, row * gate_stride + column), s = sigmoid(argument(g, activation)), scaled = load(grad, i) * s;
  store(d_up, i, scaled * g);
  store(d_gate, i, scaled * load(up, row * up_stride + column) * (1.0f + g * (1.0f - s) * slope(g, activation)));
}

struct RopeShape {
  int64_t batch_stride, token_stride, head_stride, table_batch_stride, tokens, heads, half;
};

/// A thread per pair of features.
template <class T>
__global__ void rope_kernel(int64_t n, T* out, const T* x, const float* cos, const float* sin, RopeShape s, float sign) {
  const int64_t i = element();
  if (i >= n) return;
  const int64_t feature = i % s.half, head = i / s.half % s.heads, token = i / (s.half * s.heads);
  const int64_t batch = token / s.tokens, position = token % s.tokens;
  const int64_t angle = batch * s.table_batch_stride + position * s.half + feature;
  const int64_t from = batch * s.batch_stride + position * s.token_stride + head * s.head_stride + feature;
  const int64_t to = (token * s.heads + head) * 2 * s.half + feature;
  const float c = cos[angle], turned = sin[angle] * sign, x1 = load(x, from), x2 = load(x, from + s.half);
  store(out, to, x1 * c - x2 * turned);
  store(out, to + s.half, x2 * c + x1 * turned);
}

/// Word index % 4 of Philox 4x32-10's block index / 4, as tessera::CounterRng draws it.
__device__ uint32_t philox_word(uint64_t index, uint64_t key) {
  const uint64_t block = index / 4;
  uint32_t c[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0};
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, next2 = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
    c[0] = next0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = next2;
    c[3] = static_cast<uint32_t>(a);
  }
  return c[index % 4];
}

template <class T>
__global__ void dropout_kernel(int64_t n, T* out, const T* x, const int64_t* rows, int64_t dim, int64_t feature_offset, int64_t feature_total, uint64_t key,
                               float p, float keep_scale) {
  const int64_t i = element();
  if (i >= n) return;
  const auto index = static_cast<uint64_t>(rows[i / dim] * feature_total + feature_offset + i % dim);
  const float uniform = static_cast<float>(philox_word(index, key) >> 8) * 0x1p-24f;
  store(out, i, load(x, i) * (uniform >= p ? keep_scale : 0.0f));
}

template <class T>
__global__ void accumulate_kernel(int64_t n, float* sum, const T* term, bool first) {
  const int64_t i = element();
  if (i < n) sum[i] = (first ? 0.0f : sum[i]) + load(term, i);
}

void swiglu(const at::Tensor& out, const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  with_type(gate.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(out.numel(), swiglu_kernel<T>, out.data_ptr<T>(), gate.const_data_ptr<T>(), up.const_data_ptr<T>(), gate.size(1), gate.stride(0), up.stride(0),
                 activation);
  });
}

void swiglu_backward(const at::Tensor& d_gate, const at::Tensor& d_up, const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                     Activation activation) {
  with_type(gate.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(d_gate.numel(), swiglu_backward_kernel<T>, d_gate.data_ptr<T>(), d_up.data_ptr<T>(), grad.const_data_ptr<T>(), gate.const_data_ptr<T>(),
                 up.const_data_ptr<T>(), gate.size(1), gate.stride(0), up.stride(0), activation);
  });
}

void bias_activation(const at::Tensor& out, const at::Tensor& x, const at::Tensor& bias, Activation activation) {
  with_type(x.scalar_type(), [&](auto a) {
    with_type(bias.scalar_type(), [&](auto b) {
      using X = decltype(a);
      using B = decltype(b);
      for_elements(x.numel(), bias_activation_kernel<X, B>, out.data_ptr<X>(), x.const_data_ptr<X>(), bias.const_data_ptr<B>(), bias.size(0), activation);
    });
  });
}

void bias_activation_backward(const at::Tensor& dx, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& x,
                              const at::Tensor& bias, Activation activation) {
  const int64_t rows = x.size(0), dim = bias.size(0), blocks = partial.size(0);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  with_type(x.scalar_type(), [&](auto a) {
    with_type(bias.scalar_type(), [&](auto b) {
      using X = decltype(a);
      using B = decltype(b);
      if (rows > 0) {
        const Grid grid = grid_of_columns(rows, dim);
        bias_activation_backward_kernel<<<dim3(grid.x, grid.y), kThreads, 0, stream>>>(dx.data_ptr<X>(), partial.data_ptr<float>(), grad.const_data_ptr<X>(),
                                                                                       x.const_data_ptr<X>(), bias.const_data_ptr<B>(), rows, dim, activation);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      }
      sum_blocks_kernel<<<blocks_for(dim), kThreads, 0, stream>>>(d_bias.data_ptr<B>(), partial.const_data_ptr<float>(), blocks, dim, dim);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

void embedding_gradient(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row) {
  with_type(rows.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(sum.size(1), embedding_gradient_kernel<T>, sum.data_ptr<float>(), sum.size(0), rows.const_data_ptr<T>(), ids.const_data_ptr<int64_t>(),
                 ids.numel(), padding_row);
  });
}

void rope(const at::Tensor& out, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const RopeShape shape{x.stride(0), x.stride(1), x.stride(2), cos.dim() == 3 ? cos.stride(0) : 0, x.size(1), x.size(2), x.size(3) / 2};
  with_type(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(x.numel() / 2, rope_kernel<T>, out.data_ptr<T>(), x.const_data_ptr<T>(), cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), shape,
                 static_cast<float>(sign));
  });
}

void dropout(const at::Tensor& out, const at::Tensor& x, double p, int64_t key, const at::Tensor& rows, int64_t feature_offset, int64_t feature_total) {
  if (x.numel() == 0) return;
  const auto probability = static_cast<float>(p);
  with_type(x.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(x.numel(), dropout_kernel<T>, out.data_ptr<T>(), x.const_data_ptr<T>(), rows.const_data_ptr<int64_t>(), x.numel() / rows.numel(),
                 feature_offset, feature_total, static_cast<uint64_t>(key), probability, 1.0f / (1.0f - probability));
  });
}

void accumulate(const at::Tensor& sum, const at::Tensor& term, bool first) {
  with_type(term.scalar_type(), [&](auto t) {
    using T = decltype(t);
    for_elements(sum.numel(), accumulate_kernel<T>, sum.data_ptr<float>(), term.const_data_ptr<T>(), first);
  });
}

}  // namespace

void add_elements(const at::Tensor& out, const at::Tensor& x, const at::Tensor& added) {
  with_type(x.scalar_type(), [&](auto a) {
    with_type(added.scalar_type(), [&](auto b) {
      using X = decltype(a);
      using A = decltype(b);
      for_elements(x.numel(), add_kernel<X, A>, out.data_ptr<X>(), x.const_data_ptr<X>(), added.const_data_ptr<A>());
    });
  });
}

PointwiseRoutines pointwise_routines() {
  PointwiseRoutines all;
  all.swiglu = swiglu;
  all.swiglu_backward = swiglu_backward;
  all.bias_activation = bias_activation;
  all.bias_activation_backward = bias_activation_backward;
  all.embedding_gradient = embedding_gradient;
  all.rope = rope;
  all.dropout = dropout;
  all.accumulate = accumulate;
  return all;
}

}  // namespace tessera::kernels::cuda
