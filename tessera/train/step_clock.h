#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/exposed_time.h"
#include "tessera/train/stragglers.h"

namespace tessera {

/// Where a rank's time goes in its steps. On the CPU the host's clock says; on a device, which the host does not wait for, events at a step's ends and around
/// its waits. Their times are known once the host has read what the step yields, when it has long told the others of its own: so what it tells is the step
/// before, and of the first one nothing.
class StepClock {
 public:
  explicit StepClock(at::Device device);

  /// A step begins; `start` for the host, loading included. What it waits for counts while the scope lives.
  [[nodiscard]] comm::ExposedTime::Scope begin(std::chrono::steady_clock::time_point start);
  /// It has asked for all it does. What to tell of it; the rank is left out.
  RankTimes end();
  /// The host has read what it computed.
  void has_read();

 private:
  struct Events;
  at::Device device_;
  std::chrono::steady_clock::time_point start_{};
  double waited_before_ = 0;
  comm::ExposedTime waited_;        ///< on a device
  std::shared_ptr<Events> events_;  ///< of the step under way; null on the CPU
  RankTimes last_;
};

}  // namespace tessera
