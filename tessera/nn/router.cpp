#include "tessera/nn/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/auxiliary_loss.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/decisions.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/saved_tensors.h"

// The choice has no gradient; the scores of what was chosen have one, through the weights with which the experts' outputs are added up. Terms that even the
// load out act on all scores. They cannot travel with the output, for the next layers know nothing of them: their gradient joins that of the weights
// (nn/auxiliary_loss.h), and their values are summed up for who reports them.

namespace tessera::nn {

int64_t RouterOptions::tokens_each(int64_t tokens) const { return std::min(tokens, (tokens * per_token + experts - 1) / experts); }

at::Tensor RouterChoiceImpl::forward(const at::Tensor& scores) {
  if (bypassed(*this)) return call(*this, scores);
  return Decisions::make([&] {
    if (options_.kind != RouterKind::ExpertChoice) return kernels::choose_experts(scores, options_.per_token);
    // An expert takes its share of what are tokens; where nothing is, the router takes back what it chose.
    const int64_t tokens = scores.size(0) - SampleScope::padding(scores.size(0)).on_host("what an expert chooses (expert_choice)");
    return kernels::choose_tokens(scores, std::max<int64_t>(1, options_.tokens_each(tokens)));
  });
}

RouterImpl::RouterImpl(const RouterOptions& options) : options_(options), choice_(options) {
  require(options.dim >= 1 && options.experts >= 1, "Router: dim = ", options.dim, " and experts = ", options.experts, " must be positive");
  require(options.per_token >= 1 && options.per_token <= options.experts, "Router: per_token = ", options.per_token,
          ": expected 1 to experts = ", options.experts);
  weight = register_parameter("weight", at::empty({options.experts, options.dim}));
  const double bound = 1.0 / std::sqrt(static_cast<double>(options.dim));
  set_init(weight, InitRule::uniform(-bound, bound));
  torch::nn::init::uniform_(weight, -bound, bound);
  if (options.kind == RouterKind::Sigmoid) bias = register_buffer("bias", at::zeros({options.experts}));
  register_module("choice", choice_);
}

bool RouterImpl::reset_buffers() {
  if (bias.defined()) bias.zero_();
  return true;
}

std::tuple<at::Tensor, at::Tensor> RouterImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  require(x.dim() == 2 && x.size(1) == options_.dim, "Router: expects tokens [T, ", options_.dim, "], not a tensor of shape ", x.sizes());
  const at::Tensor logits = project(cast(x, at::kFloat), cast(in_use(weight), at::kFloat));
  const at::Tensor scores = options_.kind == RouterKind::Sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1);
  const SampleScope::Padding padding = SampleScope::padding(x.size(0));
  at::Tensor ranked = bias.defined() ? scores.detach() + bias : scores.detach();
  if (padding.any() && options_.kind == RouterKind::ExpertChoice) {
    ranked = ranked.masked_fill(padding.rows.unsqueeze(1), -std::numeric_limits<double>::infinity());
  }
  const at::Tensor chosen = choice_(ranked);
  at::Tensor weights = scores;
  if (options_.kind != RouterKind::ExpertChoice) {
    weights = scores.gather(1, chosen);
    // One weight alone is 1, whatever its score: so is its gradient nothing, and not a rounding of nothing.
    if (options_.normalize) weights = options_.per_token == 1 ? weights * 0 + 1 : weights / weights.sum(-1, /*keepdim=*/true);
  }
  const at::Tensor taken = padding.any() ? chosen.masked_fill(padding.rows.unsqueeze(1), -1) : chosen;
  return {is_training() && at::GradMode::is_enabled() ? with_losses(weights, logits, scores, taken, padding) : weights, taken};
}

/// Both terms are means over the micro-batch's tokens, wherever they are: here the sums of those that are here, divided by the number of all. The load that
/// they are weighed by has no gradient, so it alone has to meet.
at::Tensor RouterImpl::with_losses(const at::Tensor& weights, const at::Tensor& logits, const at::Tensor& scores, const at::Tensor& chosen,
                                   const SampleScope::Padding& padding) {
  const int64_t tokens = logits.size(0), experts = options_.experts;
  const SampleContext& context = SampleScope::current();
  if (peers_.size() == 1 && (tokens == 0 || context.valid_tokens == int64_t{0})) return weights;
  const auto plain = logits.options().requires_grad(false);
  // One entry more takes what chose nothing. Counts are whole numbers, so no order of addition changes them.
  const at::Tensor places = at::remainder(chosen.reshape({-1}), experts + 1);
  const at::Tensor load = at::zeros({experts + 1}, plain).scatter_add_(0, places, at::ones({places.size(0)}, plain)).narrow(0, 0, experts);
  const at::Tensor here =
      padding.size ? at::full({1}, static_cast<double>(tokens - *padding.size), plain) : (tokens - padding.rows.sum()).to(at::kFloat).reshape({1});
  const at::Tensor valid = states_valid_ && !context.valid_tokens ? here : at::full({1}, states_valid_ ? static_cast<double>(*context.valid_tokens) : 0, plain);
  const at::Tensor all = at::cat({load, here, valid});
  if (peers_.size() > 1) {
    const std::string place = path() + ".load";  // which the site does not copy
    const comm::CallSite site(place);
    comm::all_reduce(peers_, all);
  }
  const at::Tensor all_load = all.narrow(0, 0, experts), all_valid = all.select(0, experts + 1);
  at::Tensor all_tokens = all.select(0, experts);
  if (padding.any()) all_tokens = all_tokens.clamp_min(1);  // of nothing else the sums are zero
  const auto of_tokens = [&](const at::Tensor& values) {
    return padding.any() ? values.masked_fill(values.dim() == 2 ? padding.rows.unsqueeze(1) : padding.rows, 0) : values;
  };
  // Of an even load the term is a constant, and its gradient would be the rounding of a difference of large numbers.
  const bool balances = options_.kind != RouterKind::ExpertChoice && options_.per_token < experts;
  const at::Tensor shares = options_.kind == RouterKind::Sigmoid ? scores / scores.sum(-1, /*keepdim=*/true) : scores;
  const double scale = static_cast<double>(experts) / static_cast<double>(options_.per_token);
  const at::Tensor balance = (of_tokens(shares).sum(0) / all_tokens * (all_load / all_tokens)).sum() * scale;
  const at::Tensor z = of_tokens(at::logsumexp(logits, -1)).square().sum() / all_tokens;
  if (counts()) {
    const at::NoGradGuard no_grad;
    const NotRepeated counting;
    const MemoryScope scope(MemoryCategory::Other);
    const auto options = logits.options().dtype(at::kDouble).requires_grad(false);
    if (!statistics_.defined() || statistics_.device() != logits.device()) statistics_ = at::zeros({experts + kBehindLoad}, options);
    const at::Tensor live = all_valid.gt(0);  // a micro-batch of padding is not counted
    statistics_.narrow(0, 0, experts).add_(load.to(at::kDouble) * live);
    statistics_.narrow(0, experts, 1).add_(here.to(at::kDouble) * live);
    statistics_.narrow(0, experts + 1, 2).add_(at::stack({balance, z}).to(at::kDouble) * all_tokens * live);
  }
  at::Tensor loss;
  if (balances && losses_.balance > 0) loss = balance * losses_.balance;
  if (losses_.z > 0) loss = loss.defined() ? loss + z * losses_.z : z * losses_.z;
  return loss.defined() ? with_auxiliary_loss(weights, loss * all_valid, context.expected_gradient) : weights;
}

bool RouterImpl::counts() const { return is_training() && !recomputing() && (peers_.size() > 1 || SampleScope::current().valid_tokens != int64_t{0}); }

void RouterImpl::count_dropped(const at::Tensor& chosen, const at::Tensor& counts) {
  if (!this->counts() || !statistics_.defined() || !at::GradMode::is_enabled()) return;
  const at::NoGradGuard no_grad;
  const NotRepeated counting;
  statistics_.narrow(0, options_.experts + kBehindLoad - 1, 1).add_(chosen.ge(0).sum() - counts.sum());
}

void RouterImpl::clear_statistics() {
  if (statistics_.defined()) statistics_.zero_();
}

void RouterImpl::balance(const at::Tensor& load, double rate) {
  if (!bias.defined()) return;
  require(load.numel() == options_.experts, "Router: a load of ", load.numel(), " experts for ", options_.experts);
  const at::NoGradGuard no_grad;
  const at::Tensor counted = load.to(bias.options().dtype(at::kDouble));
  bias.add_((counted.mean() - counted).sign().to(bias.scalar_type()), rate);
}

void RouterImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::Router(dim=" << options_.dim << ", experts=" << options_.experts << ", per_token=" << options_.per_token << ")";
}

}  // namespace tessera::nn
