#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include <ATen/core/Tensor.h>

// CUDA's way to run a kernel, on a machine that has no GPU: kernels/cuda/*.cu are compiled for the host behind this header, with each `kernel<<<...>>>(...)`
// written as a Launch (to_host.cmake). What is right on a device whatever its threads' order must have the same bits here in any, so launches go through blocks
// and threads upwards and downwards in turns: where a __syncthreads() is missing, a thread reads what another has not written yet, or has written over.
//
// One operating system thread runs a launch, a block at a time; a block's threads are fibers that change only at __syncthreads(). Refused, as CUDA refuses it
// or leaves it undefined: grids of no blocks or too many, blocks of too many threads, a __syncthreads() that not all threads of a block come to, or come to at
// another place. What it does not know: warps, atomics, shared memory that nobody has written, and time.
namespace tessera::cuda_on_host {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
  template <class X>
  Dim3(X along_x) : x(static_cast<unsigned>(along_x)) {}
  Dim3(unsigned along_x, unsigned along_y, unsigned along_z = 1) : x(along_x), y(along_y), z(along_z) {}
};

inline thread_local Dim3 thread_index(0, 0, 0), block_index(0, 0, 0);

void sync_threads(const char* file, int line);
[[noreturn]] void failed_assertion(const char* file, int line, const char* condition);

/// Runs `thread` for each thread of the grid. What CUDA would refuse, and a failed assertion of the device, waits for throw_error().
void run(Dim3 grid, Dim3 block, const std::function<void()>& thread);
void throw_error();

class Launch {
 public:
  template <class Stream>
  Launch(Dim3 grid, Dim3 block, size_t, Stream&&) : grid_(grid), block_(block) {}

  template <class Kernel>
  auto of(Kernel kernel) const {
    return [*this, kernel](auto... arguments) { run(grid_, block_, [&] { kernel(arguments...); }); };
  }

 private:
  Dim3 grid_, block_;
};

}  // namespace tessera::cuda_on_host

#define __global__
#define __device__
#define __shared__ static thread_local
#define __syncthreads() ::tessera::cuda_on_host::sync_threads(__FILE__, __LINE__)
#define threadIdx ::tessera::cuda_on_host::thread_index
#define blockIdx ::tessera::cuda_on_host::block_index
#define dim3 ::tessera::cuda_on_host::Dim3
#undef CUDA_KERNEL_ASSERT
#define CUDA_KERNEL_ASSERT(condition) ((condition) ? void() : ::tessera::cuda_on_host::failed_assertion(__FILE__, __LINE__, #condition))

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
