#pragma once

namespace tessera::kernels {

/// Whether this machine's CPU has what libtorch names so ("avx512_f", "amx_bf16"); see at::cpu::get_cpu_capabilities.
bool processor_has(const char* capability);

}  // namespace tessera::kernels
