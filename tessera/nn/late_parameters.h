#pragma once

#include <string>

#include <torch/nn/module.h>

#include "tessera/nn/parameter.h"

/// What data-parallel techniques share. Not part of the public surface.
namespace tessera::nn {

/// Notices what a module was given after it was wrapped (a layer that its first forward builds): no rank's gradient of that meets another's, and no optimizer
/// knows.
class LateParameters {
 public:
  /// `module`, which outlives this, as a wrapper takes over those of its parameters that are in `only`.
  LateParameters(const torch::nn::Module& module, ParameterFilter only);

  /// Throws ConfigError that names those that want a gradient and that nobody has claimed since (nn::GradientDispatcher::claim); once a step. Costs a look at
  /// each module while there are none.
  void refuse(const std::string& technique) const;

 private:
  const torch::nn::Module& module_;
  ParameterFilter only_;
  size_t known_;  ///< a sum over what is registered, which another parameter changes
};

}  // namespace tessera::nn
