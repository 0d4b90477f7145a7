#pragma once

#include "cli/command_line.h"

namespace tessera::cli {

/// Adds `device` to `inspect`: the devices that this process sees, and what this build has for them, as a table or as JSON.
void add_inspect_device(Command inspect, int& exit_code);

}  // namespace tessera::cli
