#include "tessera/core/log.h"

#include <cstdlib>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace tessera {
namespace {

spdlog::level::level_enum level_from_environment() {
  const char* name = std::getenv("TESSERA_LOG");
  if (!name) return spdlog::level::info;
  const auto level = spdlog::level::from_str(name);
  // from_str answers `off` for words that it does not know: silence must be asked for by its name.
  return level == spdlog::level::off && std::string_view(name) != "off" ? spdlog::level::info : level;
}

spdlog::logger make_logger() {
  auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  sink->set_pattern("%H:%M:%S %^%L%$ %v");
  spdlog::logger logger("", std::move(sink));
  logger.set_level(level_from_environment());
  return logger;
}

}  // namespace

void Log::write(Level level, fmt::string_view text, fmt::format_args args) const {
  static auto logger = make_logger();
  const auto as = level == Level::Info ? spdlog::level::info : spdlog::level::warn;
  if (logger.should_log(as)) logger.log(as, fmt::vformat(text, args));
}

}  // namespace tessera
