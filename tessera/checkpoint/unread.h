#pragma once

#include <algorithm>
#include <string>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// Whether LoadOptions::ignore_prefixes lets what is stored by this name stay unread.
inline bool may_stay_unread(const LoadOptions& options, const std::string& stored) {
  return std::ranges::any_of(options.ignore_prefixes, [&](const std::string& prefix) { return stored.starts_with(prefix); });
}

}  // namespace tessera::checkpoint
