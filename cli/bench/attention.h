#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "cli/bench/sampling.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/context_parallel/context_parallel.h"
#include "tessera/kernels/choice.h"

/// What `tessera bench cp` measures of attention to a sequence that is cut over ranks.
namespace tessera::bench {

/// Ways to attend over ranks, by name: those of context.method that need no more of the layout, and the ring without overlap.
std::vector<std::string> attention_methods();
ContextParallelOptions attention_options(const std::string& method);  ///< InternalError for a name that is none

struct AttentionCase {
  int64_t length = 8192, heads = 8, kv_heads = 8, features = 64;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  ///< of this rank
  std::vector<std::string> methods{"ring", "all_gather"};
};

/// One line of what was measured; which fields mean something says `kind`.
///   attention  forward and backward of one causal core over `ranks`, by `method`, beside the whole of it on one rank
///   packed     the same sequence as `documents` of one length on one rank: as tiles, and with the mask that holds all scores
///   window     one causal core on one rank that sees `window` positions, beside the whole sequence, and beside libtorch's attention with a mask that says so
///   memory     of what a block of LLaMA keeps for backward, the part of its attention, with the fused core and with all scores held
struct AttentionRow {
  std::string kind = "attention", method{}, backend{}, dtype = "fp32";
  int64_t length = 0, heads = 0, kv_heads = 0, documents = 1, window = 0;
  int ranks = 1;
  double time_us = 0;      ///< least, of the slowest rank
  double other_us = 0;     ///< attention: on one rank; packed, window: with the mask
  double whole_us = 0;     ///< window: without one
  int64_t sent_bytes = 0;  ///< by a rank
  double fused = 0, unfused = 0;

  /// A rank's share of the work per second over one device's work per second: 1 is a perfect split.
  double rate_over_one() const { return other_us / (ranks * time_us); }
};

/// Every method beside one device, in turns: each round measures one device (on every rank at once, so that all share the machine alike), then each method,
/// and the least of the rounds counts, since other programs come and go. Collective.
std::vector<AttentionRow> measure_attention(const comm::World& world, comm::Recorder& recorder, const AttentionCase& what, const Limits& limits);

/// On this rank alone, in turns.
AttentionRow measure_packed(const AttentionCase& what, int64_t documents, const Limits& limits);

/// The same of a window.
AttentionRow measure_window(const AttentionCase& what, int64_t window, const Limits& limits);

/// Of what a block of LLaMA (width 256, 4 heads of each kind, 704 inside) keeps between forward and backward of packed documents, the part that its attention
/// core keeps, queries, keys and values among it. On meta.
double share_of_attention(int64_t length, kernels::KernelChoice choice);

/// The rows as JSON, one a line, with all fields of their kind and the ratios.
std::string json_lines(const std::vector<AttentionRow>& rows);
std::vector<AttentionRow> read_attention_rows(const std::vector<std::string>& lines);
/// A table for each kind.
std::string format_table(const std::vector<AttentionRow>& rows);
/// Time over length, a line for each method and one for one device (SVG).
std::string plot(const std::vector<AttentionRow>& rows);

}  // namespace tessera::bench
