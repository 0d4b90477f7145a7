#pragma once

#include <filesystem>
#include <string>

#include "tessera/core/temporary_place.h"

/// Not part of the public surface.
namespace tessera::launch {

/// A launcher's folder among those that nobody keeps, TMPDIR/tessera_run_XXXXXX; gone with this object. Launchers that were killed cannot clear up, so whoever
/// makes a new one removes theirs first.
///
/// That its launcher lives is shown by a file in it, locked (flock) by the time it has its name: the kernel gives the lock back whatever ends the process, and
/// a folder goes only where its file could be locked. Folders of other users and other hosts, and those without the file (being made, or on a file system
/// without locks), are left alone.
class ScratchFolder {
 public:
  /// Throws ConfigError naming the knob of `place` where no folder can be made there. `way_out`: what to do instead of naming another place.
  ScratchFolder(const TemporaryPlace& place, const std::string& way_out);
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  void lock();

  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace tessera::launch
