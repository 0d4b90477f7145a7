#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct SgdOptions {
  double momentum = 0;
};

/// Stochastic gradient descent with momentum, as torch.optim.SGD has it (no dampening): weight decay is added to the gradient (L2), not decoupled:
///   g += weight_decay * p;  b = momentum * b + g  (b is g at the first update);  p -= lr * b
/// Memory: one tensor of the parameter's size with momentum, none without. Traffic: 20 bytes an fp32 element and step with momentum, 12 without.
class Sgd : public Optimizer {
 public:
  explicit Sgd(std::vector<ParameterGroup> groups, SgdOptions options = {});

  std::string kind() const override { return "sgd"; }
  bool skips_on_device() const override { return true; }
  std::vector<StateTensor> state() const override;

 private:
  void update(const Batch& batch) override;
  void hold(size_t index) override;
  void lay_state_like(size_t index, const at::Tensor& updated) override {
    if (!momentum_buffer_.empty()) lay_like(momentum_buffer_[index], updated);
  }

  SgdOptions options_;
  std::vector<at::Tensor> momentum_buffer_;  ///< empty without momentum
};

}  // namespace tessera::optim
