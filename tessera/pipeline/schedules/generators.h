#pragma once

#include "tessera/pipeline/schedules/refused_request.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"

/// The schedules of the literature, computation alone: pure functions of p ranks, m micro-batches and v chunks a rank, each at least 1. A generator throws
/// RefusedRequest outside its domain, with the rule and the next value that works; fewer micro-batches than stages work unless a domain says otherwise.
///
/// Bubbles are idle shares of the makespan where F = B = W and nothing is sent. Peaks are activations of rank i, in micro-batches of its whole share (a chunk
/// counts 1/v), held from forward until the gradients of weights are done.
namespace tessera::schedules {

/// One micro-batch after the other through all stages: model parallelism without a pipeline. Bubble (p-1)/p, peak 1.
Schedule naive(int ranks, int micro_batches, int chunks = 1);

/// All forwards, then all backwards (arXiv:1811.06965), these in the order of the forwards. Bubble (p-1)/(m+p-1), peak m.
Schedule gpipe(int ranks, int micro_batches);

/// A forward and a backward in turns, p-1-i forwards ahead of them (PipeDream-Flush, arXiv:2006.09503; arXiv:2104.04473). Bubble as GPipe, peak min(m, p-i).
Schedule one_f_one_b(int ranks, int micro_batches);

/// The order of 1F1B, without a flush: each stage updates its weights behind every backward, and a micro-batch's backward computes with the version that its
/// forward met there (PipeDream, SOSP 2019). Peak min(m, p-i), and as many versions of the weights. With `vertical_sync` a micro-batch uses on every stage the
/// version that it met on the first, and every stage holds up to p.
Schedule pipedream(int ranks, int micro_batches, bool vertical_sync = false);

/// PipeDream-2BW (arXiv:2006.09503): gradients are summed over `per_update` micro-batches (0: the fewest that it takes), and a group of them uses the version
/// that lacks the newest update, on every stage. Two versions. Domain: per_update >= min(p, m); the last group may be smaller.
Schedule pipedream_2bw(int ranks, int micro_batches, int per_update = 0);

/// Either of these with the updates of `stage` as late as they may be: each right before the first action that computes with the version it makes, the rest at
/// the end. For a stage whose gradient needs a term of an earlier stage, whose backward comes later: tied embeddings on the last one
/// (docs/pipeline-schedules.md says where nobody waits for it). The stage then holds one version, and in place of the others the gradients of updates to come.
Schedule with_late_updates(Schedule schedule, int stage);

/// 1F1B over v chunks a rank, dealt in a loop (arXiv:2104.04473): `group` micro-batches pass a chunk before the next chunk follows. Bubble (p-1)/(v m+p-1)
/// where p divides m, peak min(v m, 2(p-1-i)+(v-1)group+1)/v. Domain: with group = 0, PyTorch's rule: m is a multiple of the rounds, max(1, m/p rounded down),
/// of m/rounds each; with a group, Megatron's: group >= p, and what the last round has left is none or at least p.
Schedule interleaved(int ranks, int micro_batches, int chunks, int group = 0);

/// GPipe over v chunks a rank: all micro-batches pass a chunk before the next one follows, so that a chunk's parameters are gathered, and its gradients
/// reduced, once a step (arXiv:2211.05953). Bubble (p-1)/(v m+p-1) where m >= p, peak m.
Schedule breadth_first(int ranks, int micro_batches, int chunks);

/// Zero bubble (arXiv:2401.10241): backwards cut in two, and 1F1B's gaps filled with the gradients of weights, which lag i micro-batches behind. Bubble
/// (p-1)/(3m+p-1), peak at most p.
Schedule zb_h1(int ranks, int micro_batches);

/// The same with 2(p-1-i) forwards ahead and gradients of weights that lag 2i behind: no bubble in any rank's span where m >= 2p-1. Peak at most 2p-1.
Schedule zb_h2(int ranks, int micro_batches);

/// Two chunks a rank, down and up, so that the last stage's backward begins on rank 0: no bubble in any rank's span where m >= 2p - 1 and F = B = W, hence
/// (p-1)/(6m+p-1) of the makespan. Peak at most p. Domain: v = 2.
Schedule zb_v(int ranks, int micro_batches);

/// DeepSeek's DualPipe, cut in half (arXiv:2412.19437): two chunks a rank, down and up, and in the steady state a forward of one with a backward of the other
/// at once. Idle a rank: (p-1)(F&B + B - 3W), where B is the whole backward and F&B what both cost together. Peak at most 2p+1 chunks. Domain: v = 2, m >= 2p.
Schedule dualpipev(int ranks, int micro_batches);

/// Two chunks a rank, down and up, repeated from a block that keeps activations for as short as they can be (arXiv:2405.15362): peak about a third of 1F1B's
/// for v_min, half of it for v_half, with bubbles of about 2(p-1)/3 and (p-1)/2 micro-batches. Domain: v = 2.
Schedule v_min(int ranks, int micro_batches);
Schedule v_half(int ranks, int micro_batches);

/// What a rank has room for.
struct MemoryLimit {
  int micro_batches = 0;  ///< whose activations it may hold
  double kept = 1;        ///< share of a micro-batch's activations that is left between its backward of inputs and the gradients of its weights
};

/// Made for measured costs and a limit of activations by list scheduling: the best of some hundred simulated orders by the span of the longest rank
/// (arXiv:2401.10241, section 3; with limits of p and 2p it calls the results ZB-1p and ZB-2p). Never worse than ZB-H1 and ZB-H2 where the limit allows them.
/// One stage a rank. Domain: a limit of at least 1, 0 < kept <= 1.
/// Its name, and that of refusals, is `name`.
Schedule automatic(int ranks, int micro_batches, const Costs& costs, const MemoryLimit& limit, const char* name = "zb_auto");

}  // namespace tessera::schedules
