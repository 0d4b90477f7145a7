#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {

/// Base of what tessera throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user can fix it: a knob, its value, the rule it breaks, and the way out. The command exits 2.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A peer or a link failed: says rank, collective and seconds waited. The command exits 1.
class CommError : public Error {
 public:
  using Error::Error;
};

/// Our own bug: an invariant of the code does not hold.
class InternalError : public Error {
 public:
  using Error::Error;
};

namespace detail {
template <class... Parts>
std::string concat(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return std::move(out).str();
}
}  // namespace detail

/// Throws ConfigError made of `parts`, in order, unless `condition` holds.
template <class... Parts>
void require(bool condition, Parts&&... parts) {
  if (!condition) [[unlikely]]
    throw ConfigError(detail::concat(std::forward<Parts>(parts)...));
}

/// Throws InternalError made of `parts`, in order, unless `condition` holds.
template <class... Parts>
void invariant(bool condition, Parts&&... parts) {
  if (!condition) [[unlikely]]
    throw InternalError("internal error: " + detail::concat(std::forward<Parts>(parts)...));
}

}  // namespace tessera
