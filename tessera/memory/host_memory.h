#pragma once

#include <cstdint>

namespace tessera {

/// Bytes that the processes of this host may use together: its memory and swap, or less where its container is given less. 0 where that cannot be read.
int64_t host_memory_bytes();

}  // namespace tessera
