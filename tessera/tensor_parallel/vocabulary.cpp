#include "tessera/tensor_parallel/vocabulary.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/bitwise_or.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/cut_parameter.h"
#include "tessera/nn/parameter.h"

// Gathering logits would send the vocabulary's size for every token; the loss needs three numbers of them. Sums of exponentials are taken against each rank's
// own largest logit, and corrected when the largest of all is known; the logit of the target lies on one rank and is zero on the others, so a sum finds it. An
// id that lies elsewhere looks up some row here, and is masked: forward to zero, and so backward, where that row gets nothing.

namespace tessera::tensor_parallel {
namespace {

/// Rows of the vocabulary that `weight` holds, of how many; asked when it has been cut, before sharding cuts what this rank holds further.
struct Rows {
  int64_t first, size, total;
  explicit Rows(const at::Tensor& weight) : first(nn::slice_of(weight).boxes.at(0).offset[0]), size(weight.size(0)), total(nn::slice_of(weight).shape[0]) {}

  /// Of those that the ranks hold, the most: the rule deals the larger parts first.
  int64_t largest(int ranks) const { return chunk(total, ranks, 0).second; }
};

class Embedding : public nn::Interceptor {
 public:
  Embedding(std::shared_ptr<Context> context, const VocabParallelEmbedding& style, const Rows& rows)
      : context_(std::move(context)), style_(style), rows_(rows) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor ids = inputs[0].toTensor();
    require_known(ids, module.path());
    nn::Values outputs = own(*context_, module.path(), TensorLayout::Partial, [&]() -> nn::Values {
      const at::Tensor elsewhere = at::bitwise_or(ids < rows_.first, ids >= rows_.first + rows_.size);
      inputs[0] = (ids - rows_.first).masked_fill_(elsewhere, 0);
      return {next(std::move(inputs))[0].toTensor().masked_fill(elsewhere.unsqueeze(-1), 0)};
    });
    outputs[0] = convert(*context_, module.path(), outputs[0].toTensor(), TensorLayout::Partial, style_.output);
    return outputs;
  }

  std::optional<nn::OutputLayout> output_layout(const nn::Module&, const at::Tensor& output) const override {
    return tensor_parallel::output_layout(*context_, output, style_.output);
  }

 private:
  /// Each rank would take what none has for another's. A device would have to be waited for.
  void require_known(const at::Tensor& ids, const std::string& path) const {
    if (!ids.is_cpu() || ids.numel() == 0) return;
    const at::Tensor plain = ids.to(at::kLong).contiguous();  // itself, as a rule
    const auto [least, most] = std::minmax_element(plain.const_data_ptr<int64_t>(), plain.const_data_ptr<int64_t>() + plain.numel());
    const int64_t low = *least, high = *most;
    require(low >= 0 && high < rows_.total, "VocabParallelEmbedding of '", path, "': id ", low < 0 ? low : high, " is not in the vocabulary of ", rows_.total,
            " entries (0 to ", rows_.total - 1, ")");
  }

  std::shared_ptr<Context> context_;
  VocabParallelEmbedding style_;
  Rows rows_;
};

class Head : public nn::Interceptor {
 public:
  Head(std::shared_ptr<Context> context, const VocabParallelHead& style, const Rows& rows) : context_(std::move(context)), style_(style), rows_(rows) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const bool logits = inputs.size() == 1 || inputs[1].isNone();
    inputs[0] = convert(*context_, module.path(), inputs[0].toTensor(), style_.input, TensorLayout::Copied);
    nn::Values outputs = own(
        *context_, module.path(), logits ? TensorLayout::Features : TensorLayout::Replicated, [&] { return next(std::move(inputs)); },
        logits ? even_shares(rows_.total, context_->group.size()) : std::vector<FeatureShare>());
    if (logits) {
      outputs[0] = convert(*context_, module.path(), outputs[0].toTensor(), TensorLayout::Features, TensorLayout::Replicated, rows_.total);
    }
    return outputs;
  }

 private:
  std::shared_ptr<Context> context_;
  VocabParallelHead style_;
  Rows rows_;
};

/// The ranks of the group meet in three all-reduces.
class GroupParts : public kernels::VocabularyParts {
 public:
  GroupParts(comm::Group group, const Rows& rows) : VocabularyParts(rows.first, rows.total, rows.largest(group.size())), group_(std::move(group)) {}

  void meet(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target) override {
    const at::Tensor own = most.clone();
    comm::all_reduce(group_, most, comm::Op::Max);
    sum.mul_(own.sub_(most).exp_());
    comm::all_reduce(group_, sum);
    comm::all_reduce(group_, target);
  }

 private:
  comm::Group group_;
};

}  // namespace

void cut_vocabulary(const at::Tensor& weight, const comm::Group& group) {
  const int64_t rows = nn::slice_of(weight).shape.at(0);
  require(rows >= group.size(), "mesh.tp = ", group.size(), ": model.vocab_size = ", rows, " cannot be cut over more ranks than it has entries");
  const auto [begin, size] = chunk(rows, group.size(), group.rank());
  nn::cut_parameter(weight, 0, begin, size);
}

std::shared_ptr<nn::Interceptor> vocab_parallel_embedding(std::shared_ptr<Context> context, const VocabParallelEmbedding& style,
                                                          const nn::EmbeddingImpl& embedding) {
  return std::make_shared<Embedding>(std::move(context), style, Rows(embedding.weight));
}

std::shared_ptr<nn::Interceptor> vocab_parallel_head(std::shared_ptr<Context> context, const VocabParallelHead& style, nn::LanguageModelHeadImpl& head) {
  const Rows rows(head.weight);
  head.set_parts(c10::make_intrusive<GroupParts>(context->group, rows));
  return std::make_shared<Head>(std::move(context), style, rows);
}

}  // namespace tessera::tensor_parallel
