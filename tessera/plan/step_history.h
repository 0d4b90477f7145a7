#pragma once

#include <optional>

#include "tessera/core/events.h"
#include "tessera/memory/history.h"

namespace tessera::plan {

/// What is alive over a step, from its events as they pass: a curve to draw. It keeps some thousand points at most, whatever the step's length: when there are
/// more, of each two in a row the one after which most was alive stays, so that the peak is never left out. Marks are the actions of the schedule.
class StepHistory {
 public:
  explicit StepHistory(const MemoryByCategory& before) { history_.before = before; }

  /// `alive` after the event. `seconds`: when, by a clock; without one an operator counts as one.
  void read(const Event& event, const MemoryByCategory& alive, const std::optional<double>& seconds);
  MemoryHistory take() &&;

 private:
  MemoryHistory history_;
  int64_t seen_ = 0;     ///< of the point that comes next
  MemoryEvent highest_;  ///< of those
};

}  // namespace tessera::plan
