#pragma once

#include "tessera/config/config.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

struct PlacedElements;  // tessera/train/places.h

/// What training keeps of each parameter from step to step, in bytes, where nothing is sharded: w, g and k of ZeRO (arXiv:1910.02054). With [lora] and
/// [quantize] the mean over the parameters that the model's shape has: of what is frozen there is the weight alone.
struct BytesPerParameter {
  double weight = 0;     ///< that forward and backward use
  double gradient = 0;   ///< summed over micro-batches
  double state = 0;      ///< the optimizer's, master weights included
  double quantized = 0;  ///< weights in fewer bits, which stage 3 shards and nothing moves

  double total() const { return weight + gradient + state + quantized; }
};

/// What the settings of precision and optimizer come to: (4, 4, 8) in fp32 with AdamW, (2, 4, 12) in bf16 with fp32 masters.
BytesPerParameter bytes_per_parameter(const Config& config);

/// The same of the parameters of one kind, by what updates them, or of a frozen one.
BytesPerParameter bytes_of(const PlacedElements& kind, const Config& config);

/// How many elements are trained, as a share of the parameters that the model's shape has: 1, but for [lora].
double trained_share(const Config& config);

/// Who shares out what is sharded. Experts are dealt over these ranks and those of mesh.tp (expert_grid), so that a rank has another part of them than of the
/// rest of the model also of what nothing shards.
struct Sharers {
  Sharers(int ranks, double experts = 1) : ranks(ranks), experts(experts) {}  // NOLINT(google-explicit-constructor)

  int ranks;       ///< of mesh.dp_shard and mesh.cp
  double experts;  ///< of an expert, where nothing is sharded, as a multiple of what a rank has of another layer: tp / (ep * expert_tp)
};
Sharers sharers(const Config& config, const MeshShape& shape);

/// What a rank keeps per parameter of the model, in bytes, with zero.stage `stage` over `ranks` of mesh.dp_shard:
/// none w+g+k; 1 w+g+k/N; 2 w+(g+k)/N; 3 (w+g+k)/N. Each of the parts apart. Of what is not sharded it has `part`.
BytesPerParameter kept_per_parameter(const BytesPerParameter& whole, int stage, int ranks, double part = 1);

/// What of that lies on the host beside the device, as [offload] says, when most does: parts that live there; the copies and gradients of what the host's cores
/// update (HostOptimizer, HostGradients). What is on disk is nowhere here. Where patterns say so, the mean over the model's elements.
BytesPerParameter beside_device_per_parameter(const Config& config, const Sharers& sharers);

/// What a rank needs of the memory of its host: what lies beside the device, and where the device is the host (`on_cpu`), what lies on it as well.
BytesPerParameter on_host_per_parameter(const Config& config, const Sharers& sharers, bool on_cpu);

/// What a step of `micro_batches` writes to a rank's files in offload.dir and reads from them, in bytes a parameter, where the host has no memory to keep any
/// of it: state out and in, slices once for each gather and for the update, gradients as they are added up, normed, clipped and used. Of what is frozen slices
/// go in for the gathers.
struct DiskTraffic {
  double write = 0, read = 0;
};
DiskTraffic disk_traffic_per_parameter(const Config& config, const Sharers& sharers, int64_t micro_batches);

/// What a rank's files in offload.dir hold of it from step to step.
BytesPerParameter on_disk_per_parameter(const Config& config, const Sharers& sharers);

}  // namespace tessera
