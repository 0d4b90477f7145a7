#pragma once

#include <cstdint>

#include "tessera/config/config.h"

namespace tessera::optim {

/// The learning rate of every step as a pure function of the step's number k, counted from 1:
///   warm-up   k <= w    lr * k / w
///   constant            lr
///   linear              min_lr + (lr - min_lr) * (1 - t)
///   cosine              min_lr + (lr - min_lr) * (1 + cos(pi t)) / 2
/// with w = warmup_steps and t = (k - 1 - w) / (total_steps - w) held within [0, 1]. So the first rate in use is above zero, the first after warm-up is lr, and
/// min_lr is what step total_steps + 1 would use: no step is spent at a rate of zero. torch's LinearLR and CosineAnnealingLR count alike.
class LearningRate {
 public:
  /// `total_steps` is run.steps. Throws ConfigError on an unknown schedule.
  LearningRate(const OptimConfig& config, int64_t total_steps);

  double at(int64_t step) const;

 private:
  enum class Kind { Constant, Linear, Cosine };
  Kind kind_;
  double lr_, min_lr_;
  int64_t warmup_steps_, total_steps_;
};

}  // namespace tessera::optim
