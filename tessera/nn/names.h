#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

/// Logical names of parameters: one for each tensor of a model, whichever of its modules were wrapped, and in which order.
namespace tessera::nn {

/// The name of a parameter that is found at `path` below a model, having been named before. Who wrapped a part of the model alone named it by the end of that
/// path ("first.weight" for "critic.first.weight"): then it is the path. A name that says something else stays (a part of a model that was named whole).
std::string whole_name(const std::string& given, const std::string& path);

/// Names the parameter, whole or a part as its data is. Data of another shape than the part that somebody has made of the parameter is named alone, so that
/// the part is known again with data of its shape.
void set_name(const at::Tensor& tensor, const std::string& name);

/// Throws ConfigError, naming both paths, where two tensors under `root` have one logical name: a checkpoint could keep one of them only.
void refuse_shared_names(const torch::nn::Module& root);

/// Says that `part`, with a slice and memory of its own, is what is updated in place of `parameter`.
void set_updated_for(const at::Tensor& part, const at::Tensor& parameter);

/// The parameter in whose place `tensor` is updated: itself where nobody said otherwise; undefined where that parameter is gone.
at::Tensor updated_for(const at::Tensor& tensor);

/// What tells whether a tensor is still what it was: another value once `tensor`, or the parameter in whose place it is updated, whose counter is its own
/// although they share memory, has been written through libtorch, or was given other memory (set_data, torch::load, vector_to_parameters). Writes through
/// .data() or a pointer show in nothing.
class WriteMark {
 public:
  WriteMark() = default;  ///< of no tensor
  explicit WriteMark(const at::Tensor& tensor);
  bool operator==(const WriteMark& other) const;

 private:
  int64_t writes_ = -1;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};  ///< held, so that no other memory gets its address
};

}  // namespace tessera::nn
