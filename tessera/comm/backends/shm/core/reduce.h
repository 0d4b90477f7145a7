#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/comm/operation.h"

/// Arithmetic of the reductions: n sources, one element after the other, in the order of the sources.
namespace tessera::comm::shm {

enum class Type : uint8_t { Float, Double, Half, BFloat16, Int8, Int16, Int32, Int64, UInt8, Bool };
using Reduction = Op;
inline constexpr int kTypes = 10, kReductions = 4;

size_t size_of(Type type);
std::string_view name_of(Type type);

/// out[i] <- ((sources[0][i] op sources[1][i]) op sources[2][i]) ... for `count` elements, n >= 2. `out` may be one of the sources.
/// fp16 and bf16 are accumulated in fp32 and rounded once, to nearest even. Integers wrap. Of bools, sum and max are "or", product and min "and".
/// A NaN anywhere gives NaN. The bits depend neither on `count` nor on where the part begins, nor on the processor.
using ReduceLoop = void (*)(void* out, const void* const* sources, int n, size_t count);

/// The loop for this processor.
ReduceLoop reduce_loop(Type type, Reduction reduction);

/// One loop of each kind, compiled for one instruction set; null where this build or this processor lacks it.
struct ReduceLoops {
  ReduceLoop loops[kTypes][kReductions];
};
const ReduceLoops* reduce_loops_baseline();
const ReduceLoops* reduce_loops_avx2();
const ReduceLoops* reduce_loops_avx512();

}  // namespace tessera::comm::shm
