#include "tessera/kernels/cpu/loops.h"

#include <string>

#include <ATen/Version.h>

namespace tessera::kernels::cpu {

namespace {
const Loops& choose() {
  const std::string capability = at::get_cpu_capability();
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
