#pragma once

#include <vector>

#include "tessera/config/config.h"
#include "tessera/pipeline/schedules/simulate.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {

/// FLOPs of the matrix products of one micro-batch in a stage, as nn::FlopCounter counts them; what recompute runs again is part of the backward of inputs, and
/// the fused head makes its gradients in forward.
struct StageFlops {
  double forward = 0;
  double backward_input = 0;
  double backward_weight = 0;

  double total() const { return forward + backward_input + backward_weight; }
};

/// Of every stage: its actions are run once, on meta, by the executor that trains. Layers are whole, so with mesh.tp these are the FLOPs of all its ranks.
/// Cost: milliseconds a layer.
std::vector<StageFlops> stage_flops(const Config& config, const PipelineLayout& layout);

/// What a simulator takes the forward, the backward of inputs and that of weights of each stage to cost: what was measured, where pipeline.costs_from names a
/// timeline (a backward that was measured whole is cut as its FLOPs are); else pipeline.costs, which are those of an average stage, times the stage's share of
/// the FLOPs of that kind; else its FLOPs, in units of an average forward. A message is free unless one of the first two says otherwise. Throws ConfigError for
/// a timeline of another number of stages.
schedules::Costs costs_of(const PipelineConfig& pipeline, const std::vector<StageFlops>& flops);

}  // namespace tessera
