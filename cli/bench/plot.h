#pragma once

#include <string>
#include <vector>

#include "cli/bench/rows.h"

namespace tessera::cli {

/// The rows as a picture (SVG): for each operation, time over bytes and bus bandwidth over bytes, both on logarithmic axes, a line per backend and algorithm
/// with its name in the legend, and each backend's best link as a dashed line. Empty rows give a picture that says so.
std::string plot(const std::vector<Row>& rows);

}  // namespace tessera::cli
