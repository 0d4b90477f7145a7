#include "tessera/pipeline/step_times.h"

#include <chrono>

#include "tessera/comm/exposed_time.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"
#include "tessera/core/timed_event.h"

// Events know how far they lie apart, and nothing of the host's clock. So when a step is over one more is recorded, which the host waits for: that moment is
// known by both, and all others lie before it.

namespace tessera::pipeline {

double lap_clock() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct StepTimes::Events {
  explicit Events(at::Device device) : asked(device), start(device), end(device) {}
  TimedEvent asked, start, end;
  comm::ExposedTime collectives;
};

LapTaker::LapTaker(StepTimes& times, const schedules::Action& action, at::Device device) : lap_(times.laps.emplace_back(Lap{.action = action})) {
  if (device.is_cpu() || device.is_meta()) {
    lap_.asked = lap_clock();
    return;
  }
  events_ = times.events.emplace_back(std::make_shared<StepTimes::Events>(device));
  events_->asked.record();
}

void LapTaker::compute(const std::function<void()>& body) {
  if (events_) {
    events_->start.record();
    const comm::ExposedTime::Scope waits(events_->collectives, events_->start.device());
    body();
    events_->end.record();
    return;
  }
  const double waited = comm::waited_seconds();
  lap_.start = lap_clock();
  body();
  lap_.end = lap_clock();
  lap_.collectives = comm::waited_seconds() - waited;
}

void StepTimes::read() {
  if (events.empty()) return;
  invariant(events.size() == laps.size(), laps.size(), " laps have ", events.size(), " events");
  TimedEvent now(events.front()->asked.device());
  now.record();
  now.synchronize();
  const double read = lap_clock();
  for (size_t i = 0; i < laps.size(); ++i) {
    const Events& of = *events[i];
    const auto time = [&](const TimedEvent& event) { return read - now.seconds_since(event); };
    laps[i] = {.action = laps[i].action, .asked = time(of.asked), .start = time(of.start), .end = time(of.end), .collectives = of.collectives.seconds()};
  }
  events.clear();
}

}  // namespace tessera::pipeline
