#include "tessera/kernels/cpu/loops.h"

#include <string>

#include <ATen/Version.h>

namespace tessera::kernels::cpu {

namespace {
const Loops& choose() {
  const std::string capability = at::get_cpu_capability();
#if defined(__x86_64__)
  if (capability == "AVX512" && loops_avx512_bf16() && __builtin_cpu_supports("avx512bf16")) return *loops_avx512_bf16();
#endif
  if (capability == "AVX512" && loops_avx512()) return *loops_avx512();
  if ((capability == "AVX512" || capability == "AVX2") && loops_avx2()) return *loops_avx2();
  return *loops_baseline();
}
}  // namespace

const Loops& loops() {
  static const Loops& chosen = choose();
  return chosen;
}

}  // namespace tessera::kernels::cpu
