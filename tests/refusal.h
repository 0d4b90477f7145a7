#pragma once

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::testing_support {

/// The text of the ConfigError that `action` throws; fails the test where it throws none.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

}  // namespace tessera::testing_support
