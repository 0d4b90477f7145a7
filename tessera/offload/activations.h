#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/core/attachment.h"
#include "tessera/offload/disk_bytes.h"

namespace tessera {

/// Where what leaves a device waits.
enum class OffloadPlace { Host, Disk };

/// Modules whose activations leave the device, by pattern of their paths. Where patterns name modules inside of each other, an activation goes where the
/// innermost of them says; of patterns that name one module the one with fewer '*' counts.
struct OffloadedModules {
  std::string modules = "layers.*";
  std::optional<OffloadPlace> place = OffloadPlace::Host;  ///< nothing: they stay, as exceptions from what another pattern moves
};

struct ActivationOffloadOptions {
  std::vector<OffloadedModules> where = {{}};
  double fraction = 1;                   ///< of the modules that a pattern names, the first: what they save waits longest
  int64_t min_bytes = int64_t{1} << 20;  ///< what is smaller stays
  int64_t budget_bytes = 0;              ///< that are away at a time, at most: what comes later stays; 0: no limit
  int64_t prefetch = 1;                  ///< modules whose activations are fetched ahead of their backward; 0: each when it is asked for
  std::filesystem::path dir = {};        ///< for Disk: folder of the file that holds them
  DiskBytes disk = {};                   ///< is told what that file takes
};

/// From now on what autograd keeps of the modules' calls leaves the device in forward and comes back in backward, beside the computing, on streams of their
/// own. Bit for bit what training is without. What is returned ends it.
///
/// Moved are storages, each once, however many operators save it or views of it; parameters and buffers stay, they are on the device anyway. Where a module is
/// recomputed (recompute() attached before this), what is moved is its inputs; inside of a module that is recomputed nothing is, for nothing is kept. Modules
/// that are not training, or are called without gradients, are left alone.
///
/// Memory: on the device the activations of one module, and of `prefetch` more in backward; elsewhere all that was moved, as MemoryCategory::Activations of
/// HostMemory. On Disk: on the host what is on its way, two storages out and those of the modules that are fetched in; the file has no name, so nothing of it
/// stays whichever way the process ends. Traffic: each byte once out and once in, a pass.
///
/// Throws ConfigError where a pattern matches nothing or a module cannot be intercepted, where two name a module as closely and disagree, where one that keeps
/// modules on the device is no exception from any other, for numbers out of range, and for a `dir` that cannot be written;
/// Error, in forward, where the disk is full, and in backward where it cannot be read.
[[nodiscard]] Attachment offload_activations(torch::nn::Module& root, at::Device device, const ActivationOffloadOptions& options = {});

template <class Contained>
[[nodiscard]] Attachment offload_activations(const torch::nn::ModuleHolder<Contained>& root, at::Device device, const ActivationOffloadOptions& options = {}) {
  return offload_activations(*root.ptr(), device, options);
}

}  // namespace tessera
