#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera {

/// Bytes a second.
struct DiskSpeed {
  double write = 0, read = 0;
};

/// Writes `bytes` to a file without a name in `folder`, waits until they are on the medium, drops them from the system's cache and reads them back, once.
/// Nothing where no file can be made there, or it finds no room. Where the file system is memory, that is memory's speed.
std::optional<DiskSpeed> measure_disk(const std::filesystem::path& folder, int64_t bytes);

}  // namespace tessera
