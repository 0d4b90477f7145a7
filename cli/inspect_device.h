#pragma once

#include <functional>

#include "cli/command_line.h"

namespace tessera::cli {

/// Adds `device` to `inspect`: the devices that this process sees, and what this build has for them, as a table or as JSON. `check` is asked first.
void add_inspect_device(Command inspect, int& exit_code, const std::function<void()>& check);

}  // namespace tessera::cli
