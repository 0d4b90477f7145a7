#pragma once

#include <cstdint>

namespace tessera {

inline constexpr int64_t kMostExperts = 65536;  ///< of a block

}  // namespace tessera
