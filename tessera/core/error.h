#pragma once

#include <initializer_list>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

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

/// One part of a message: where it lies, and how a stream prints it. A message is an array of these, so that each type is compiled once and not each
/// combination of types that some message is made of.
class Part {
 public:
  Part(std::string_view text) : at_(text.data()), size_(text.size()) {}

  template <class T>
    requires(!std::is_convertible_v<const T&, std::string_view>)
  Part(const T& value) : at_(std::addressof(value)), print_([](std::ostream& out, const void* at) { out << *static_cast<const T*>(at); }) {}

  friend std::ostream& operator<<(std::ostream& out, const Part& part);

 private:
  const void* at_;
  size_t size_ = 0;                                      ///< of text
  void (*print_)(std::ostream&, const void*) = nullptr;  ///< of all else
};

std::string joined(std::initializer_list<Part> parts);
[[noreturn]] void throw_config_error(std::initializer_list<Part> parts);
[[noreturn]] void throw_internal_error(std::initializer_list<Part> parts);

template <class... Parts>
std::string concat(const Parts&... parts) {
  return joined({Part(parts)...});
}

}  // namespace detail

/// Throws ConfigError made of `parts`, in order, unless `condition` holds.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    detail::throw_config_error({detail::Part(parts)...});
}

/// Throws InternalError made of `parts`, in order, unless `condition` holds.
template <class... Parts>
void invariant(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    detail::throw_internal_error({detail::Part(parts)...});
}

}  // namespace tessera
