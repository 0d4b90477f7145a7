#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

/// Tests make their tensors without naming a device: so they run on the CPU and, as they are, on the simulated accelerator (tests/support/sim_device).
namespace tessera::testing_support {

/// Where they lie: on the CPU, also in a build with CUDA, or on this thread's simulated device.
inline at::Device test_device() { return at::empty({0}).device(); }

/// Whether that is a GPU (TESSERA_TEST_DEVICE=cuda), whose kernels assert what the host refuses elsewhere, since it would have to wait to see it. A failed
/// assertion ends the device's work in the process, so there is nothing to test.
inline bool asserts_on_device() {
  const char* const device = std::getenv("TESSERA_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

/// What a test expects of a call that a kernel refuses: the sentence of the CPU, or, where CUDA's kernels run on the host (TESSERA_TEST_DEVICE=sim_kernels),
/// their assertion.
inline std::string of_kernel(const std::string& sentence) {
  const char* const device = std::getenv("TESSERA_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "sim_kernels" ? "device-side assert triggered" : sentence;
}

/// fp32 numbers that fill(memory, elements) writes, on test_device().
inline at::Tensor floats_by(at::IntArrayRef sizes, const std::function<void(float*, int64_t)>& fill) {
  const at::Tensor host = at::empty(sizes, at::TensorOptions(at::kCPU).dtype(at::kFloat));
  fill(host.data_ptr<float>(), host.numel());
  return host.to(test_device());
}

}  // namespace tessera::testing_support
