#pragma once

namespace tessera::kernels {

/// A token's loss as the inner loops take it, lse = log(sum exp(logits)):
///   lse - (label * its label's logit + each * sum of its logits) + z * lse^2
/// and its gradient, of every logit: softmax * (1 + 2 z lse) - each, and `label` less at the label.
struct LossTerms {
  double label = 1, each = 0, z = 0;
};

}  // namespace tessera::kernels
