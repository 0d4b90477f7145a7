#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// A model of which a rank may hold a part (a pipeline's stages). Its parameters know it, so that what has to be taken over all of them, and is given less, can
/// say so.
struct DividedModel {
  size_t parameters = 0;  ///< of all parts, those that take gradients, tied ones once
  std::string way_out{};  ///< for messages: where the others are, and what to call
};

void set_divided(const at::Tensor& parameter, std::shared_ptr<const DividedModel> model);
/// Of a parameter, or of what is updated in its place; null: it belongs to none.
std::shared_ptr<const DividedModel> divided_model_of(const at::Tensor& tensor);

}  // namespace tessera::nn
