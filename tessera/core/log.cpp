#include "tessera/core/log.h"

#include <cstdlib>

#include <spdlog/sinks/stdout_color_sinks.h>

namespace tessera {
namespace {

const spdlog::sink_ptr& stderr_sink() {
  static const spdlog::sink_ptr shared = [] {
    auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
    sink->set_pattern("%H:%M:%S %^%L%$ %n%v");
    return sink;
  }();
  return shared;
}

spdlog::level::level_enum level_from_environment() {
  const char* name = std::getenv("TESSERA_LOG");
  if (!name) return spdlog::level::info;
  const auto level = spdlog::level::from_str(name);
  // from_str answers `off` for words that it does not know: silence must be asked for by its name.
  return level == spdlog::level::off && std::string_view(name) != "off" ? spdlog::level::info : level;
}

}  // namespace

std::shared_ptr<spdlog::logger> make_logger(std::optional<int> rank) {
  // The prefix is in the logger's name, not in the sink's pattern: ranks may be threads that share the sink.
  auto logger = std::make_shared<spdlog::logger>(rank ? fmt::format("[rank {}] ", *rank) : std::string(), stderr_sink());
  logger->set_level(level_from_environment());
  return logger;
}

spdlog::logger& log() {
  static const auto logger = make_logger();
  return *logger;
}

}  // namespace tessera
