#pragma once

#include <functional>
#include <string>

#include <c10/core/Device.h>

#include "cli/bench/sampling.h"
#include "tessera/comm/group.h"

namespace tessera::bench {

/// The host waits until the device has done what it was asked for; nothing on the CPU, which has by then.
void wait_for(at::Device device);

/// Times `call` on all ranks of the group, as sampling.h says. Collective: every rank's `call` must run the same collectives. Throws InternalError for
/// a group of one.
Timing measure(const comm::Group& group, const std::function<void()>& call, const Limits& limits);

/// The best bandwidth between two ranks, in bytes per second and direction: messages of 256 KiB to 16 MiB, from rank 0 to rank 1 alone and from each
/// rank to the next at once; the best of all. Collective. What a collective's bus bandwidth is held against.
double measure_link(const comm::Group& group, const Limits& limits, at::Device device = at::kCPU);

/// Of an engine such as "shm+nccl" the part that takes tensors on `device`: that of the host stands first.
std::string part_for(const std::string& engine, at::Device device);
/// Of a group's engine: what "auto" took.
std::string engine_for(const comm::Group& group, at::Device device);

}  // namespace tessera::bench
