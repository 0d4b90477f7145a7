#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace tessera {

/// A moment of what an accelerator was asked to do: events there know how far they lie apart, and nothing of the host's clock.
class TimedEvent {
 public:
  explicit TimedEvent(at::Device device);

  /// Behind what the device's current stream was asked for until now.
  void record();
  /// The host waits until it has happened.
  void synchronize() const { event_.synchronize(); }
  /// Both have happened.
  double seconds_since(const TimedEvent& earlier) const;
  at::Device device() const { return device_; }

 private:
  at::Device device_;
  c10::Event event_;
};

}  // namespace tessera
