#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "tessera/data/loader.h"
#include "tessera/memory/host_link.h"

namespace tessera {

/// The batches of a run's steps on the device that trains.
///
/// On an accelerator a batch crosses in one copy, from pinned memory and on a stream of its own, while the step before it computes: whoever runs steps calls
/// prepare() once the step's work is asked for, and the next next() finds the batch there. On the CPU a batch is what the loader gives, when it is asked for.
///
///   memory    on an accelerator: of the step that runs and, from prepare() on, of the next one 16 bytes a token (tokens and labels) on the device, and the
///             next one's in pinned memory
///   waits     the host for none; the device's work that follows next() for the copy
///
/// One object, one thread.
class BatchFeed {
 public:
  BatchFeed(data::Loader loader, at::Device device);

  data::StepBatch next();
  /// Loads the batch after it and sends it on its way; nothing on the CPU, and where it is on its way already.
  void prepare();

  /// Where the run stands: behind what next() gave, whatever lies ready.
  data::Cursor cursor() const;
  /// As Loader::seek.
  void seek(const data::Cursor& cursor);
  const data::Loader& loader() const { return loader_; }

 private:
  /// A batch whose tensors are views of `memory`, which a copy out of `pinned` fills.
  struct Sent {
    data::StepBatch batch;
    at::Tensor pinned, memory;
    CopyStream::Point arrival;
  };
  Sent send(data::StepBatch batch) const;

  data::Loader loader_;
  HostLink link_;
  std::optional<Sent> sent_;
  std::optional<data::Cursor> before_;  ///< where the run stood when that batch was loaded
  at::Tensor last_pinned_;              ///< of the batch that was given last: alive until its copy is surely done
};

/// Puts all tensors of the micro-batches on `device`, by copies that the host waits for; what lies there already stays as it is.
void move_to(std::vector<data::MicroBatch>& micro_batches, at::Device device);
bool lie_on(const std::vector<data::MicroBatch>& micro_batches, at::Device device);

}  // namespace tessera
