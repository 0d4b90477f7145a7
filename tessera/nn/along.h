#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

/// What stands beside a layer's weight and is cut with it: whoever cuts the layer reads this, and needs to know nothing of the technique that added it.
namespace tessera::nn {

/// Dimension `dim` of a parameter runs along dimension `of_weight` of its layer's weight [O, I] (0: output features, 1: input features). Where the other one is
/// cut, the parameter stays whole on every rank, and each rank's gradient is one term of its own.
struct Along {
  int64_t dim = 0, of_weight = 0;
};

void set_along(const at::Tensor& parameter, Along along);
std::optional<Along> along_of(const at::Tensor& parameter);

/// What computes with the parameter, or has it trained, for as long as it lives.
void add_user(const at::Tensor& parameter, std::weak_ptr<const void> user);
bool has_user(const at::Tensor& parameter);

}  // namespace tessera::nn
