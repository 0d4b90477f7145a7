#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "cli/bench/sampling.h"
#include "tessera/comm/group.h"

/// What a transformer layer that is cut over t ranks costs in computation and in communication, and how both grow with the hidden size: per token,
/// computation with its square and traffic with the size itself, so that larger layers hide more of what they send. `tessera bench tp` is made of this.
namespace tessera::bench {

/// One block of LLaMA, attention and feed-forward, on one sequence.
struct LayerCase {
  int64_t hidden = 0;  ///< h; the feed-forward layer inside is 8/3 as wide, rounded up to a multiple of 64
  int64_t heads = 0;   ///< of queries, and as many of keys and values; they divide h, and at least one a rank
  int64_t tokens = 0;  ///< s
  bool sequence_parallel = false;
  bool overlap = false;                 ///< of communication with products; `communication` is then still that of the layer without
  at::Device device = at::kCPU;         ///< of this rank
  at::ScalarType compute = at::kFloat;  ///< of matrix products and attention, and so of what is sent between ranks; norms and the residual stream are fp32
};

/// Forward and backward of the layer on this rank, without the update and without what is sent once a step.
struct LayerRow {
  LayerCase what{};
  int64_t ffn_dim = 0;
  int ranks = 0;
  std::string backend{};
  double flops = 0;               ///< counted: of the matrix products that a rank runs
  int64_t sent_bytes = 0;         ///< counted: what a rank sends
  bench::Timing compute{};        ///< the layer where collectives return at once
  bench::Timing communication{};  ///< its collectives alone, one after the other
  bench::Timing layer{};          ///< both together, as a training step runs them

  double flops_per_token() const;
  double bytes_per_token() const;
  double communication_over_compute() const;
};

/// Measures on the ranks of `group`. Collective; all ranks get the slowest one's times, and counts of their own.
/// Memory of a rank: weights and gradients of the layer, 8 * (4 h^2 + 3 h ffn) / t bytes, and the activations of one pass.
LayerRow measure_layer(const comm::Group& group, const LayerCase& what, const bench::Limits& limits);

/// communication_over_compute of each row by the square-cube law, from the first row's: inversely as the hidden size.
std::vector<double> law_of(const std::vector<LayerRow>& rows);

/// The rows as JSON, one a line. Keys: hidden heads ffn_dim tokens ranks backend dtype sequence_parallel overlap flops_per_token bytes_per_token compute_us
/// communication_us layer_us communication_over_compute law.
std::string json_lines(const std::vector<LayerRow>& rows);
/// Reads such lines; what follows from other keys is computed again.
std::vector<LayerRow> read_json_lines(const std::vector<std::string>& lines);

/// The rows as a table, and below it the exponents of what was counted and of what was measured beside the law's.
std::string format_table(const std::vector<LayerRow>& rows);

/// The same as a picture (SVG), all axes logarithmic: counts over the hidden size on the left, times on the right, each with its line of the law, a line of
/// slope 2 or 1, through the first point. Takes at least one row.
std::string plot(const std::vector<LayerRow>& rows);

}  // namespace tessera::bench
