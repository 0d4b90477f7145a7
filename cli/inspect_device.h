#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

/// Adds `device` to `inspect`: the devices that this process sees, and what this build has for them, as a table or as JSON.
void add_inspect_device(CLI::App& inspect, int& exit_code);

}  // namespace tessera::cli
