#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/nn/interceptor.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/convert.h"

/// Column- and row-wise products whose communication hides behind them: both are taken apart into the ranks' parts of the sequence, and a part is on its way
/// while another is computed (Wang et al., ASPLOS 2023; arXiv:2105.05720). Same traffic as without, sums in the order of the ring.
///
/// Notation: n ranks, x [B, S, I], S/n positions of a part (uneven parts and empty ones are fine), O features of a layer on this rank.
namespace tessera::tensor_parallel {

/// What column-wise layers that take the same input compute.
struct ColumnProducts {
  at::Tensor whole;                  ///< the input [B, S, I], for whatever else uses it
  std::vector<at::Tensor> products;  ///< of each layer, [B, S, O]
};

/// Products of `linears`, which are cut along their output features, with x: this rank's part (from = Sequence) or the whole (Replicated).
///   Sequence    forward: a ring brings the parts, own first, and each is multiplied with all layers as it comes. Backward: the parts of the input gradient,
///               own last, are summed on a ring, and between its steps the weights' gradients grow by the parts of x, which come on another ring, or lie
///               there with `keep_gathered` (S elements kept in place of S/n). Sent per rank: (n-1)/n S I forward, 2 (n-1)/n S I backward, half with
///               keep_gathered. Scratch: two parts forward; backward five, and never the whole x.
///   Replicated  forward: nothing is sent. Backward: the input gradient is reduced in pieces while the next ones, and then the weights' gradients, are
///               computed: 2 (n-1)/n S I.
/// Differentiable once. All linears compute in x's dtype (can_overlap). Where gradients of weights are left for later (nn/weight_gradients.h), the parts of x
/// travel then.
ColumnProducts multiply_columns(const Context& context, const at::Tensor& x, TensorLayout from, const std::vector<nn::LinearImpl*>& linears,
                                bool keep_gathered = false);

/// x [..., I/n] weight^T, without bias, added up over the ranks.
///   to = Sequence    forward: computes and sums on a ring the part of the rank before first and its own last: (n-1)/n S O. Backward: the gradient's parts
///                    come on a ring, and each is multiplied for x and for the weight as it comes: the same again. Scratch: three parts, two backward.
///   to = Replicated  forward: reduces pieces of rows while the next are computed: 2 (n-1)/n S O. Backward: nothing is sent.
/// A weight's gradient that is left for later keeps the gathered gradient, S O elements, as without overlap.
at::Tensor multiply_rows(Context& context, const at::Tensor& x, nn::LinearImpl& linear, TensorLayout to);

/// Whether the functions above serve this layer with this input; else it computes without them. `features`: of its output, on this rank. They do not where
/// it is not (or not yet) there in that size, where its dtype or x's differ, for fp8, whose scale is known once all of x is there, for a layer that has to be
/// called (low-rank terms, weights in fewer bits), and for a part of a sequence that is not [B, S, I].
bool can_overlap(const nn::LinearImpl& linear, const at::Tensor& x, TensorLayout sequence_side, int64_t features);

/// What the overlapped layers of one parallelized module share (Context::overlap).
struct Overlap {
  /// While PrepareInput's module runs: what was computed for its layers.
  struct Prepared {
    at::Tensor whole;
    int64_t version = 0;  ///< when products were made of it
    std::map<const nn::Module*, at::Tensor> products;
    Prepared* outer;
  };
  std::map<const nn::Module*, int64_t> features{};  ///< column-wise layers, and how many of its features a rank holds
  Prepared* prepared = nullptr;

  /// The product that was prepared for the layer, if `x` is what it was prepared of; else undefined.
  at::Tensor take(const nn::Module& layer, const at::Tensor& x);
};

/// PrepareInput whose `layers` are multiplied while their input is gathered. `plain`: the same without overlap, for calls where can_overlap says no.
std::shared_ptr<nn::Interceptor> prepare_products(std::shared_ptr<Context> context, const PrepareInput& style, std::vector<nn::LinearImpl*> layers,
                                                  std::shared_ptr<nn::Interceptor> plain);

}  // namespace tessera::tensor_parallel
