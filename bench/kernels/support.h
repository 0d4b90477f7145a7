#pragma once

#include <cstdint>

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

/// Shared by the kernel benchmarks. Each kernel is measured beside the same operator as PyTorch composes it in eager mode; "bound" is the share of this
/// machine's measured bandwidth (or of the bare matrix products' time) that the kernel reaches, 1 being as fast as the bytes (or the products) allow.
namespace tessera::bench {

/// Bytes per second of a parallel read-modify-write of 256 MiB, measured once.
double memory_bandwidth();

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype, bool requires_grad = false);

/// Sets bytes_per_second and bound from the bytes that one iteration has to move at least.
void report_bytes(benchmark::State& state, double bytes_per_iteration);

/// benchmark argument -> dtype: 0 fp32, 1 bf16
inline at::ScalarType dtype_of(int64_t argument) { return argument == 0 ? at::kFloat : at::kBFloat16; }

}  // namespace tessera::bench
