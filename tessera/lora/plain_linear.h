#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/attachment.h"
#include "tessera/nn/dropout.h"

namespace tessera::lora {

/// The thin matrices beside the weight of libtorch's own Linear.
struct PlainTerm {
  std::string path;
  at::Tensor weight, a, b;
  double scale = 1;
  nn::Dropout dropout{nullptr};                                  ///< null: none
  std::shared_ptr<const char> alive = std::make_shared<char>();  ///< nn::set_user
};

/// Adds the terms where this thread multiplies by one of the weights: libtorch's Linear cannot be intercepted, but the operator that it calls (linear, addmm,
/// matmul) can, above autograd. Costs under a microsecond an operator while attached. Products throw ConfigError where the parameters have been sharded
/// (fully_shard).
[[nodiscard]] Attachment attach_to_products(std::vector<PlainTerm> terms);

}  // namespace tessera::lora
