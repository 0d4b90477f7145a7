#pragma once

#include <filesystem>

namespace tessera::offload {

/// Opens a file in `folder` that has no name any more, to be read and written; -1, and errno, where that cannot be.
int open_nameless(const std::filesystem::path& folder);

}  // namespace tessera::offload
