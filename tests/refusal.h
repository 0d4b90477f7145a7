#pragma once

#include <functional>
#include <string>

#include "tessera/core/error.h"

namespace tessera::testing_support {

/// What was said; "accepted" where nothing was refused.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace tessera::testing_support
