#include "tessera/comm/backends/shm/core/reduce.h"

#include <array>

namespace tessera::comm::shm {
namespace {

const ReduceLoops& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  if (avx512 && reduce_loops_avx512()) return *reduce_loops_avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && reduce_loops_avx2()) return *reduce_loops_avx2();
#endif
  return *reduce_loops_baseline();
}

}  // namespace

size_t size_of(Type type) {
  static constexpr std::array<size_t, kTypes> sizes{4, 8, 2, 2, 1, 2, 4, 8, 1, 1};
  return sizes[static_cast<size_t>(type)];
}

std::string_view name_of(Type type) {
  static constexpr std::array<std::string_view, kTypes> names{"float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"};
  return names[static_cast<size_t>(type)];
}

ReduceLoop reduce_loop(Type type, Reduction reduction) {
  static const ReduceLoops& chosen = choose();
  return chosen.loops[static_cast<size_t>(type)][static_cast<size_t>(reduction)];
}

}  // namespace tessera::comm::shm
