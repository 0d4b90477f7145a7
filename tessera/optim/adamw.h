#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/kernels/fused_updates.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
};

/// AdamW (Loshchilov and Hutter, arXiv:1711.05101) as libtorch's fused operator, whose loops on a CPU are ours (kernels/fused_updates.h); agrees with
/// torch.optim.AdamW:
///   p -= lr * weight_decay * p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
///   p -= lr * (m / (1 - beta1^k)) / (sqrt(v / (1 - beta2^k)) + eps)      at the parameter's k-th update
/// Memory: two tensors of the parameter's size and dtype, and 4 bytes a parameter tensor for k. Traffic: 28 bytes an fp32 element and step, one pass, on the
/// host with clipping and the weight in 16 bits beside a master (4 bytes more).
class AdamW : public Optimizer {
 public:
  explicit AdamW(std::vector<ParameterGroup> groups, AdamWOptions options = {});

  std::string kind() const override { return "adamw"; }
  bool skips_on_device() const override { return true; }
  bool updates_in_one_pass() const override { return true; }
  bool writes_rounded() const override { return true; }
  std::vector<StateTensor> state() const override;

 private:
  void update(const Batch& batch) override;
  /// The gradients as the pass takes them, and what it does besides.
  static std::pair<std::vector<at::Tensor>, kernels::UpdatesByElement::Besides> in_one_pass(const Batch& batch);
  void counts_changed() override;
  void hold(size_t index) override;
  void lay_state_like(size_t index, const at::Tensor& updated) override {
    lay_like(exp_avg_[index], updated);
    lay_like(exp_avg_sq_[index], updated);
  }

  AdamWOptions options_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  at::Tensor steps_;                    ///< fp32 [number of parameters]
  std::vector<at::Tensor> step_views_;  ///< the elements of steps_
};

}  // namespace tessera::optim
