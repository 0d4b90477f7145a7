#pragma once

#include "tessera/fsdp/sharded_units.h"

namespace tessera {

/// Gives every parameter and buffer of `root` that is on meta memory on `device`; our modules write the values of their buffers.
void give_memory(torch::nn::Module& root, at::Device device);

/// Lets options.init write each unit's whole parameters, one unit at a time, and keeps this rank's rows. Memory: one unit. Throws ConfigError naming a
/// parameter of which it left elements unwritten, or that no longer has its shape or its memory. With meta as the device it is not called.
void initialize_units(torch::nn::Module& root, const UnitPlan& plan, ShardedUnits& units, const FullyShardOptions& options);

}  // namespace tessera
