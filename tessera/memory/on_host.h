#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// While it lives, meta on this thread stands for an accelerator and not for this machine's CPU: a dry run goes the ways that a step there goes, without the
/// loops of ours that only a host has. Nests.
class MetaAsAccelerator {
 public:
  MetaAsAccelerator();
  ~MetaAsAccelerator();
  MetaAsAccelerator(const MetaAsAccelerator&) = delete;
  MetaAsAccelerator& operator=(const MetaAsAccelerator&) = delete;

 private:
  bool former_;
};

/// Whether a host computes with it: what lies on the CPU; and what a dry run has on meta, unless that stands for an accelerator, and then what was allocated
/// beside it (HostMemory).
bool is_on_host(const at::Tensor& tensor);

}  // namespace tessera
