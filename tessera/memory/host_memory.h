#pragma once

#include <cstdint>

namespace tessera {

/// Bytes that the processes of this host may use together: its memory and swap, or less where its container is given less. 0 where that cannot be read.
int64_t host_memory_bytes();

/// Most memory of its own that the system lets this process have (`ulimit -d`, `ulimit -v`); 0: no limit.
int64_t process_memory_limit_bytes();

}  // namespace tessera
