#pragma once

#include <optional>

#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/vocabulary_parts.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Output layer and loss of a language model, one module that owns the weight, so that whatever shards or gathers it meets one module.
///   hidden [B, S, D];  weight [V, D]
///   without labels: logits [B, S, V] in the compute dtype
///   labels [B, S] int64 (-100: no target): the fp32 SUM of the cross-entropies; logits are never all held (kernels::linear_cross_entropy).
///   While training, with what set_loss says; in evaluation mode always the plain cross-entropy, so that losses of runs compare.
/// Outputs count as MemoryCategory::Outputs.
class LanguageModelHeadImpl : public Module {
 public:
  LanguageModelHeadImpl(int64_t dim, int64_t vocab_size);
  /// Shares `tied`, the token embedding's weight: registered here as well, so that it is one parameter with two names.
  explicit LanguageModelHeadImpl(at::Tensor tied);

  at::Tensor forward(const at::Tensor& hidden, const std::optional<at::Tensor>& labels = {});
  at::Tensor logits(const at::Tensor& hidden) { return call(*this, hidden); }                                      ///< through the chain
  at::Tensor loss_sum(const at::Tensor& hidden, const at::Tensor& labels) { return call(*this, hidden, labels); }  ///< through the chain
  void pretty_print(std::ostream& stream) const override;

  /// From here on `weight` holds some rows of the vocabulary, and `parts` knows those who hold the others: the loss is that of the whole, the gradient of
  /// hidden a term of the sum, and logits are those of the rows that are here.
  void set_parts(c10::intrusive_ptr<kernels::VocabularyParts> parts) noexcept { parts_ = std::move(parts); }

  /// Label smoothing and z-loss of the training loss; none until this is called. Throws ConfigError where they are out of range.
  void set_loss(const kernels::CrossEntropyOptions& loss);

  /// Computes the loss's gradients in backward, for engines that let several forwards run ahead: no gradient of the weight is then held by each of them.
  void compute_gradients_in_backward(bool in_backward) noexcept { in_backward_ = in_backward; }

  at::Tensor weight;

 private:
  kernels::CrossEntropyOptions loss_;
  bool in_backward_ = false;
  c10::intrusive_ptr<kernels::VocabularyParts> parts_;
};
TESSERA_MODULE(LanguageModelHead);

}  // namespace tessera::nn
