#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <vector>

namespace tessera::comm {

/// The cause in an exception's text, on one line: no stack trace, no place in the engine's sources, no advice.
std::string message_of(const std::exception_ptr& error);

/// "12.3 s"
std::string seconds_since(std::chrono::steady_clock::time_point start);

/// "2, 5-7": the numbers in their order; `shortest_run` and more in a row as a range.
std::string format_ranks(const std::vector<int>& ranks, size_t shortest_run = 3);

/// "rank 4", "ranks 2, 5-7".
std::string name_ranks(const std::vector<int>& ranks, size_t shortest_run = 3);

}  // namespace tessera::comm
