#include "tessera/verify/routing.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/ops/gather.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>

#include "tessera/kernels/consecutive.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/router.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {

namespace {

/// By which both sides name a call; nothing where nobody listens: outside of the samples, and where a call is made again in backward.
class ChoiceCalls {
 public:
  explicit ChoiceCalls(SampleRange samples) : samples_(samples) {}

  std::optional<OutputKey> next(const nn::Module& module) {
    const int64_t sample = nn::SampleScope::current().first_sample;
    if (sample < samples_.begin || sample >= samples_.end || torch::autograd::get_current_node() != nullptr) return std::nullopt;
    return OutputKey{.backward = false, .module = module.path(), .first_sample = sample, .call = calls_[{module.path(), sample}]++};
  }

 private:
  SampleRange samples_;
  std::map<std::pair<std::string, int64_t>, int64_t> calls_;
};

/// Where the columns that `tokens` tokens have of the micro-batch's `rows` lie in these; undefined: they are all.
at::Tensor positions_of(int64_t tokens, int64_t rows) {
  const nn::SampleContext& context = nn::SampleScope::current();
  const int64_t columns = tokens / rows, first = context.first_column;
  if (context.positions.defined()) return context.positions.narrow(0, first, columns);
  return context.columns ? kernels::consecutive(first, columns, at::kCPU) : at::Tensor();  // a row may have several samples: seq_len says nothing of it
}

class ChoiceRecorder : public nn::Interceptor {
 public:
  ChoiceRecorder(SampleRange samples, int64_t rows, RecordedChoices& choices) : calls_(samples), rows_(rows), choices_(choices) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const auto key = calls_.next(module);
    nn::Values outputs = next(std::move(inputs));
    const at::Tensor& chosen = outputs.at(0).toTensor();
    if (key) choices_[*key] = {chosen, positions_of(chosen.size(0), rows_)};
    return outputs;
  }

 private:
  ChoiceCalls calls_;
  int64_t rows_;
  RecordedChoices& choices_;
};

/// By how much the scores of what one would choose exceed those of what was chosen, place by place of the ranking along `dim`; a place without an expert
/// scores nothing.
at::Tensor given_up_by(const at::Tensor& scores, const at::Tensor& own, const at::Tensor& taken, int64_t dim) {
  const auto ranked = [&](const at::Tensor& chosen) {
    const at::Tensor score = scores.gather(1, chosen.clamp_min(0)).masked_fill(chosen.lt(0), -1e30);
    return std::get<0>(score.sort(dim, /*descending=*/true));
  };
  const at::Tensor a = ranked(own), b = ranked(taken);
  return (a - b).abs().masked_fill(a.lt(-1e29).logical_and(b.lt(-1e29)), 0);
}

class ChoiceReplayer : public nn::Interceptor {
 public:
  ChoiceReplayer(SampleRange samples, std::vector<RecordedChoices*> ranks, RoutingComparison& compared)
      : calls_(samples), ranks_(std::move(ranks)), compared_(compared) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    const auto key = calls_.next(module);
    const at::Tensor scores = inputs.at(0).toTensor();
    const at::Tensor own = next(std::move(inputs)).at(0).toTensor();
    if (!key) return {own};
    const at::Tensor taken = taken_by_ranks(*key, own);
    // Of padding the router takes no choice.
    const at::Tensor padding = nn::SampleScope::padding(own.size(0)).rows;
    const at::Tensor tokens = padding.defined() ? padding.logical_not().nonzero().view({-1}) : at::Tensor();
    const auto of_tokens = [&](const at::Tensor& rows) { return tokens.defined() ? rows.index_select(0, tokens) : rows; };
    if (!taken.defined()) {
      compared_.unseen += of_tokens(own).size(0);
      return {own};
    }
    compare(key->module, of_tokens(scores), of_tokens(own), of_tokens(taken));
    return {taken};
  }

 private:
  void compare(const std::string& router, const at::Tensor& scores, const at::Tensor& own, const at::Tensor& taken) {
    compared_.tokens += own.size(0);
    if (own.numel() == 0) return;
    const bool by_expert = own.size(1) == scores.size(1) && own.lt(0).any().item<bool>();
    const int64_t dim = by_expert ? 0 : 1;
    GivenUp& sum = compared_.given_up[router];
    sum.spread += (scores.amax(dim) - scores.amin(dim)).sum(at::kDouble).item<double>();
    const int64_t flipped = own.ne(taken).any(1).sum().item<int64_t>();
    compared_.flipped += flipped;
    if (flipped == 0) return;
    const at::Tensor given_up = given_up_by(scores, own, taken, dim);
    const at::Tensor largest = scores.abs().amax(dim, /*keepdim=*/true).clamp_max(1);
    compared_.margin = std::max(compared_.margin, given_up.div(largest).max().item<double>());
    const double places = static_cast<double>(own.ge(0).sum().item<int64_t>()) / static_cast<double>(own.size(1 - dim));
    sum.scores += given_up.sum(at::kDouble).item<double>() / places;
  }

  /// In the form of `own` [rows * columns, K]; undefined where no rank made the call. Ranks that have columns of it have a part each, or the same one
  /// (mesh.tp).
  at::Tensor taken_by_ranks(const OutputKey& key, const at::Tensor& own) const {
    at::Tensor put_together, known;  // the other: bool [columns]
    for (const RecordedChoices* rank : ranks_) {
      const auto found = rank->find(key);
      if (found == rank->end()) continue;
      const at::Tensor chosen = found->second.chosen.to(own.device());  // from that rank's
      const at::Tensor positions = found->second.positions.defined() ? found->second.positions.to(own.device()) : at::Tensor();
      if (!positions.defined() && chosen.sizes() == own.sizes()) return chosen;
      if (!positions.defined() || positions.numel() == 0) continue;
      const int64_t rows = chosen.size(0) / positions.numel();
      if (!put_together.defined()) {
        put_together = own.clone();
        known = at::zeros({own.size(0) / rows}, own.options().dtype(at::kBool));
      }
      put_together.view({rows, -1, own.size(1)}).index_copy_(1, positions, chosen.view({rows, -1, own.size(1)}));
      known.index_fill_(0, positions, true);
    }
    return put_together.defined() && known.all().item<bool>() ? put_together : at::Tensor();
  }

  ChoiceCalls calls_;
  std::vector<RecordedChoices*> ranks_;
  RoutingComparison& compared_;
};

template <class Make>
Attachment attach_to_choices(torch::nn::Module& root, const Make& make) {
  Attachment attached;
  for (const auto& module : root.modules()) {
    if (auto* choice = dynamic_cast<nn::RouterChoiceImpl*>(module.get())) attached.add(nn::attach(*choice, make()));
  }
  return attached;
}

}  // namespace

Attachment record_choices(torch::nn::Module& root, SampleRange samples, int64_t rows, RecordedChoices& choices) {
  return attach_to_choices(root, [&] { return std::make_shared<ChoiceRecorder>(samples, rows, choices); });
}

Attachment replay_choices(torch::nn::Module& root, SampleRange samples, std::vector<RecordedChoices*> ranks, RoutingComparison& compared) {
  return attach_to_choices(root, [&] { return std::make_shared<ChoiceReplayer>(samples, ranks, compared); });
}

}  // namespace tessera
