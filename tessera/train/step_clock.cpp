#include "tessera/train/step_clock.h"

#include <utility>

#include "tessera/comm/waiting.h"
#include "tessera/core/timed_event.h"

namespace tessera {

struct StepClock::Events {
  explicit Events(at::Device device) : begin(device), end(device) {}
  TimedEvent begin, end;
  comm::ExposedTime waited;
};

StepClock::StepClock(at::Device device) : device_(device) {}

comm::ExposedTime::Scope StepClock::begin(std::chrono::steady_clock::time_point start) {
  start_ = start;
  waited_before_ = comm::waited_seconds();
  waited_ = {};
  if (!device_.is_cpu() && !device_.is_meta()) {
    events_ = std::make_shared<Events>(device_);
    events_->begin.record();
  }
  return {waited_, device_};
}

RankTimes StepClock::end() {
  if (events_) {
    events_->end.record();
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
  last_ = {.compute_s = events_->end.seconds_since(events_->begin) - waited, .wait_s = waited};
}

}  // namespace tessera
