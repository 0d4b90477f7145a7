#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "tessera/core/hash.h"

namespace tessera {

/// A name that nobody else has: 64 bits that the system draws, in hex. For what has to be told from its like of other processes, hosts and days.
inline std::string drawn_name() {
  std::random_device device;
  return to_hex(uint64_t{device()} << 32 | device());
}

}  // namespace tessera
