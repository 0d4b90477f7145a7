#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/memory/memory.h"

namespace tessera {

/// A storage that a tracker counts, and what is known of it. Names are known of what somebody described (MemoryTracker::describe), modules of what was
/// allocated inside a MemoryLabel; the rest is empty.
struct MemoryBlock {
  int64_t bytes = 0;
  MemoryCategory category = MemoryCategory::Other;
  std::string module{};                   ///< the label where it was allocated
  std::string name{};                     ///< such as "layers.0.attention.wq.weight"
  std::vector<int64_t> shape{};           ///< of the first tensor on it that was described
  std::optional<at::ScalarType> dtype{};  ///< the same; nothing: the shape is not known either
};

/// One allocation (or release) of a timeline, and what was alive after it.
struct MemoryEvent {
  int64_t index = 0;   ///< among all events since the timeline began
  double seconds = 0;  ///< since it began
  MemoryCategory category = MemoryCategory::Other;
  int64_t bytes = 0;         ///< below zero: given back
  int module = 0;            ///< position in MemoryHistory::modules
  MemoryByCategory after{};  ///< alive after it
};

/// Where a phase of the step begins.
struct MemoryMark {
  std::string name;
  int64_t index = 0;  ///< of the next event
  double seconds = 0;
};

/// Tracked bytes of one rank over a step.
struct MemoryUse {
  MemoryByCategory peak{};     ///< at the moment when most was alive
  MemoryByCategory current{};  ///< when the step is done
  MemoryByCategory host{};     ///< on the host beside the device (HostMemory), when most was alive there
};

/// What a tracker saw between start_timeline() and end_timeline(). A plain value.
struct MemoryHistory {
  MemoryByCategory before{};  ///< alive when it began
  std::vector<MemoryEvent> events{};
  std::vector<std::string> modules{""};
  std::vector<MemoryMark> marks{};
  double seconds = 0;                  ///< that it lasted
  int64_t num_events = 0;              ///< that there were
  int64_t events_per_point = 1;        ///< above 1, `events` holds of each so many the one after which most was alive: the peak is never left out
  std::vector<MemoryBlock> largest{};  ///< alive at the peak, the largest first
  MemoryByCategory host{};             ///< on the host beside the device, when most was alive there; events and peak are the device's

  /// The first event after which most was alive; null where there was none above `before`.
  const MemoryEvent* peak() const;
};

int64_t total_of(const MemoryByCategory& bytes);

/// Of each `n` events in a row the one after which most was alive, the first of equals.
std::vector<MemoryEvent> thin(const std::vector<MemoryEvent>& events, size_t n);

/// An allocation that a limit, or a device, refused.
struct MemoryRefusal {
  int64_t requested = 0;  ///< bytes
  int64_t limit = 0;      ///< of the tracker; 0: the device itself had no more
  MemoryCategory category = MemoryCategory::Other;
  std::string module{};                ///< the label at that moment
  std::string phase{};                 ///< the last mark
  MemoryByCategory in_use{};           ///< at that moment
  std::vector<MemoryBlock> largest{};  ///< alive at that moment, the largest first; empty where no details were kept
};

/// A table by category, one line each, with its total, and a column for each of `columns` under its title.
std::string category_table(const std::vector<std::pair<std::string, MemoryByCategory>>& columns);

/// A table of blocks, one line each: bytes, shape, dtype, category, module or name.
std::string block_table(const std::vector<MemoryBlock>& blocks);

/// "[512, 48] float" or "", as tables have it.
std::string shape_text(const MemoryBlock& block);

/// "layers.0.attention.wq.weight", or the module where it was allocated: "in layers.0.attention"; empty where neither is known.
std::string place_text(const MemoryBlock& block);

}  // namespace tessera
