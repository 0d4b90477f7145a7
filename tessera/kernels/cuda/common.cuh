#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

#include "tessera/kernels/cuda/grid.h"

/// Shared by the CUDA kernels. They are written to be right and plain: a block per row, sums in fp32 (double where a row is long), every order of summation
/// fixed by the sizes.
namespace tessera::kernels::cuda {

/// f(T{}) with T float or at::BFloat16.
template <class F>
void with_type(at::ScalarType type, F&& f) {
  if (type == at::kFloat) {
    f(float{});
  } else {
    f(at::BFloat16{});
  }
}

/// The same for three tensors' types.
template <class F>
void with_types(at::ScalarType a, at::ScalarType b, at::ScalarType c, F&& f) {
  with_type(a, [&](auto x) { with_type(b, [&](auto y) { with_type(c, [&](auto z) { f(x, y, z); }); }); });
}

template <class T>
__device__ float load(const T* from, int64_t i) {
  return static_cast<float>(from[i]);
}
template <class T>
__device__ void store(T* to, int64_t i, float value) {
  to[i] = static_cast<T>(value);
}

/// In a grid_of_columns: this thread's column, and the first of this block's rows.
inline __device__ int64_t own_column() { return static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; }
inline __device__ int64_t first_row() { return static_cast<int64_t>(blockIdx.x) * kRmsNormBlock; }

/// to[column] <- sum over blocks, in order, of from[block * width + column].
template <class W>
__global__ void sum_blocks_kernel(W* to, const float* from, int64_t blocks, int64_t width, int64_t dim) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= dim) return;
  float sum = 0;
  for (int64_t block = 0; block < blocks; ++block) sum += from[block * width + column];
  store(to, column, sum);
}

/// combine over the block's kThreads values, in a fixed tree; every thread gets the result.
template <class V, class Combine>
__device__ V reduce_block(V value, Combine combine) {
  __shared__ V values[kThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    if (threadIdx.x < stride) values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + stride]);
    __syncthreads();
  }
  const V result = values[0];
  __syncthreads();
  return result;
}

template <class V>
__device__ V sum_block(V value) {
  return reduce_block(value, [](V a, V b) { return a + b; });
}

}  // namespace tessera::kernels::cuda
