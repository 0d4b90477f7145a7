#pragma once

#include <vector>

#include "tessera/models/blocks.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/router.h"

namespace tessera {

/// A mixture of experts in the place of a block's feed-forward layer: x [B, S, D] -> the weighted sum of what the chosen experts make of each token, plus what
/// every token's shared expert makes of it.
///   router   weight [E, D]               which experts, and weights that sum to one (model.norm_topk)
///   experts  w1, w3 [E * F, D], w2 [E * D, F]   see nn::GroupedExperts
///   shared   w1, w3 [Fs, D], w2 [D, Fs]  with model.shared_ffn_dim (DeepSeekMoE, arXiv:2401.06066); `shared_gate` [1, D] scales it by sigmoid(gate x)
///   (Qwen-MoE)
/// Tokens are sorted by expert, and nothing is dropped unless moe.capacity_factor asks for it, and then in training alone. A token whose choices were all
/// dropped keeps its residual stream; so does padding (nn::SampleContext::padding), which no expert sees, but for the shared one.
class MixtureFeedForwardImpl : public nn::Module {
 public:
  explicit MixtureFeedForwardImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

  nn::RouterImpl& router() { return *router_; }
  /// What training adds: terms of the loss, and the capacity.
  void set_training(const MoeConfig& config);

 private:
  double capacity_factor_ = 0;
  nn::Router router_;
  nn::GroupedExperts experts_;
  GatedFeedForward shared_ = nullptr;
  nn::Linear shared_gate_ = nullptr;
};
TESSERA_MODULE(MixtureFeedForward);

/// Every mixture below `root`, in the order of blocks.
std::vector<MixtureFeedForwardImpl*> mixtures_of(torch::nn::Module& root);

/// How the configuration's router is built.
nn::RouterOptions router_options(const ModelConfig& config);

}  // namespace tessera
