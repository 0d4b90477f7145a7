#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/attachment.h"
#include "tessera/nn/dropout.h"

namespace tessera::lora {

/// Held by all terms of one call of attach(), and by nothing else: nn::add_user.
using Alive = std::shared_ptr<const char>;

/// The thin matrices beside the weight of libtorch's own Linear.
struct PlainTerm {
  std::string path;
  at::Tensor weight, a, b;
  double scale = 1;
  nn::Dropout dropout{nullptr};  ///< null: none
  Alive alive{};
};

/// Adds the terms where this thread multiplies by one of the weights: libtorch's Linear cannot be intercepted, but the operator that it calls (linear, addmm,
/// matmul) can, above autograd. Costs under a microsecond an operator while attached. Products throw ConfigError where the parameters have been sharded
/// (fully_shard).
[[nodiscard]] Attachment attach_to_products(std::vector<PlainTerm> terms);

}  // namespace tessera::lora
