#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tessera/memory/host_link.h"
#include "tessera/memory/memory.h"
#include "tessera/offload/spill_file.h"

namespace tessera::offload {

/// Over what parked storages move, and how much of them is away. Of one rank.
struct Depot {
  Depot(at::Device device, int64_t budget_bytes, MemoryCategory category = MemoryCategory::Activations)
      : link(device), budget_bytes(budget_bytes), category(category) {}

  bool has_room(int64_t bytes) const { return budget_bytes == 0 || away_bytes + bytes <= budget_bytes; }
  /// Takes host memory that is on its way to the file, and lets go of what is so no more: at most two stay, so that a run holds the same bytes however fast
  /// the disk is.
  void await_write(SpillFile::Ticket ticket, at::Tensor staged);

  HostLink link;
  int64_t budget_bytes;               ///< 0: no limit
  MemoryCategory category;            ///< of what is parked
  int64_t away_bytes = 0;             ///< of storages that are parked now
  std::unique_ptr<SpillFile> file{};  ///< null: nothing goes to disk

 private:
  struct Writing {
    SpillFile::Ticket ticket;
    at::Tensor staged;
  };
  std::deque<Writing> writing_;
};

/// The bytes of a storage of the device, kept elsewhere until they are asked for: by backward, or by an optimizer. The storage itself is free to die as soon as
/// this is made. Its copies are ordered by streams alone: out behind what wrote it, in behind out, and whoever uses what came back behind that.
class ParkedStorage {
 public:
  ParkedStorage(std::shared_ptr<Depot> depot, const at::Tensor& tensor, bool on_disk);
  ~ParkedStorage();
  ParkedStorage(const ParkedStorage&) = delete;
  ParkedStorage& operator=(const ParkedStorage&) = delete;

  /// Until it is back so many bytes lie on the device in its place: for a dry run whose storage may be smaller in the run, and stay.
  void leave_behind(int64_t bytes);

  /// Whether `tensor` shows the bytes that were parked, on the storage that they were on.
  bool holds(const at::Tensor& tensor) const;

  /// Begins to bring them back; nothing where that has been done.
  void fetch();
  /// The bytes on the host, seen as `form` sees its storage; where they wait stays as it is.
  at::Tensor copy_on_host(const at::Tensor& form) const;
  /// They lie on the device again, for the current stream to read; fetched where they are not.
  const at::Storage& restored();
  /// The same, as memory of the very tensor that was parked, from which free_memory() has taken its own.
  void refill(const at::Tensor& tensor);
  /// The same where they are on disk and the tensor is the host's: its memory is that part of the file, from which nothing is read before it is looked at, and
  /// what is written there is the file's. False, and nothing done, where they are not.
  bool map_into(const at::Tensor& tensor) const;

 private:
  const at::Storage& brought();
  void copy_in();

  std::shared_ptr<Depot> depot_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  ///< a name to compare, whose address is given to no other while this lives
  c10::VariableVersion writes_;
  uint32_t version_ = 0;
  int64_t bytes_;
  at::Tensor host_{};                            ///< [bytes], on the host; undefined while they are on disk alone
  std::shared_ptr<SpillFile::Extent> extent_{};  ///< on disk; null: on the host
  SpillFile::Ticket written_ = 0, read_ = 0;     ///< 0: not asked for
  at::Tensor left_{};                            ///< see leave_behind
  at::Tensor device_{};                          ///< [bytes], back on the device
  CopyStream::Point out_{}, in_{};
};

/// Frees the memory of the tensor's storage, which stays a storage of so many bytes: nobody may look at them until it is refilled.
void free_memory(const at::Tensor& tensor);

}  // namespace tessera::offload
