#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/core/attachment.h"

namespace tessera {

/// What of a module's forward pass is computed again in backward.
///   Full       everything: between the passes only the module's inputs are kept
///   Selective  with `keep`: everything but the operators named there, whose outputs are kept; without: the attention cores inside the modules, for attention
///              costs the most memory per FLOP (Korthikanti et al., arXiv:2205.05198)
enum class RecomputeMode { Full, Selective };

struct RecomputeOptions {
  std::string modules = "layers.*";  ///< paths of the modules, each recomputed as one
  int64_t every = 1;                 ///< only the first of every so many of them
  int64_t segment = 0;  ///< of so many modules in a row, which hand their outputs on as they are, the inputs of the first alone are kept; 0: of each
  RecomputeMode mode = RecomputeMode::Full;
  std::vector<std::string> keep = {};     ///< operators, such as "aten::mm" or, of libtorch's own, "mm"
  int64_t budget_bytes = 0;               ///< only as many of them, the cheapest set, as bring what they keep for backward down to this; 0: all
  std::function<void()> example = {};     ///< for a budget: one forward pass of `root`, or of its like on meta, from which bytes and FLOPs are measured
  torch::nn::Module* measured = nullptr;  ///< whose forward `example` runs, where that is not `root` itself
  std::function<int(const std::string& path)> holder = {};  ///< for a budget, where ranks hold modules each: whose, and the budget is each one's; empty: one
};

/// From now on the modules' activations are dropped after forward and computed again in backward, just before they are needed (activation checkpointing,
/// arXiv:1604.06174). Non-reentrant: the graph of the first forward stays and only what it saved is recomputed, so parameters that several modules share get
/// one gradient, hooks fire once, and gradients are bit for bit those without recompute. What is returned ends it.
///
/// In segments of k of n modules, n/k inputs are kept, and while a segment's backward runs what its k modules save (sqrt(n) of both where k is sqrt(n); the
/// same paper): when the last of them is due, all are computed again, from the first, once. What a module is given beside the output of the one before is kept.
///
/// Kept per call: the inputs, and what the buffers held that forward writes (the outputs of `keep` besides). Time: a second forward of the module, up to the
/// last operator that saved something. The call is repeated with what the thread had set the first time: SampleScope, autocast, kernel choice, random
/// generators (those of the devices in use, where the call drew from them; ranks that are threads share libtorch's CPU generator and must not draw from it at
/// once). Recomputation starts where this interceptor sits: what was attached to the module before runs again (tensor parallelism), what was attached later
/// does not (FSDP, whose backward has gathered the module by then). Interceptors of modules inside run again; nn::recomputing() tells them. Nests: an inner
/// module's inputs are then recomputed themselves. Off while gradients are not recorded, and in modules that are not training. Of buffers that forward writes
/// (running statistics, the vectors of a power iteration) the former values are kept: the second pass finds them, and leaves the buffers as they were. Other
/// side effects occur twice.
///
/// Throws ConfigError where the pattern matches nothing (nearest path), a module cannot be intercepted, `keep` names no operator (nearest) or one whose output
/// cannot be kept, there is no attention core, or the budget cannot be met; in backward where a recomputation saves other tensors than the first forward did
/// (names module, operator, shapes), and at the first gradient of a module that saw no call through its holder (names it and the line to change).
[[nodiscard]] Attachment recompute(torch::nn::Module& root, const RecomputeOptions& options = {});

template <class Contained>
[[nodiscard]] Attachment recompute(const torch::nn::ModuleHolder<Contained>& root, const RecomputeOptions& options = {}) {
  return recompute(*root.ptr(), options);
}

}  // namespace tessera
