#pragma once

#include <c10/core/Device.h>

namespace tessera::sim {

/// From now on every tensor that is made without a device lies on the current simulated device of the thread that makes it, so that tests run there as they
/// are. A tensor that is asked for on the CPU by name, or in pinned memory, lies there. Ranks may read what was made for another's device, and at::equal
/// compares whatever lies where. For the whole process; libtorch has no such setting in C++.
void make_default_device();
bool has_default_device();

}  // namespace tessera::sim
