#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/nn/parameter.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// An update that is made before it is known whether it should be, and taken back where not (zero bubble's post-validation, arXiv:2401.10241, section 4): while
/// the norm of all ranks' gradients is on its way, a rank updates as if nothing were to be clipped and everything finite. The paper takes it back by
/// arithmetic, which rounds; here what an update changes is kept aside, so that it is as it was, bit for bit.
///
///   memory    while it is tentative: the parameters and the optimizer's state once more
///   traffic   one copy of them; another where it is taken back
class TentativeUpdate {
 public:
  /// Both have to outlive it. `parameters`: what the optimizer updates.
  TentativeUpdate(Optimizer& optimizer, const std::vector<nn::NamedParameter>& parameters) : optimizer_(optimizer), parameters_(parameters) {}

  /// Updates with learning rate `lr`.
  void make(double lr);
  bool made() const { return made_; }
  /// What was made stands.
  void keep();
  /// Parameters, state and counts of updates are what they were before make().
  void take_back();

 private:
  /// All that an update changes.
  std::vector<at::Tensor> changed() const;

  Optimizer& optimizer_;
  const std::vector<nn::NamedParameter>& parameters_;
  bool made_ = false;
  std::vector<at::Tensor> before_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace tessera::optim
