#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"
#include "tessera/context_parallel/context.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/tiled_attention.h"

// Keys and values of all ranks are put in the order of the sequence, so that each run of a rank's queries meets them in two large tiles, however the sequence
// is cut. They are gathered once more in backward: kept, they would be n times what a rank holds of everything else. Gradients are summed in fp32.

namespace tessera::context {

namespace {

class AllGather : public Method {
 public:
  AllGather(comm::Group group, const Sequence& sequence)
      : group_(std::move(group)),
        cut_(sequence.cut()),
        tiles_(nn::attention_tiles(sequence.columns(cut_.runs[static_cast<size_t>(group_.rank())]), sequence.columns({{0, cut_.length}}), sequence.reach())) {}

  Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const override {
    const at::Tensor whole = gathered(k, v);
    nn::TiledAttention attention(q);
    attention.add(whole[0], whole[1], tiles_);
    const auto [output, log_sum_exp] = attention.finish();
    return {.output = output, .kept = log_sum_exp};
  }

  Gradients backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Result& forward) const override {
    const at::Tensor whole = gathered(k, v);
    const at::Tensor sums = at::zeros(whole.sizes(), whole.options().dtype(at::kFloat));
    nn::TiledAttentionBackward attention(grad_output, q, {.output = forward.output, .log_sum_exp = forward.kept});
    attention.add(whole[0], whole[1], tiles_, sums[0], sums[1]);
    std::vector<at::Tensor> terms;
    for (int rank = 0; rank < group_.size(); ++rank) terms.push_back(columns_of(sums, rank));
    const at::Tensor own = at::empty(terms[static_cast<size_t>(group_.rank())].sizes(), sums.options());
    comm::reduce_scatter_uneven(group_, own, terms);
    return {.q = attention.finish(), .k = own[0].to(k.scalar_type()), .v = own[1].to(v.scalar_type())};
  }

 private:
  /// [2, B, S, K, D], in the sequence's order.
  at::Tensor gathered(const at::Tensor& k, const at::Tensor& v) const {
    const MemoryScope scratch(MemoryCategory::Comm);
    const at::Tensor own = at::stack({k, v});
    std::vector<at::Tensor> parts;
    auto shape = own.sizes().vec();
    for (int rank = 0; rank < group_.size(); ++rank) {
      shape[2] = cut_.columns(rank);
      parts.push_back(at::empty(shape, own.options()));
    }
    comm::all_gather_uneven(group_, parts, own);
    shape[2] = cut_.length;
    const at::Tensor whole = at::empty(shape, own.options());
    for (int rank = 0; rank < group_.size(); ++rank) {
      int64_t column = 0;
      for (const auto& [begin, size] : cut_.runs[static_cast<size_t>(rank)]) {
        whole.narrow(2, begin, size).copy_(parts[static_cast<size_t>(rank)].narrow(2, column, size));
        column += size;
      }
    }
    return whole;
  }

  at::Tensor columns_of(const at::Tensor& whole, int rank) const {
    std::vector<at::Tensor> runs;
    for (const auto& [begin, size] : cut_.runs[static_cast<size_t>(rank)]) runs.push_back(whole.narrow(2, begin, size));
    return at::cat(runs, 2);
  }

  comm::Group group_;
  SequenceCut cut_;
  std::vector<nn::AttentionTile> tiles_;
};

}  // namespace

std::shared_ptr<const Method> all_gather_method(comm::Group group, const Sequence& sequence) { return std::make_shared<AllGather>(std::move(group), sequence); }

}  // namespace tessera::context
