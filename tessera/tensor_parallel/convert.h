#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/nn/interceptor.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/layout_trace.h"

namespace tessera::tensor_parallel {

struct Overlap;
class OpenFeatures;

/// What the pieces of one parallelized module share. One rank, one thread.
struct Context {
  comm::Group group;
  int64_t sequence = 0;  ///< whole length of the sequence in the pass under way: who cuts a sequence writes it, for a part does not tell it
  std::shared_ptr<LayoutTrace> trace = nullptr;           ///< judges the pass under way, if it is for that
  std::shared_ptr<Overlap> overlap = nullptr;             ///< where collectives hide behind products (overlap.h)
  std::shared_ptr<OpenFeatures> open_features = nullptr;  ///< where a dropout may lie between two layers
  bool says_sequence = false;                             ///< the program does, of each pass (TensorParallel::set_sequence)
};

/// Dimension along which a tensor of tokens is cut for Sequence: 1 of [B, S, D] and of ids [B, S], 0 of ids [S] and of what is looked up for them, [S, D].
int64_t sequence_dim(const at::Tensor& x);

/// Throws ConfigError, naming the module, where x is no part of the sequence that is under way: two lengths are.
void require_part_of_sequence(const Context& context, const std::string& path, const at::Tensor& x);

/// x, which lives as `from` says, as `to` asks; differentiable, and in every pair backward is the conjugate. S elements in the whole tensor, n ranks, elements
/// sent per rank and pass:
///   Replicated -> Copied      nothing; backward an all-reduce, 2 (n-1)/n S
///   Replicated -> Sequence    a cut; backward an all-gather, (n-1)/n S; so does -> Features
///   Sequence   -> Copied      all-gather; backward a reduce-scatter; (n-1)/n S each
///   Sequence   -> Replicated  all-gather; backward a cut; so does Features ->
///   Partial    -> Replicated  all-reduce; backward nothing
///   Partial    -> Sequence    reduce-scatter; backward an all-gather
/// The same layout is the identity. `features`: size of the last dimension of the whole, cut by layout's rule; asked for by the pairs of Features only.
/// `path` names the module in refusals of a trace. Throws InternalError for a pair that has no meaning (see convertible).
at::Tensor convert(Context& context, const std::string& path, const at::Tensor& x, TensorLayout from, TensorLayout to, int64_t features = -1);

/// Where a tensor of the layout Sequence is cut, in the pass under way; of Features, with these shares of its last dimension, whose heads are those of `by`.
/// Nowhere of any other.
Cut cut_of(const Context& context, const at::Tensor& tensor, TensorLayout layout, const std::vector<FeatureShare>& shares = {}, const FeatureCut& by = {});

/// What `run` returns, where it is a style's own computation, whose first result lives as `layout`: a trace takes its word for it. Features: its shares.
template <class F>
nn::Values own(Context& context, const std::string& path, TensorLayout layout, F&& run, const std::vector<FeatureShare>& shares = {},
               const FeatureCut& by = {}) {
  if (!context.trace) return run();
  const LayoutTrace::Trusted trusted(context.trace);
  nn::Values outputs = run();
  outputs[0] = outputs[0].toTensor().alias();
  context.trace->gives(path, outputs[0].toTensor(), layout, cut_of(context, outputs[0].toTensor(), layout, shares, by));
  return outputs;
}

/// Whether convert() has a meaning for the pair.
bool convertible(TensorLayout from, TensorLayout to);

/// Where this rank's `output` of one of these layouts lives, for those who compare or refuse. Features: this rank's `share` of dimension `dim`.
nn::OutputLayout output_layout(const Context& context, const at::Tensor& output, TensorLayout layout, const FeatureShare& share = {}, int64_t dim = -1);

}  // namespace tessera::tensor_parallel
