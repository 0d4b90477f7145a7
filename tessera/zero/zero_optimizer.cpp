#include "tessera/zero/zero_optimizer.h"

#include <torch/optim/lbfgs.h>

namespace tessera::detail {

void check_goes_by_elements(const torch::optim::Optimizer& optimizer, const GradientSynchronizer& synchronizer) {
  const int parts = synchronizer.norm_group().size();
  require(
      parts == 1 || dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
      "zero_optimizer: torch::optim::LBFGS takes dot products over all parameters, and what it updates on this rank is one of ", parts,
      " parts of them, so ranks would go in directions and by steps of their own (and its closure, which it calls several times a step, would see parameters "
      "that were not brought together); use an optimizer that goes element by element (Adam, AdamW, SGD, Adagrad, RMSprop), or DistributedDataParallel with "
      "a closure that returns the loss of all ranks");
}

}  // namespace tessera::detail
