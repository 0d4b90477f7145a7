#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/mixture.h"
#include "tessera/train/cut_model.h"

namespace tessera {

/// What a step's tokens asked of a mixture of experts.
struct ExpertLoad {
  int64_t layer = 0;
  std::vector<double> share;  ///< of each expert, of all choices before any were dropped: they sum to one, and are 1 / experts where load is even
  double balance = 0;         ///< mean balance term: 1 where load and probabilities are even (nn::RouterLosses)
  double z = 0;               ///< mean z term
  double dropped = 0;         ///< share of the choices that a capacity dropped
  /// Load of the busiest expert over the mean load.
  double busiest() const;
};

/// The loads that routers count while they train, of all ranks together, and what follows from them: reports, and biases that even the load out
/// (arXiv:2408.15664). Counts stay on the device until somebody reads a report.
class ExpertLoads {
 public:
  /// Of the model's layers that this rank holds; does nothing where the model has no experts. `run` has to outlive it.
  ExpertLoads(const Config& config, const Mesh& mesh, CutModel& run);

  bool any() const { return layers_ > 0; }

  /// Sums the counts of the step up over all ranks, those of stages without a mixture and of other data ranks included: one all-reduce of layers x (experts +
  /// 4) fp64, after which every rank has the same. The routers begin anew.
  void meet();

  /// Moves the biases of this rank's routers, alike on all ranks that hold them.
  void balance();

  /// Of the last meet(), by layer: reads on the host.
  std::vector<ExpertLoad> read() const;

 private:
  struct Held {
    int64_t layer;
    nn::RouterImpl* router;
  };

  comm::Group all_;
  bool counts_ = true;  ///< of the ranks that route the same tokens, one does
  double rate_ = 0;
  int64_t layers_ = 0, experts_ = 0, per_token_ = 0;
  std::vector<Held> held_;
  at::Device device_;
  at::Tensor sums_;  ///< [layers, experts + kBehindLoad] fp64
};

}  // namespace tessera
