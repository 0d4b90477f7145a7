#pragma once

#include "cli/command_line.h"

namespace tessera::cli {

/// Adds `record DIR` to `inspect`: what the flight records of a run say, as a sentence and a table, or as JSON.
void add_inspect_record(Command inspect, int& exit_code);

}  // namespace tessera::cli
