#include "tessera/train/step_clock.h"

#include <utility>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/waiting.h"

namespace tessera {

struct StepClock::Events {
  explicit Events(at::Device device) : begin(device.type(), c10::EventFlag::BACKEND_DEFAULT), end(device.type(), c10::EventFlag::BACKEND_DEFAULT) {}
  c10::Event begin, end;
  comm::ExposedTime waited;
};

StepClock::StepClock(at::Device device) : device_(device) {}

comm::ExposedTime::Scope StepClock::begin(std::chrono::steady_clock::time_point start) {
  start_ = start;
  waited_before_ = comm::waited_seconds();
  waited_ = {};
  if (!device_.is_cpu() && !device_.is_meta()) {
    events_ = std::make_shared<Events>(device_);
    events_->begin.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  return {waited_, device_};
}

RankTimes StepClock::end() {
  if (events_) {
    events_->end.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    events_->waited = std::exchange(waited_, {});  // what follows is the report
    return last_;
  }
  const double waited = comm::waited_seconds() - waited_before_;
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
  return {.compute_s = passed.count() - waited, .wait_s = waited};
}

void StepClock::has_read() {
  if (!events_) return;
  const double waited = events_->waited.seconds();
  last_ = {.compute_s = 1e-3 * events_->begin.elapsedTime(events_->end) - waited, .wait_s = waited};
}

}  // namespace tessera
