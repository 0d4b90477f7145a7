#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tessera/config/config.h"
#include "tessera/train/stepper.h"

namespace tessera {

/// What a step of `tokens` in `step_s` seconds on `ranks` devices did, as metrics.jsonl names it:
///   tflops_per_device           model FLOPs (model_flops_per_token) a second and device: the useful work, whatever was run for it
///   hardware_tflops_per_device  FLOPs of the matrix products that were run: with recompute, flash attention's own recomputation and the padding micro-batches
///                               of data ranks that have one less than others, so the larger of the two
///   recomputed_flops            of the latter, those of the whole step that recompute ran again
///   mfu, hfu                    the first two as shares of log.peak_tflops, where that is given (PaLM, arXiv:2204.02311; Megatron, arXiv:2205.05198)
std::map<std::string, double> flop_rates(const Config& config, const StepFlops& flops, int64_t tokens, double step_s, int ranks);

}  // namespace tessera
