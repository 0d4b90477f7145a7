#pragma once

namespace tessera::sim {

/// Gives the simulated devices tessera's fused kernels, and CUDA's attention. After install().
void register_kernels();

}  // namespace tessera::sim
