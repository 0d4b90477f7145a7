#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera::checkpoint {

/// What a RunLock keeps for one run, as its sentences say it: "KNOB = DIR: BEFORE process 7 on host AFTER WAY_OUT".
struct LockedFolder {
  std::string knob = "checkpoint.dir", file = ".lock";
  std::string before{}, after = " is training into it";
  std::string way_out =
      ", and two runs would overwrite each other's checkpoints; wait for its end, end it (on SIGTERM it saves), or name another checkpoint.dir";
  bool needed = true;  ///< where no lock is to be had, but for another's, that is refused; else it is done without, and nothing is said
};

/// A folder of checkpoints, or of what `what` says, as one live run's own: `dir`/.lock, held as long as this object lives, and removed with it.
///
/// The kernel holds it (flock), for this open file: whatever ends the process gives it back, so a lock that somebody left is none, and is taken over. Where the
/// file system has no such locks, what the file says decides: the process is alive, on this host, since the same boot. Hosts that share a folder see each
/// other's locks where the file system carries them (NFS 4, Lustre and Ceph as they are mounted by default); where it does not, a live run on another host
/// is not noticed. remarks() says so where that may matter.
class RunLock {
 public:
  /// Makes `dir`. Waits at most `patience` for whoever holds it, and says so where that takes long (poll_until): one that is being killed takes a moment to
  /// go, and the lock of a host that vanished stays for as long as the file server keeps it. Throws ConfigError naming checkpoint.dir and
  /// who trains into it, or why nothing can be written there.
  explicit RunLock(const std::filesystem::path& dir, std::chrono::milliseconds patience = {}, LockedFolder what = {});
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// What has become of it while it was held, by which it keeps nobody out any more: "its .lock was removed", or the folder. Empty: it keeps others out, as far
  /// as it did.
  std::string loss() const;

  /// To be said aloud.
  const std::vector<std::string>& remarks() const { return remarks_; }

 private:
  /// False where another holds it.
  bool try_lock();
  LockedFolder what_;
  std::filesystem::path dir_, file_;
  int descriptor_ = -1;
  std::pair<uint64_t, uint64_t> folder_{};  ///< the folder that the lock lies in, whatever it is called by now
  std::vector<std::string> remarks_;
};

}  // namespace tessera::checkpoint
