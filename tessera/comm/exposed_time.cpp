#include "tessera/comm/exposed_time.h"

#include <utility>

#include "tessera/comm/unmeasured.h"
#include "tessera/core/ambient.h"
#include "tessera/core/timed_event.h"

namespace tessera::comm {
namespace {

Ambient<const ExposedTime::Scope*> innermost;
Ambient<bool> unmeasured;

}  // namespace

struct ExposedTime::Events {
  explicit Events(at::Device device) : begin(device), end(device) {}
  TimedEvent begin, end;
};

ExposedTime::Scope::Scope(ExposedTime& total, at::Device device)
    : total_(total), on_host_(device.is_cpu() || device.is_meta()), outer_(*innermost), start_(std::chrono::steady_clock::now()) {
  ++total_.open_;
  if (!on_host_) *innermost = this;
}

ExposedTime::Scope::~Scope() {
  if (!on_host_) *innermost = outer_;
  if (--total_.open_ == 0 && on_host_) total_.on_host_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

Unmeasured::Unmeasured() : before_(std::exchange(*unmeasured, true)) {}
Unmeasured::~Unmeasured() { *unmeasured = before_; }
bool Unmeasured::now() { return *unmeasured; }

ExposedTime& ExposedTime::operator+=(const ExposedTime& other) {
  on_host_ += other.on_host_;
  waits_.insert(waits_.end(), other.waits_.begin(), other.waits_.end());
  return *this;
}

double ExposedTime::seconds() const {
  double seconds = on_host_;
  for (const auto& wait : waits_) {
    wait->end.synchronize();
    seconds += wait->end.seconds_since(wait->begin);
  }
  return seconds;
}

StreamWait::StreamWait(at::Device device) {
  if (*innermost == nullptr || *unmeasured || device.is_cpu() || device.is_meta()) return;
  events_ = std::make_shared<ExposedTime::Events>(device);
  events_->begin.record();
}

StreamWait::~StreamWait() {
  if (!events_) return;
  events_->end.record();
  const ExposedTime* last = nullptr;
  for (const ExposedTime::Scope* scope = *innermost; scope != nullptr; scope = scope->outer_) {
    if (&scope->total_ != last) scope->total_.waits_.push_back(events_);
    last = &scope->total_;
  }
}

}  // namespace tessera::comm
