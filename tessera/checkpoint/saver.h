#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"

namespace tessera::checkpoint {

struct SaverOptions {
  std::filesystem::path dir;
  int64_t keep = 0;                          ///< prune(); 0: all stay
  bool async = false;                        ///< write while the caller goes on
  int64_t staging_bytes = int64_t{1} << 30;  ///< async: host memory for what is not written yet
  RunIdentity run{};                         ///< whose checkpoints `keep` counts
  std::set<int64_t> known{};                 ///< steps of checkpoints in `dir` whose hashes have been checked
};

/// How a save ended; equal on all ranks, but for `remark`.
struct SaveOutcome {
  int64_t step = 0;
  std::string error{};   ///< why it is not there; empty: it is
  std::string remark{};  ///< of rank 0: older checkpoints that were not removed, now or after the save before, and why; else empty
};

/// The checkpoints of a run, one after the other: saved, and pruned by rank 0. What was hashed on its way to the disk is not read back for that, and what goes
/// is renamed at once and deleted by a thread, so that the other ranks, in their next collective, do not wait for as long as its bytes are many.
///
/// A save that fails for a reason of the file system (a full disk, a lost permission) leaves the last good checkpoint as it was and is told of by outcomes():
/// the caller decides whether to go on. What says that a peer is lost (CommError), or that we are wrong (InternalError), is thrown, by the call that learns
/// of it.
///
/// Synchronous: save() returns when the checkpoint is on the disk. Asynchronous: save() copies what this rank is to write into host memory and returns; a
/// thread writes it, agrees with its peers that all is whole, and rank 0 renames the folder. At most `staging_bytes` are held: where the rank writes more,
/// save() returns when the rest fits. One save is under way at a time: the next waits for it. The thread's collectives run on `group`, which nothing else may
/// use meanwhile; they wait for the slowest rank's disk, at most the group's timeout. Where the system has no thread for it, the caller's writes, and save()
/// returns when that is done.
class Saver {
 public:
  Saver(SaverOptions options, comm::Group group);
  /// Waits for a save that is under way.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Collective. The tensors may change once it has returned.
  void save(const CheckpointState& state);

  /// Waits for the save that is under way, if there is one, and until what it replaces is deleted.
  void wait();

  /// Whether a save is under way.
  bool pending() const { return writer_.joinable(); }

  /// How the saves that ended since the last call ended, in order. One under way may end later on one rank than on another; after save() and wait() all know
  /// the same.
  std::vector<SaveOutcome> outcomes();

 private:
  void start(const CheckpointState& state);
  /// Runs one save's second half, or all of it, and notes how it ended.
  void attempt(int64_t step, const std::function<void()>& work);
  void prune_after(SaveOutcome& outcome);
  /// Waits for the writer, and throws what it met that is no matter of files.
  void finish_writing();
  /// Waits for the thread that deletes; returns why it could not.
  std::string finish_removing();

  SaverOptions options_;
  comm::Group group_;
  std::thread writer_, remover_;
  bool alone_ = false;          ///< no thread was to be had, which has been said
  std::set<std::string> told_;  ///< what prune() kept, each said once
  std::string not_removed_;     ///< by the remover; read once it is joined
  std::exception_ptr broken_;   ///< what the writer met that is no matter of files
  std::mutex mutex_;            ///< over outcomes_ and last_
  std::vector<SaveOutcome> outcomes_;
  SaveOutcome last_;
};

}  // namespace tessera::checkpoint
