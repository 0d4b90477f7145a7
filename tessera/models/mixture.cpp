#include "tessera/models/mixture.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/sigmoid.h>

#include "tessera/core/error.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/meanwhile.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {

namespace {

nn::RouterKind router_kind(const std::string& name) {
  if (name == "sigmoid") return nn::RouterKind::Sigmoid;
  return name == "expert_choice" ? nn::RouterKind::ExpertChoice : nn::RouterKind::Softmax;
}

}  // namespace

nn::RouterOptions router_options(const ModelConfig& config) {
  return {
      .dim = config.dim, .experts = config.experts, .per_token = config.experts_per_token, .kind = router_kind(config.router), .normalize = config.norm_topk};
}

MixtureFeedForwardImpl::MixtureFeedForwardImpl(const ModelConfig& config)
    : router_(router_options(config)), experts_(config.experts, config.dim, config.ffn_dim.value_or(0), kInitStd, residual_std(config.layers)) {
  nn::set_init(router_->weight, nn::InitRule::normal(0, kInitStd));
  register_module("router", router_);
  register_module("experts", experts_);
  if (config.shared_ffn_dim == 0) return;
  ModelConfig shared = config;
  shared.ffn_dim = config.shared_ffn_dim;
  shared_ = register_module("shared", GatedFeedForward(shared));
  if (!config.shared_gate) return;
  shared_gate_ = register_module("shared_gate", nn::Linear(nn::LinearOptions(config.dim, 1).bias(false)));
  set_init_normal(*shared_gate_, kInitStd);
}

void MixtureFeedForwardImpl::set_training(const MoeConfig& config) {
  capacity_factor_ = config.capacity_factor;
  router_->set_losses({.balance = config.balance_loss, .z = config.z_loss});
}

at::Tensor MixtureFeedForwardImpl::forward(const at::Tensor& x) {
  if (nn::bypassed(*this)) return nn::call(*this, x);
  const nn::RouterOptions& options = router_->options();
  const at::Tensor tokens = x.reshape({-1, x.size(-1)});
  const auto [weights, chosen] = router_(tokens);
  kernels::DispatchLimits limits{.places = options.places(tokens.size(0))};
  if (capacity_factor_ > 0 && is_training() && options.kind != nn::RouterKind::ExpertChoice) {
    const auto capacity_of = [&](int64_t count) {
      const double even = static_cast<double>(options.places(count)) / static_cast<double>(options.experts);
      constexpr double kOfRounding = 1 - 1e-12;  // 1.1 * 50 is a little more than 55, and no reason for another place
      return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(capacity_factor_ * even * kOfRounding)));
    };
    // Padding leaves no room to tokens that they would not have without it; only memory is that of rows that may all be tokens.
    limits.capacity = capacity_of(tokens.size(0) - nn::SampleScope::padding(tokens.size(0)).on_host("moe.capacity_factor"));
    limits.places = std::min(*limits.places, capacity_of(tokens.size(0)) * options.experts);
  }
  const kernels::Dispatch where = kernels::dispatch(chosen, options.experts, limits);
  if (limits.capacity) router_->count_dropped(chosen, where.counts);
  const at::Tensor rows = kernels::gather_rows(tokens, where);
  if (!shared_) return kernels::combine_rows(experts_(rows, where.counts), weights, where).view(x.sizes());
  // Every token's expert has what it needs while rows are on their way to theirs.
  nn::Meanwhile shared([&] {
    const at::Tensor all = shared_(x);
    return shared_gate_ ? all * at::sigmoid(shared_gate_(x)) : all;
  });
  const at::Tensor routed = kernels::combine_rows(experts_(rows, where.counts), weights, where).view(x.sizes());
  return routed + shared.value();
}

std::vector<MixtureFeedForwardImpl*> mixtures_of(torch::nn::Module& root) {
  std::vector<MixtureFeedForwardImpl*> mixtures;
  for (const auto& module : root.modules()) {
    if (auto* mixture = dynamic_cast<MixtureFeedForwardImpl*>(module.get())) mixtures.push_back(mixture);
  }
  return mixtures;
}

}  // namespace tessera
