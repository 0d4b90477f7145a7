#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

/// Adds `record DIR` to `inspect`: what the flight records of a run say, as a sentence and a table, or as JSON.
void add_inspect_record(CLI::App& inspect, int& exit_code);

}  // namespace tessera::cli
