#pragma once

#include <algorithm>
#include <string>

#include "tessera/pipeline/schedules/registry.h"

namespace tessera::testing_support {

/// Which p, m and v a schedule takes, said a second time.
inline bool takes(const std::string& name, int ranks, int micro_batches, int chunks) {
  if (name == "naive" || name == "breadth_first") return true;
  if (name == "interleaved") return micro_batches % std::max(1, micro_batches / ranks) == 0;
  if (name == "zb_v" || name == "v_half" || name == "v_min") return chunks == 2;
  if (name == "dualpipev") return chunks == 2 && micro_batches >= 2 * ranks;
  return chunks == 1;
}

/// The request of a schedule, with what some demand besides.
inline schedules::Request request_of(const std::string& name, int ranks, int micro_batches, int chunks = 0) {
  return {.name = name, .ranks = ranks, .micro_batches = micro_batches, .chunks = chunks, .costs = {}, .memory_limit = name == "zb_auto" ? 3 : 0};
}

/// Calls `look(schedule, p, m, v)` for every known schedule, p in 1..8, m in 1..16 and v in 1..4 of its domain.
void for_each_schedule(auto&& look) {
  for (const auto& name : schedules::schedule_names()) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (int chunks = 1; chunks <= 4; ++chunks) {
          if (takes(name, ranks, micro_batches, chunks))
            look(schedules::make_schedule(request_of(name, ranks, micro_batches, chunks)), ranks, micro_batches, chunks);
        }
      }
    }
  }
}

}  // namespace tessera::testing_support
