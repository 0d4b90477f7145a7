#pragma once

#include <memory>
#include <optional>
#include <string>

#include <spdlog/spdlog.h>

namespace tessera {

/// A logger to standard error, so that standard output stays the command's own. Lines read "12:31:07 I [rank 3] text"; without a rank there is no prefix.
/// Loggers are values of whoever makes them (ranks may be threads of one process); only the sink is shared, and it is thread-safe. The level comes from
/// TESSERA_LOG (trace, debug, info, warning, error, off; default info).
std::shared_ptr<spdlog::logger> make_logger(std::optional<int> rank = std::nullopt);

/// The logger of code that belongs to no rank.
spdlog::logger& log();

}  // namespace tessera
