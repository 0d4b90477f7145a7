#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct LionOptions {
  double beta1 = 0.9, beta2 = 0.99;
};

/// Lion (Chen et al., arXiv:2302.06675): the sign of an average of the gradient, so every element moves by lr, and there is one average to keep.
///   p -= lr * weight_decay * p;  p -= lr * sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
/// The paper takes a third to a tenth of AdamW's learning rate, and as much more weight decay.
/// Memory: one tensor of the parameter's size and dtype. Traffic: 20 bytes an fp32 element and step, one pass.
class Lion : public Optimizer {
 public:
  explicit Lion(std::vector<ParameterGroup> groups, LionOptions options = {});

  std::string kind() const override { return "lion"; }
  std::vector<StateTensor> state() const override { return named_state("exp_avg", exp_avg_); }

 private:
  void update(const Batch& batch) override;
  void hold(size_t index) override;
  bool writes_memory() const override { return true; }
  void lay_state_like(size_t index, const at::Tensor& updated) override { lay_like(exp_avg_[index], updated); }

  LionOptions options_;
  std::vector<at::Tensor> exp_avg_;
};

}  // namespace tessera::optim
