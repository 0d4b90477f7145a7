#pragma once

#include "tessera/config/config.h"
#include "tessera/plan/layout_choice.h"
#include "tessera/plan/machine.h"
#include "tessera/train/state_bytes.h"

namespace tessera::plan {

/// What the field's formulas say of a layout, in a microsecond: good for an order in which to run layouts dry, and for nothing else.
struct Estimate {
  double seconds = 0;      ///< of a step
  double state_bytes = 0;  ///< of a rank: parameters, gradients and the optimizer's state, which no layout of these settings goes below
  double bytes = 0;        ///< with activations
};

class Estimator {
 public:
  /// Lays the model out, with what [lora] adds and [quantize] takes away, to count its parameters, which takes milliseconds. Throws ConfigError where a pattern
  /// names nothing.
  Estimator(const Config& config, int world, const Machine& machine);
  Estimate operator()(const LayoutChoice& choice) const;

 private:
  /// Parameters by what cuts them: mesh.tp, and mesh.ep.
  struct Elements {
    double dense = 0, experts = 0;
    /// That a rank computes with.
    double held(const LayoutChoice& choice, double parts_of_experts) const { return (dense / choice.tp + experts / parts_of_experts) / choice.pp; }
  };
  struct Work;
  struct Memory;
  struct Compute;
  struct Traffic;

  Work work_of(const LayoutChoice& choice) const;
  Memory memory_of(const LayoutChoice& choice, const Work& work) const;
  Compute compute_of(const LayoutChoice& choice, const Work& work) const;
  Traffic traffic_of(const LayoutChoice& choice, const Work& work) const;
  double update_of(const LayoutChoice& choice, const Memory& memory) const;
  LinkRates link_of(double ranks, double stride) const;
  double exchange_of(double bytes, double ranks, double stride) const;
  static double parts_of_experts(const LayoutChoice& choice) { return choice.ep * choice.expert_tp; }

  Config config_;
  int world_;
  Machine machine_;
  Elements trained_{}, frozen_{};
  BytesPerParameter kept_of_dense_{}, kept_of_experts_{};  ///< of the whole model, where nothing is sharded
  double active_ = 0;                                      ///< parameters that a token meets
};

}  // namespace tessera::plan
