#pragma once

namespace tessera::sim {

/// Makes "auto" hand collectives on the simulated devices to an engine that treats streams as NCCL does: a call is work of the group's own stream, behind what
/// the caller's stream was asked for, and its wait() makes the caller's current stream wait. The bytes go through shared memory.
void register_engine();

}  // namespace tessera::sim
