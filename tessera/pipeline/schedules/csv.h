#pragma once

#include <string>
#include <string_view>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {

/// PyTorch's text of a schedule (torch.distributed.pipelining): a row per rank, an action per cell, in order. Holds messages and sharding where the schedule
/// does.
std::string to_csv(const Schedule& schedule);

/// Reads it, and proves it (check.h): a schedule of one's own, or one that PyTorch wrote. Empty cells, which show where a rank idles, are left out; which rank
/// holds which stage, and how many micro-batches there are, is what the actions say. Throws ConfigError with `name`, row and column (both from 1) where a cell
/// is no action, is done twice or on a second rank, or is part of a deadlock, whose actions it prints; with the action where one is missing.
Schedule read_csv(std::string_view text, const std::string& name);

/// The same of a file.
Schedule read_csv_file(const std::string& path);

}  // namespace tessera::schedules
