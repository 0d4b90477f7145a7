#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/nn/module.h"
#include "tessera/nn/sample_scope.h"

/// Which experts of a mixture a token takes, and with what weights.
///
/// Legend: T tokens, D features, E experts, K choices of a token.
namespace tessera::nn {

enum class RouterKind {
  Softmax,      ///< the K most probable experts of softmax(logits) (Mixtral, arXiv:2401.04088; Switch, arXiv:2101.03961)
  Sigmoid,      ///< the K largest of sigmoid(logits) + bias; the bias steers load and is not learnt by gradients (arXiv:2408.15664)
  ExpertChoice  ///< each expert takes its most probable tokens (arXiv:2202.09368): even load by construction, and a choice that sees later tokens
};

struct RouterOptions {
  int64_t dim = 0, experts = 0;
  int64_t per_token = 0;  ///< K; expert choice: how many experts take a token on average
  RouterKind kind = RouterKind::Softmax;
  bool normalize = true;  ///< weights of a token sum to one; else they are the chosen scores. Expert choice: always the scores

  /// Expert choice: how many of so many tokens each expert takes.
  int64_t tokens_each(int64_t tokens) const;
  /// Rows that all experts together have of so many tokens, where nothing is dropped.
  int64_t places(int64_t tokens) const { return kind == RouterKind::ExpertChoice ? experts * tokens_each(tokens) : tokens * per_token; }
};

/// Terms of the training loss. Of a layer and a micro-batch:
///   balance  E sum_e f_e P_e (Switch): f_e the share of choices that fall on expert e, P_e its mean probability; 1 where both are even
///   z        mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906)
/// Layers add up; a micro-batch counts by its share of the step's tokens, by SampleScope (outside of one, as in a plain loop whose loss is a sum over tokens,
/// by their number), so that it does not matter how micro-batches are dealt over ranks. Rows that a SampleContext calls padding are no tokens here.
struct RouterLosses {
  double balance = 0, z = 0;
};

/// The choice itself, apart from what its scores are made of: a module without parameters, "router.choice", so that whoever wants other choices (those of
/// another run, in a comparison) attaches there. scores [T, E] fp32 -> chosen int64 [T, K], entries 0 .. E - 1, or -1 for none; expert choice: [T, E].
/// What is computed again in backward is given the first choice (nn/decisions.h).
class RouterChoiceImpl : public Module {
 public:
  explicit RouterChoiceImpl(const RouterOptions& options) : options_(options) {}
  at::Tensor forward(const at::Tensor& scores);

 private:
  RouterOptions options_;
};
TESSERA_MODULE(RouterChoice);

/// x [T, D] -> weights [T, K] fp32, chosen [T, K] int64 (expert choice: [T, E]). `weight` [E, D]; logits, probabilities and weights are fp32 whatever the
/// compute dtype, for a rounding may change the choice. Padding (SampleContext::padding) chooses nothing, -1, takes no expert's place and is counted nowhere.
/// Kind Sigmoid has a buffer `bias` [E] fp32, which only balance() changes.
class RouterImpl : public Module {
 public:
  explicit RouterImpl(const RouterOptions& options);

  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x);
  bool reset_buffers() override;
  void pretty_print(std::ostream& stream) const override;

  const RouterOptions& options() const noexcept { return options_; }
  void set_losses(const RouterLosses& losses) noexcept { losses_ = losses; }
  /// Ranks that route other tokens of the same micro-batches (other columns of their sequences): what the terms are of is then summed over them, an all-reduce
  /// of E + 2 numbers a call in training. `states_valid`: whether this rank's SampleContext::valid_tokens are to be added; of those that state the same
  /// columns', one does.
  void set_peers(comm::Group peers, bool states_valid = true) {
    peers_ = std::move(peers);
    states_valid_ = states_valid;
  }

  /// Sums over the training forwards since it was last taken, fp64 [E + 4] on the weight's device: choices per expert, before any were dropped; tokens; the
  /// balance and the z term times tokens; choices that were dropped. What is computed again, and padding, in a micro-batch or a whole one, is not counted.
  /// Undefined before a first forward.
  const at::Tensor& statistics() const noexcept { return statistics_; }
  void clear_statistics();
  static constexpr int64_t kBehindLoad = 4;
  /// Adds what a capacity left of this forward's choices, by `counts` [E].
  void count_dropped(const at::Tensor& chosen, const at::Tensor& counts);

  /// The step of balancing without a loss: bias += rate * sign(mean load - load), of the whole step's load [E] (any dtype). Does nothing without a bias.
  void balance(const at::Tensor& load, double rate);

  at::Tensor weight, bias;

 private:
  bool counts() const;  ///< whether the forward that runs now is one to count
  at::Tensor with_losses(const at::Tensor& weights, const at::Tensor& logits, const at::Tensor& scores, const at::Tensor& chosen,
                         const SampleScope::Padding& padding);

  RouterOptions options_;
  RouterLosses losses_;
  comm::Group peers_ = comm::Group::self();
  bool states_valid_ = true;
  at::Tensor statistics_;
  RouterChoice choice_;
};
TESSERA_MODULE(Router);

}  // namespace tessera::nn
