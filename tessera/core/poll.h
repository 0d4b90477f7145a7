#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace tessera {

/// Asks `done` every 50 ms until it says yes; false where it has not for as long as `patience`. Once 2 s have passed it says aloud what is waited for:
/// "<awaited>; waiting up to 2 m 00 s for its end".
[[nodiscard]] bool poll_until(std::chrono::milliseconds patience, const std::function<bool()>& done, const std::function<std::string()>& awaited);

}  // namespace tessera
