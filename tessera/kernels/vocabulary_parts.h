#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

namespace tessera::kernels {

/// Where this process holds some columns of the logits and others hold the rest (a vocabulary cut over ranks): which they are, and how what is known of
/// rows meets. Kept by the operator for the length of a forward pass.
class VocabularyParts : public torch::CustomClassHolder {
 public:
  /// `largest`: see below; 0: not known, and then all of `total` is room enough.
  VocabularyParts(int64_t first, int64_t total, int64_t largest = 0) : first(first), total(total), largest(largest > 0 ? largest : total) {}

  const int64_t first;    ///< the column of the whole that is column 0 here
  const int64_t total;    ///< columns of the whole
  const int64_t largest;  ///< columns of the largest part: chunks of tokens follow from it, so that all parts meet equally often

  /// Makes the statistics of some rows, fp32 [T] each, those of all columns, in place:
  ///   most    largest logit
  ///   sum     of exp(logit - most)
  ///   target  the logit that the row's target expects, this part's term of it: its label's logit, 0 where another part holds it; with label smoothing
  ///           (1 - eps) of that and eps / total of the sum of the logits
  virtual void meet(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target) = 0;
};

}  // namespace tessera::kernels
