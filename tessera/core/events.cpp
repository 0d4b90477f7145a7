#include "tessera/core/events.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "tessera/core/ambient.h"

namespace tessera {
namespace {

const Ambient<EventStream*> listening;
const Ambient<bool> beside_passes;

/// What happened to a storage.
struct Touched {
  int64_t written = -1;
  std::vector<int64_t> read_since;
};

}  // namespace

BesidePasses::BesidePasses() : before_(std::exchange(*beside_passes, true)) {}
BesidePasses::~BesidePasses() { *beside_passes = before_; }
bool BesidePasses::now() { return *beside_passes; }

std::vector<std::vector<int64_t>> dependencies(const Events& events) {
  std::vector<std::vector<int64_t>> after(events.size());
  std::unordered_map<int64_t, Touched> storages;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    std::vector<int64_t>& mine = after[i];
    for (const int64_t storage : events[i].reads) {
      Touched& touched = storages[storage];
      if (touched.written >= 0) mine.push_back(touched.written);
      touched.read_since.push_back(number);
    }
    for (const int64_t storage : events[i].writes) {
      Touched& touched = storages[storage];
      if (touched.written >= 0) mine.push_back(touched.written);
      mine.insert(mine.end(), touched.read_since.begin(), touched.read_since.end());
      touched = {.written = number, .read_since = {}};
    }
    std::ranges::sort(mine);
    const auto repeated = std::ranges::unique(mine);
    mine.erase(repeated.begin(), repeated.end());
    if (!mine.empty() && mine.back() == number) mine.pop_back();  // what it reads and writes
  }
  return after;
}

void EventStream::add(Event event) {
  const std::lock_guard lock(mutex_);
  ++count_;
  if (const auto* ran = std::get_if<OperatorEvent>(&event.what)) flops_ += ran->flops;
  events_.push_back(std::move(event));
}

int64_t EventStream::number_in_flight() {
  const std::lock_guard lock(mutex_);
  return --in_flight_;
}

Events EventStream::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

double EventStream::flops() const {
  const std::lock_guard lock(mutex_);
  return flops_;
}

int64_t EventStream::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

EventStream* EventStream::current() { return *listening; }

ListenToEvents::ListenToEvents(EventStream& stream) : before_(std::exchange(*listening, &stream)) {}
ListenToEvents::~ListenToEvents() { *listening = before_; }

}  // namespace tessera
