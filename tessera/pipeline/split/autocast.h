#pragma once

#include <array>
#include <optional>
#include <string>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace tessera::tape {

/// What autocast casts to on this thread, for each kind of device; nothing: it is off there.
struct Autocast {
  static constexpr std::array<c10::DeviceType, 2> kTypes = {c10::DeviceType::CPU, c10::DeviceType::CUDA};
  std::array<std::optional<c10::ScalarType>, 2> dtypes{};

  static Autocast now();
  bool operator==(const Autocast&) const = default;
};
std::string to_string(const Autocast& autocast);  ///< ", autocast cpu BFloat16"; empty where it is off

/// Sets it, while alive.
class AutocastSwitch {
 public:
  AutocastSwitch();
  ~AutocastSwitch();
  AutocastSwitch(const AutocastSwitch&) = delete;
  AutocastSwitch& operator=(const AutocastSwitch&) = delete;

  void set(const Autocast& autocast);

 private:
  Autocast before_;
  std::array<c10::ScalarType, 2> dtypes_before_{};  ///< also where it was off
};

}  // namespace tessera::tape
