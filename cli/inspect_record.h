#pragma once

#include <functional>

#include "cli/command_line.h"

namespace tessera::cli {

/// Adds `record DIR` to `inspect`: what the flight records of a run say, as a sentence and a table, or as JSON. `check` is asked first.
void add_inspect_record(Command inspect, int& exit_code, const std::function<void()>& check);

}  // namespace tessera::cli
