#pragma once

#include <functional>

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

/// Tests make their tensors without naming a device: so they run on the CPU and, as they are, on the simulated accelerator (tests/support/sim_device).
namespace tessera::testing_support {

/// Where they lie: on the CPU, or on the current device of this thread.
inline at::Device test_device() {
  const auto accelerator = at::getAccelerator();
  return accelerator ? c10::impl::VirtualGuardImpl(*accelerator).getDevice() : at::Device(at::kCPU);
}

/// fp32 numbers that fill(memory, elements) writes, on test_device().
inline at::Tensor floats_by(at::IntArrayRef sizes, const std::function<void(float*, int64_t)>& fill) {
  const at::Tensor host = at::empty(sizes, at::TensorOptions(at::kCPU).dtype(at::kFloat));
  fill(host.data_ptr<float>(), host.numel());
  return host.to(test_device());
}

}  // namespace tessera::testing_support
