#include "tests/support/sim_device/device.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tessera/memory/ledger.h"
#include "tests/support/sim_device/graph.h"
#include "tests/support/sim_device/memory.h"
#include "tests/support/sim_device/operators.h"

namespace tessera::sim {

namespace {

int devices = 0;
thread_local int device_now = 0;
thread_local std::array<int64_t, kMaxDevices> current_ids{};
constexpr int64_t kFirstNew = 1000;
std::atomic<int64_t> next_in_pool{0}, next_new{kFirstNew};

c10::Device at_index(int index) { return {sim_type(), static_cast<c10::DeviceIndex>(index)}; }
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }

struct Event {
  Clock clock;
  bool captured = false;
  bool asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return sim_type(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = at_index(device_now);
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return at_index(device_now); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == sim_type() && device.index() < devices, "simulated device: there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, at_index(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, at_index(index_of(device)), 1 + next_in_pool++ % 32);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::UNSAFE, at_index(index_of(device)), next_new++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current_ids[static_cast<size_t>(stream.device_index())], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {.clock = HappensBefore::get().record(stream_number(stream)), .captured = Capture::of(stream.device_index()) != nullptr};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const Event& of = *static_cast<Event*>(event);
    TORCH_CHECK(of.captured == (Capture::of(stream.device_index()) != nullptr), "simulated device: a wait across the edge of a capture");
    HappensBefore::get().block(stream_number(stream), of.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // Work is done when it is asked for. Who asks for the first time is told that it goes on, unless the host knows better, so that whatever is asked about is
  // seen both ways; who asks again knows from then on that it has ended. (libtorch asks before it tells a time between events, and throws where one goes on.)
  bool queryEvent(void* event) const override {
    if (!event || HappensBefore::get().is_known_to_host(outside(event))) return true;
    if (!std::exchange(static_cast<Event*>(event)->asked, true)) return false;
    learn(outside(event), "query");
    return true;
  }
  void synchronizeEvent(void* event) const override { learn(outside(event), "synchronize"); }
  bool queryStream(const c10::Stream& stream) const override {
    learn(HappensBefore::get().record(stream_number(stream)), "query");
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { learn(HappensBefore::get().record(stream_number(stream)), "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait_for_device(device, "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override { record_stream(pointer.get(), stream_number(stream)); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override { return 1e3 * (outside(end).seconds() - outside(begin).seconds()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }

 private:
  static const Clock& outside(void* event) {
    const Event& of = *static_cast<Event*>(event);
    TORCH_CHECK(!of.captured, "simulated device: an event that was recorded in a capture knows nothing of it");
    return of.clock;
  }
  static void learn(const Clock& clock, const char* how) {
    Capture::refuse(device_now, how);
    const HappensBefore::SyncReason reason(how);
    HappensBefore::get().host_waits(clock);
    after_host_sync();
  }
};

const at::Generator& default_generator(int index) {
  static auto* const all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int device = 0; device < kMaxDevices; ++device) generators->push_back(at::make_generator<Generator>(device, at::detail::getDefaultCPUGenerator()));
    return generators;
  }();
  return (*all)[static_cast<size_t>(index < 0 ? device_now : index)];
}

/// What libtorch asks of the library that has an accelerator; no devices until install(), and under the other keys none ever.
template <class Interface, Wanted Keys>
struct AcceleratorHooks : Interface {
  static int count() { return (wanted() == Wanted::Private) == (Keys == Wanted::Private) ? devices : 0; }
  void init() const override {}
  bool isBuilt() const override { return count() > 0; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return count() > 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return static_cast<c10::DeviceIndex>(std::exchange(device_now, device)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_device(data), "simulated device: no address of a device");
    return at_index(device_of(data));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? device_now : index, at::detail::createCPUGenerator());
  }
};

/// Registered in every process that has the simulation linked.
struct CudaHooks final : AcceleratorHooks<at::CUDAHooksInterface, Wanted::Cuda> {
  explicit CudaHooks(at::CUDAHooksArgs = {}) {}
  bool hasCUDA() const override { return count() > 0; }
  bool hasCUDART() const override { return count() > 0; }
  int getNumGPUs() const override { return count(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
};

struct PrivateHooks final : AcceleratorHooks<at::PrivateUse1HooksInterface, Wanted::Private> {};

}  // namespace

Wanted wanted() {
  static const Wanted one = [] {
    const char* const device = std::getenv("TESSERA_TEST_DEVICE");
    const std::string_view name = device ? device : "";
    return name == "sim" || name == "sim_kernels" ? Wanted::Cuda : name == "sim_private" ? Wanted::Private : Wanted::Nothing;
  }();
  return one;
}

c10::DeviceType sim_type() { return wanted() == Wanted::Private ? c10::kPrivateUse1 : c10::kCUDA; }
c10::DispatchKey sim_key() { return wanted() == Wanted::Private ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CUDA; }
c10::DispatchKey sim_autograd_key() { return wanted() == Wanted::Private ? c10::DispatchKey::AutogradPrivateUse1 : c10::DispatchKey::AutogradCUDA; }

Generator::Generator(int device, at::Generator inner) : c10::GeneratorImpl(at_index(device), c10::DispatchKeySet(sim_key())), inner(std::move(inner)) {}

void wait_for_device(int device, const char* why) {
  Capture::refuse(device, why);
  const HappensBefore::SyncReason reason(why);
  HappensBefore::get().host_waits_device(device);
  after_host_sync();
}

void reuse_streams() { next_new = kFirstNew; }

c10::Stream current_stream(int device) { return c10::Stream(c10::Stream::UNSAFE, at_index(device), current_ids[static_cast<size_t>(device)]); }
int stream_number(const c10::Stream& stream) { return HappensBefore::get().stream(stream.device_index(), stream.id()); }
int device_count() { return devices; }

void install(int count) {
  static const bool once = [&] {
    TORCH_CHECK(count > 0 && count <= kMaxDevices, "simulated device: 1 to ", kMaxDevices, " devices");
    devices = count;
    if (wanted() == Wanted::Private) {
      c10::register_privateuse1_backend("sim");
      at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
    }
    c10::SetAllocator(sim_type(), device_allocator(), 255);
    c10::impl::DeviceGuardImplRegistrar(sim_type(), new Guard);
    register_operators();
    register_graphs();
    tessera::detail::register_device_tracking(
        sim_type(), [] {}, [](at::Device device, int64_t bytes) { limit_reserved(device.index(), bytes); });  // take() counts always
    install_fault_handler();
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace tessera::sim

namespace at {
using TesseraSimHooks = tessera::sim::CudaHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", TesseraSimHooks)
}  // namespace at
