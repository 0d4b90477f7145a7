#pragma once

#include <c10/core/Device.h>

/// A default device for test binaries, which name none: libtorch has no such setting in C++.
namespace tessera::testing_support {

/// From now on every tensor that is made without a device lies on the current device of that type of the thread that makes it, so that tests run there as they
/// are; what a generator of the CPU draws is drawn there, and copied. A tensor that is asked for on the CPU by name, or in pinned memory, lies there. at::equal
/// compares whatever lies where. For the whole process.
/// `inside`: whether the thread is within an operator of the device that makes tensors of the host; null: none does.
void make_default_device(c10::DeviceType type, bool (*inside)() = nullptr);
bool has_default_device();

}  // namespace tessera::testing_support
