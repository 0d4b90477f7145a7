#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/layout/sequence_cut.h"

namespace tessera {

namespace context {
struct Context;
}

/// How attention reaches the keys and values of other ranks. Letters: n ranks, u = B (S/n) K D elements, one rank's keys; H query heads, K key-value heads.
/// What each sends per rank and call of a core, in elements:
///   Ring         K and V go round while the blocks are computed (arXiv:2310.01889).    forward 2(n-1)u    backward 2(n-1)u, and 2(n-1)u of fp32 dK, dV
///   AllGather    K and V are gathered before anything is computed (arXiv:2407.21783).  the same; memory for all keys while a core runs, and fewer calls
///   Ulysses      all-to-all from columns to heads and back (arXiv:2309.14509).         forward and backward (n-1)/n B (S/n) D (2H + 2K'), K' with copies
///   UlyssesRing  Ulysses inside neighbours, the ring across (arXiv:2405.07719).        the sum of both, each over its own ranks
///   RingFull     a ring of K for whole rows of scores, then one of V (arXiv:2105.13120): holds B H (S/n) S scores; to compare with.
enum class ContextMethod { Ring, RingFull, Ulysses, UlyssesRing, AllGather };
std::string_view to_string(ContextMethod method);  ///< as context.method names it

struct ContextParallelOptions {
  ContextMethod method = ContextMethod::Ring;
  int ulysses = 0;      ///< UlyssesRing: ranks of each inner group, neighbours in the group; divides it
  bool overlap = true;  ///< the next block is on its way while one is computed; the same traffic and bits without
};

/// Attention cores that attend to a sequence which is cut over a group; made by context_parallel. Destroying it detaches.
class ContextParallel {
 public:
  ContextParallel(comm::Group group, std::shared_ptr<context::Context> context, Attachment attached)
      : group_(std::move(group)), context_(std::move(context)), attached_(std::move(attached)) {}

  const comm::Group& group() const { return group_; }

  /// Says which columns the ranks hold in the calls that follow: q, k and v of this rank have cut.columns(rank) of them. The same on every rank. Throws
  /// ConfigError for a cut over another number of ranks, and where a rank would hold no column. Cores that are recomputed are called in backward, too: where
  /// micro-batches are cut differently, it is said again before their backward; a call that finds another one is refused.
  void set_cut(const SequenceCut& cut);

 private:
  comm::Group group_;
  std::shared_ptr<context::Context> context_;
  Attachment attached_;
};

/// Attaches to the attention cores (nn::AttentionCore) of `model` whose path matches `pattern`: what they are given from then on are this rank's columns of
/// q [B, S_r, H, D] and k, v [B, S_r, K, D], and what they give are the same columns of the whole sequence's attention. Positions are those of set_cut; what
/// is passed as `positions` is not looked at. `document_ids` [B, S_r] are those of this rank's columns; the ranks' are gathered, 8 bytes a
/// column, once for all cores that are given the same tensor one after the other in the pass that set_cut begins; from when one of them is called again, in
/// each call until the next set_cut. An nn::Dropout of `model`, and what else draws masks there already (nn::DrawsMasks), draws for [B, S_r, D] those of its
/// columns in the whole sequence, where no SampleScope says positions. Every rank must make the same calls in the same order, in backward too. Nothing S x S is
/// held but by RingFull; scores are merged by their log-sum-exp, and gradients of keys and values summed, in fp32.
///
/// ConfigError: a pattern that matches no module or one that is no attention core; heads that Ulysses cannot deal (naming how many ranks could have some),
/// at the first call; a call before set_cut, or with other columns than it said.
[[nodiscard]] std::unique_ptr<ContextParallel> context_parallel(torch::nn::Module& model, comm::Group group, const ContextParallelOptions& options,
                                                                const std::string& pattern);

/// The same for every holder.
template <class Contained>
[[nodiscard]] std::unique_ptr<ContextParallel> context_parallel(const torch::nn::ModuleHolder<Contained>& model, comm::Group group,
                                                                const ContextParallelOptions& options, const std::string& pattern) {
  return context_parallel(*model.ptr(), std::move(group), options, pattern);
}

}  // namespace tessera
