#pragma once

#include <vector>

#include "tessera/nn/parameter.h"
#include "tessera/optim/whole_model.h"

namespace tessera::testing_support {

/// What an optimizer is told of parameters that are all there are, of which none is looked up or makes logits.
inline optim::WholeModel plain_model(const std::vector<nn::NamedParameter>& parameters) {
  optim::WholeModel model;
  for (const auto& parameter : parameters) model.parameters.push_back(Slice::whole(parameter.name, nn::slice_of(parameter.tensor).shape));
  return model;
}

}  // namespace tessera::testing_support
