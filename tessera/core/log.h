#pragma once

#include <fmt/format.h>

namespace tessera {

/// Writes lines "12:31:07 I text" to standard error, so that standard output stays the command's own; threads may share it. The level comes from TESSERA_LOG
/// (trace, debug, info, warning, error, off; default info). A line is put together by fmt's own library and written by one function: spdlog's templates, in
/// each file that logs, took two seconds of the compiler.
class Log {
 public:
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    write(Level::Info, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) const {
    write(Level::Warning, text, fmt::make_format_args(args...));
  }

 private:
  enum class Level { Info, Warning };
  void write(Level level, fmt::string_view text, fmt::format_args args) const;
};

inline Log log() { return {}; }

}  // namespace tessera
