#pragma once

#include <filesystem>
#include <memory>

#include "tessera/memory/filed_tensor.h"
#include "tessera/offload/disk_bytes.h"

namespace tessera {

/// Tensors in a file of `dir` (ZeRO-Infinity, arXiv:2104.07857), which has no name, so that nothing of it stays. What computes on the host goes through a
/// mapping of it; copies beside that are read by a thread of the file's own. `disk` is told what the file takes. `dry`: tensors on meta, and no file.
///
///   host      none that is anybody's: pages of the file, which the system writes out and drops when it needs room
///   disk      all of it, reserved when a tensor is made
/// A medium that fails under a mapping ends the process (SIGBUS); a full disk does not, for room is reserved. `ulimit -v` counts mappings, `ulimit -d` does
/// not. Throws ConfigError for a `dir` that cannot be written.
std::shared_ptr<TensorFile> make_mapped_file(const std::filesystem::path& dir, const DiskBytes& disk = {}, bool dry = false);

}  // namespace tessera
