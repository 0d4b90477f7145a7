#include "tests/support/sim_device/happens_before.h"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::sim {

namespace {
thread_local const char* sync_reason = "synchronize";
thread_local double takes = 1e-6;
}  // namespace

void Clock::raise(size_t stream, uint64_t to) {
  if (stream >= at_.size()) at_.resize(stream + 1, 0);
  at_[stream] = std::max(at_[stream], to);
}

bool Clock::knows(const Clock& other) const {
  for (size_t stream = 0; stream < other.at_.size(); ++stream) {
    if (other.at_[stream] > (*this)[stream]) return false;
  }
  return true;
}

void Clock::join(const Clock& other) {
  join_order(other);
  seconds_ = std::max(seconds_, other.seconds_);
}

void Clock::join_order(const Clock& other) {
  if (at_.size() < other.at_.size()) at_.resize(other.at_.size(), 0);
  for (size_t stream = 0; stream < other.at_.size(); ++stream) at_[stream] = std::max(at_[stream], other.at_[stream]);
}

Takes::Takes(double seconds) : before_(std::exchange(takes, seconds)) {}
Takes::~Takes() { takes = before_; }

HappensBefore& HappensBefore::get() {
  static auto* const one = new HappensBefore;
  return *one;
}

int HappensBefore::stream(int device, int64_t id) {
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = numbers_.emplace(std::pair(device, id), static_cast<int>(streams_.size()));
  if (is_new) streams_.push_back({.device = device, .id = id});
  return found->second;
}

std::string HappensBefore::name(int stream) {
  const std::lock_guard lock(mutex_);
  const auto& s = streams_[static_cast<size_t>(stream)];
  return "stream " + std::to_string(s.id) + " of device " + std::to_string(s.device);
}

uint64_t HappensBefore::launch(int stream) {
  const std::lock_guard lock(mutex_);
  const auto s = static_cast<size_t>(stream);
  auto& clock = streams_[s].clock;
  if (std::exchange(streams_[s].host_waits, host_waits_) != host_waits_) clock.join_order(host_);
  clock.raise(s, clock[s] + 1);
  clock.take(takes);
  return clock[s];
}

bool HappensBefore::is_ordered(const Access& before, int stream) const {
  const auto s = static_cast<size_t>(before.stream);
  return before.stream == stream || before.sequence <= streams_[static_cast<size_t>(stream)].clock[s] || before.sequence <= host_[s];
}

void HappensBefore::access(History& history, const Access& now, const char* memory) {
  const std::lock_guard lock(mutex_);
  for (const auto& before : history.accesses) {
    if (before.end <= now.begin || now.end <= before.begin || (!before.writes && !now.writes) || is_ordered(before, now.stream)) continue;
    reports_.push_back({.kind = Report::Kind::Race,
                        .text = std::string("race on ") + memory + ": " + now.by + (now.writes ? " writes " : " reads ") +
                                std::to_string(std::min(before.end, now.end) - std::max(before.begin, now.begin)) + " bytes on " + name(now.stream) +
                                ", and nothing orders it after " + before.by + ", which" + (before.writes ? " writes" : " reads") + " them on " +
                                name(before.stream),
                        .first = before.by,
                        .second = now.by});
  }
  // An access that the new one covers and follows, and that conflicts with nothing with which the new one does not, is spoken for by the new one.
  std::erase_if(history.accesses, [&](const Access& before) {
    return now.begin <= before.begin && before.end <= now.end && (now.writes || (!before.writes && before.stream == now.stream)) &&
           is_ordered(before, now.stream);
  });
  history.accesses.push_back(now);
}

void HappensBefore::allocated(History& history, uintptr_t begin, uintptr_t end, int stream, const char* by) {
  const std::lock_guard lock(mutex_);
  auto& own = streams_[static_cast<size_t>(stream)];
  for (const auto& use : std::exchange(own.left_in_use, {})) {
    if (is_ordered(use, stream)) continue;
    reports_.push_back({.kind = Report::Kind::FreedInUse,
                        .text = "memory that was allocated on " + name(stream) + " was freed while " + use.by + " used " + std::to_string(use.end - use.begin) +
                                " bytes of it on " + name(use.stream) + ", and may be given out again (here by " + by +
                                "): record_stream, or wait before the release",
                        .first = use.by,
                        .second = by});
  }
  history.accesses = {{.begin = begin, .end = end, .stream = stream, .sequence = own.clock[static_cast<size_t>(stream)], .writes = true, .by = "allocation"}};
}

void HappensBefore::freed(History& history, int stream, const std::vector<int>& recorded) {
  const std::lock_guard lock(mutex_);
  for (const auto& access : std::exchange(history.accesses, {})) {
    if (is_ordered(access, stream) || std::find(recorded.begin(), recorded.end(), access.stream) != recorded.end()) continue;
    streams_[static_cast<size_t>(stream)].left_in_use.push_back(access);
  }
}

Clock HappensBefore::record(int stream) {
  const std::lock_guard lock(mutex_);
  return streams_[static_cast<size_t>(stream)].clock;
}

void HappensBefore::block(int stream, const Clock& event) {
  const std::lock_guard lock(mutex_);
  streams_[static_cast<size_t>(stream)].clock.join(event);
}

void HappensBefore::host_waits(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  if (host_.knows(clock)) return;
  ++host_syncs_[sync_reason];
  ++host_waits_;
  host_.join(clock);
}

void HappensBefore::host_waits_device(int device) {
  const std::lock_guard lock(mutex_);
  ++host_syncs_[sync_reason];
  ++host_waits_;
  for (const auto& stream : streams_) {
    if (stream.device == device) host_.join(stream.clock);
  }
}

void HappensBefore::host_waits_everything() {
  const std::lock_guard lock(mutex_);
  ++host_waits_;
  for (auto& stream : streams_) {
    host_.join(stream.clock);
    stream.left_in_use.clear();
  }
}

bool HappensBefore::is_known_to_host(const Access& access) {
  const std::lock_guard lock(mutex_);
  return access.sequence <= host_[static_cast<size_t>(access.stream)];
}

bool HappensBefore::is_known_to_host(const Clock& event) {
  const std::lock_guard lock(mutex_);
  return host_.knows(event);
}

const Access* HappensBefore::pending(const History& history) {
  const std::lock_guard lock(mutex_);
  const Access* which = nullptr;
  for (const auto& access : history.accesses) {
    if (!is_known_to_host(access) && (!which || (access.writes && !which->writes))) which = &access;
  }
  return which;
}

void HappensBefore::report(Report report) {
  const std::lock_guard lock(mutex_);
  reports_.push_back(std::move(report));
}

std::vector<Report> HappensBefore::take_reports() {
  const std::lock_guard lock(mutex_);
  return std::exchange(reports_, {});
}

std::map<std::string, int64_t> HappensBefore::take_host_syncs() {
  const std::lock_guard lock(mutex_);
  return std::exchange(host_syncs_, {});
}

HappensBefore::SyncReason::SyncReason(const char* reason) : before_(std::exchange(sync_reason, reason)) {}
HappensBefore::SyncReason::~SyncReason() { sync_reason = before_; }

const char* intern(const std::string& text) {
  static auto* const texts = new std::set<std::string>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

}  // namespace tessera::sim
