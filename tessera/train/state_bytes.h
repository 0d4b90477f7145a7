#pragma once

#include "tessera/config/config.h"

namespace tessera {

/// What training keeps of each parameter from step to step, in bytes, where nothing is sharded: w, g and k of ZeRO (arXiv:1910.02054).
struct BytesPerParameter {
  double weight = 0;    ///< that forward and backward use
  double gradient = 0;  ///< summed over micro-batches
  double state = 0;     ///< the optimizer's, master weights included

  double total() const { return weight + gradient + state; }
};

/// What the settings of precision and optimizer come to: (4, 4, 8) in fp32 with AdamW, (2, 4, 12) in bf16 with fp32 masters.
BytesPerParameter bytes_per_parameter(const Config& config);

/// What a rank keeps per parameter of the model, in bytes, with zero.stage `stage` over `ranks` of mesh.dp_shard:
/// none w+g+k; 1 w+g+k/N; 2 w+(g+k)/N; 3 (w+g+k)/N. Each of the three parts apart.
BytesPerParameter kept_per_parameter(const BytesPerParameter& whole, int stage, int ranks);

/// What of that lies on the host beside the device, as [offload] says, when most does: parts that live there; the copies and gradients of what the host's cores
/// update (HostOptimizer, HostGradients). State on disk is nowhere here.
BytesPerParameter beside_device_per_parameter(const Config& config, const BytesPerParameter& whole, int ranks);

/// What a rank needs of the memory of its host: what lies beside the device, and where the device is the host (`on_cpu`), what lies on it as well.
BytesPerParameter on_host_per_parameter(const Config& config, int ranks, bool on_cpu);

}  // namespace tessera
