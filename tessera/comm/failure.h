#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace tessera::comm {

/// The cause in an exception's text, on one line: no stack trace, no place in the engine's sources, no advice.
std::string message_of(const std::exception_ptr& error);

/// "12.3 s"
std::string seconds_since(std::chrono::steady_clock::time_point start);

}  // namespace tessera::comm
