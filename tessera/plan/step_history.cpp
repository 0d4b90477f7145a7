#include "tessera/plan/step_history.h"

#include <utility>
#include <variant>

namespace tessera::plan {
namespace {

constexpr size_t kMostPoints = 2048;

}  // namespace

void StepHistory::read(const Event& event, const MemoryByCategory& alive, const std::optional<double>& seconds) {
  if (seconds) history_.seconds = *seconds;
  if (!seconds && std::holds_alternative<OperatorEvent>(event.what)) history_.seconds += 1;
  if (const auto* action = std::get_if<ActionEvent>(&event.what); action != nullptr && action->begins) {
    history_.marks.push_back({.name = action->action, .index = history_.num_events, .seconds = history_.seconds});
  }
  const auto* change = std::get_if<MemoryChange>(&event.what);
  if (change == nullptr || change->on_host) return;
  MemoryEvent point{.index = history_.num_events++, .seconds = history_.seconds, .category = change->category, .bytes = change->bytes, .after = alive};
  if (seen_ == 0 || total_of(point.after) > total_of(highest_.after)) highest_ = point;
  if (++seen_ < history_.events_per_point) return;
  history_.events.push_back(highest_);
  seen_ = 0;
  if (history_.events.size() < kMostPoints) return;
  history_.events = thin(history_.events, 2);
  history_.events_per_point *= 2;
}

MemoryHistory StepHistory::take() && {
  if (seen_ > 0) history_.events.push_back(highest_);
  return std::move(history_);
}

}  // namespace tessera::plan
