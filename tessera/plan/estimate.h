#pragma once

#include "tessera/config/config.h"
#include "tessera/plan/layout_choice.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// What the field's formulas say of a layout, in a microsecond: good for an order in which to run layouts dry, and for nothing else.
struct Estimate {
  double seconds = 0;      ///< of a step
  double state_bytes = 0;  ///< of a rank: parameters, gradients and the optimizer's state, which no layout of these settings goes below
  double bytes = 0;        ///< with activations
};

class Estimator {
 public:
  /// Lays the model out to count its parameters, which takes milliseconds.
  Estimator(const Config& config, int world, const Machine& machine);
  Estimate operator()(const LayoutChoice& choice) const;

 private:
  Config config_;
  int world_;
  Machine machine_;
  double dense_ = 0, experts_ = 0, active_ = 0;  ///< parameters
};

}  // namespace tessera::plan
