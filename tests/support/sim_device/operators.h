#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "tests/support/sim_device/happens_before.h"

// Every operator of the simulated device is the CPU's kernel on the same bytes, at once. What it makes is copied into device memory, so that trackers count
// it as a device's, and what it reads and writes is held against what other streams did (happens_before.h).

namespace tessera::sim {

/// Gives the devices a kernel for each operator for which the CPU has one: by name, for a fallback for the device as a whole would let the composite kernels
/// win that some operators have beside the CPU's (layer_norm, silu's backward, attention), and those have other bits.
void register_operators();

/// From now on an operator may read tensors of other simulated devices, as if they were copied to its own first: tests hand one batch to all ranks.
void let_operators_read_other_devices();

/// Says to the detector that the `sequence`th piece of work of a stream uses all the bytes that the tensor may touch; nothing for other memory than ours.
void record_access(const at::Tensor& tensor, int stream, uint64_t sequence, bool writes, const char* by);

/// What a piece of work uses, for a graph to tell the detector of at each replay.
class Uses {
 public:
  void add(const at::Tensor& tensor, bool writes, const char* by);
  /// As one piece of work of the stream.
  void tell(int stream) const;

 private:
  std::vector<Access> accesses_;
};

}  // namespace tessera::sim
