#pragma once

#include <atomic>

/// Where a suite runs on the simulated accelerator, a test may want the CPU's results beside.
namespace tessera::testing_support {

/// While alive, what the process makes without naming a device lies on the CPU after all.
class OnTheCpu {
 public:
  OnTheCpu() { now_ = true; }
  ~OnTheCpu() { now_ = false; }
  OnTheCpu(const OnTheCpu&) = delete;
  OnTheCpu& operator=(const OnTheCpu&) = delete;
  static bool now() { return now_; }

 private:
  static inline std::atomic<bool> now_{false};
};

}  // namespace tessera::testing_support
