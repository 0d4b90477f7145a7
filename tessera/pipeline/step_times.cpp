#include "tessera/pipeline/step_times.h"

#include <chrono>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/exposed_time.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"

// Events know how far they lie apart, and nothing of the host's clock. So when a step is over one more is recorded, which the host waits for: that moment is
// known by both, and all others lie before it.

namespace tessera::pipeline {
namespace {

c10::Event timed_event(at::Device device) { return {device.type(), c10::EventFlag::BACKEND_DEFAULT}; }

void mark(c10::Event& event, at::Device device) { event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device)); }

}  // namespace

double lap_clock() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct StepTimes::Events {
  explicit Events(at::Device device) : device(device), asked(timed_event(device)), start(timed_event(device)), end(timed_event(device)) {}
  at::Device device;
  c10::Event asked, start, end;
  comm::ExposedTime collectives;
};

LapTaker::LapTaker(StepTimes& times, const schedules::Action& action, at::Device device) : lap_(times.laps.emplace_back(Lap{.action = action})) {
  if (device.is_cpu() || device.is_meta()) {
    lap_.asked = lap_clock();
    return;
  }
  events_ = times.events.emplace_back(std::make_shared<StepTimes::Events>(device));
  mark(events_->asked, device);
}

void LapTaker::compute(const std::function<void()>& body) {
  if (events_) {
    mark(events_->start, events_->device);
    const comm::ExposedTime::Scope waits(events_->collectives, events_->device);
    body();
    mark(events_->end, events_->device);
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
  c10::Event now = timed_event(events.front()->device);
  mark(now, events.front()->device);
  now.synchronize();
  const double read = lap_clock();
  for (size_t i = 0; i < laps.size(); ++i) {
    const Events& of = *events[i];
    const auto time = [&](const c10::Event& event) { return read - 1e-3 * event.elapsedTime(now); };
    laps[i] = {.action = laps[i].action, .asked = time(of.asked), .start = time(of.start), .end = time(of.end), .collectives = of.collectives.seconds()};
  }
  events.clear();
}

}  // namespace tessera::pipeline
