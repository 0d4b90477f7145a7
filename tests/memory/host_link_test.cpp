// Copies between a device and the host: their order on a device whose streams only take down what they are asked for, and nothing of it on the CPU.

#include "tessera/memory/host_link.h"

#include <gmock/gmock.h>

#include "tessera/memory/memory.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

/// What the streams of the device that is none were asked for, "stream: work". Stream 0 is the one that computes.
std::vector<std::string> asked;
c10::StreamId current_stream = 0, last_stream = 0;
bool finished = false;

/// Its events are numbered by the moment at which they were recorded.
class TakesDown final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream(device, ++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(next.device(), std::exchange(current_stream, next.id())); }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    asked.push_back(std::to_string(on.id()) + ": record");
    *event = reinterpret_cast<void*>(asked.size());
  }
  void block(void* event, const c10::Stream& on) const override { asked.push_back(std::to_string(on.id()) + ": wait for " + name(event)); }
  void synchronizeEvent(void* event) const override { asked.push_back("host: wait for " + name(event)); }
  bool queryEvent(void*) const override { return finished; }

 private:
  static c10::Stream stream(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  static std::string name(void* event) { return std::to_string(reinterpret_cast<size_t>(event)); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, TakesDown)

TEST(HostLink, CopiesFollowWhatWasAskedForAndOthersFollowThem) {
  const HostLink link(c10::Device(c10::kPrivateUse1, 0));
  const auto on_current = [](const std::string& work) { asked.push_back(std::to_string(current_stream) + ": " + work); };
  CopyStream::Point in, out;
  on_current("compute");
  {
    const CopyStream::Scope copying(link.in);
    on_current("copy in");
    in = link.in.point();
  }
  on_current("compute");
  in.hold_device();
  {
    const CopyStream::Scope copying(link.out);
    on_current("copy out");
    out = link.out.point();
  }
  EXPECT_FALSE(out.done());
  finished = true;
  EXPECT_TRUE(out.done());
  out.wait();
  EXPECT_THAT(asked, ElementsAre("0: compute", "0: record", "1: wait for 2", "1: copy in", "1: record",  //
                                 "0: compute", "0: wait for 5",                                          //
                                 "0: record", "2: wait for 8", "2: copy out", "2: record", "host: wait for 11"));
}

TEST(HostLink, IsNothingOnTheCpuAndOnMeta) {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const HostLink link(device);
    const at::Tensor slices = link.empty(16, at::kFloat), none = link.empty(0, at::kFloat);
    EXPECT_EQ(slices.device(), device);
    EXPECT_EQ(none.numel(), 0);
    EXPECT_EQ(tracker.current(), 0);
    EXPECT_EQ(tracker.host_by_category()[static_cast<size_t>(MemoryCategory::Other)], 64);
    const CopyStream::Scope copying(link.in);
    const CopyStream::Point point = link.in.point();
    EXPECT_TRUE(point.done());
    point.hold_device();
    point.wait();
  }
}

}  // namespace
}  // namespace tessera
