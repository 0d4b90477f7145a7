#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

// A device that a machine without any can have: what is registered with libtorch for one (guard, hooks, allocators, generators), under CUDA's keys, so that
// is_cuda() and every branch on kCUDA run in a build of the CPU. With TESSERA_TEST_DEVICE=sim_private it stands under the keys that libtorch has for
// accelerators that it does not know (PrivateUse1), where whatever asks for CUDA by name finds none. Never linked with a torch that has CUDA.

namespace tessera::sim {

/// What TESSERA_TEST_DEVICE asks for.
enum class Wanted : uint8_t { Nothing, Cuda, Private };
Wanted wanted();

c10::DeviceType sim_type();
c10::DispatchKey sim_key();
c10::DispatchKey sim_autograd_key();

/// Registers the devices in this process, once and for good, before anything of libtorch's has run: there are none without. At most kMaxDevices; libtorch makes
/// a thread for each at the first backward.
void install(int devices);
int device_count();  ///< 0: not installed

/// The host waits for all that the device was asked for; counts as a synchronisation by `why`.
void wait_for_device(int device, const char* why);

/// New streams are those of before again, so that clocks do not grow from test to test: for a moment when the host knows all work to be done.
void reuse_streams();

c10::Stream current_stream(int device);
/// In HappensBefore.
int stream_number(const c10::Stream& stream);

/// A CPU generator that says it is the device's.
struct Generator final : c10::GeneratorImpl {
  Generator(int device, at::Generator inner);
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new Generator(device().index(), inner.clone()); }

  at::Generator inner;
};

}  // namespace tessera::sim
