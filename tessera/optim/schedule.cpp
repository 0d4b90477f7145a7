#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/core/error.h"

namespace tessera::optim {

LearningRate::LearningRate(const OptimConfig& config, int64_t total_steps)
    : lr_(config.lr), min_lr_(config.min_lr), warmup_steps_(config.warmup_steps), total_steps_(total_steps) {
  if (config.schedule == "constant") {
    kind_ = Kind::Constant;
  } else if (config.schedule == "linear") {
    kind_ = Kind::Linear;
  } else {
    require(config.schedule == "cosine", "optim.schedule = ", config.schedule, ": must be one of constant, linear, cosine");
    kind_ = Kind::Cosine;
  }
}

double LearningRate::at(int64_t step) const {
  invariant(step >= 1, "steps are counted from 1, not from ", step);
  if (step <= warmup_steps_) return lr_ * static_cast<double>(step) / static_cast<double>(warmup_steps_);
  if (kind_ == Kind::Constant) return lr_;
  const int64_t decay_steps = std::max<int64_t>(total_steps_ - warmup_steps_, 1);
  const double t = std::min(1.0, static_cast<double>(step - 1 - warmup_steps_) / static_cast<double>(decay_steps));
  const double share = kind_ == Kind::Linear ? 1 - t : (1 + std::cos(std::numbers::pi * t)) / 2;
  return min_lr_ + (lr_ - min_lr_) * share;
}

}  // namespace tessera::optim
