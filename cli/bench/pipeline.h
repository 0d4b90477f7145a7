#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "cli/bench/sampling.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"

/// What a pipeline costs beside its arithmetic, and how that changes with schedule, micro-batches and size. `tessera bench pp` is made of this.
namespace tessera::bench {

/// Forward and backward of one global batch of a small LLaMA that is cut into stages over all ranks.
struct PipelineCase {
  int64_t hidden = 0, heads = 0;
  int64_t layers = 0;
  int64_t tokens = 0;         ///< s of a sequence
  int64_t global_size = 0;    ///< sequences
  int64_t micro_batches = 0;  ///< m, a divisor of that
  std::string schedule = "1f1b";
  int ranks = 1;   ///< p
  int chunks = 1;  ///< v
  at::Device device = at::kCPU;
};

/// Of a run that takes such steps.
Config config_of(const PipelineCase& what);

/// One line of what `tessera bench pp` prints. `kind` says which fields mean something:
///   overhead   one rank, the engine in turns with a plain loop over micro-batches: step, plain
///   schedule   a step by schedule: step, bubble, foretold, formula
///   curve      a step by the number of micro-batches: the same
///   boundary   by hidden size, one block a rank: flops_per_token, bytes_per_token of a boundary both ways, compute, message
struct PipelineRow {
  std::string kind{};
  PipelineCase what{};
  std::string backend{};
  double step_us = 0;   ///< median, of the slowest rank
  double plain_us = 0;  ///< the same of the plain loop
  double overhead = 0;  ///< median of the pairs' ratios, less 1
  double bubble = 0;    ///< measured: median of some steps
  double foretold = 0;  ///< by the simulator, of each stage's mean costs as they were measured
  double formula = 0;   ///< of equal costs, F = B = W
  double flops_per_token = 0, bytes_per_token = 0;
  double compute_us = 0;  ///< forward and backward of a micro-batch on the stage that takes longest
  double message_us = 0;  ///< one of a boundary's messages, alone

  double message_over_compute() const { return 2 * message_us / compute_us; }  ///< a micro-batch crosses once each way
};

/// Each is collective over `world`, whose groups record into `recorder`; all ranks get the same row, but for overhead, where each measures itself.
PipelineRow measure_overhead(const PipelineCase& what, const Limits& limits);
PipelineRow measure_step(const comm::World& world, const PipelineCase& what, const Limits& limits);
PipelineRow measure_boundary(const comm::World& world, comm::Recorder& recorder, const PipelineCase& what, const Limits& limits);

/// The rows as JSON, one a line, each with the keys of its kind.
std::string json_lines(const std::vector<PipelineRow>& rows);
std::vector<PipelineRow> read_pipeline_rows(const std::vector<std::string>& lines);
/// A table for each kind, and below the boundary's the exponents beside the law's.
std::string format_table(const std::vector<PipelineRow>& rows);
/// Bubble and time of a step over micro-batches, and the boundary's counts and times over the hidden size (SVG). Takes at least one row of both kinds.
std::string plot(const std::vector<PipelineRow>& rows);

}  // namespace tessera::bench
