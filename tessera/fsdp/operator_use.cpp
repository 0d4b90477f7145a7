#include "tessera/fsdp/operator_use.h"

#include <unordered_set>

#include <ATen/core/Tensor.h>

namespace tessera {
namespace {

using Names = std::unordered_set<std::string>;

/// Made of a parameter without looking at it as a part of a model.
const Names& copies() {
  static const Names names{
      "aten::detach",     "aten::detach_",      "aten::clone",          "aten::to",          "aten::_to_copy",  "aten::cpu",
      "aten::cuda",       "aten::alias",        "aten::contiguous",     "aten::zeros_like",  "aten::ones_like", "aten::empty_like",
      "aten::full_like",  "aten::rand_like",    "aten::randn_like",     "aten::equal",       "aten::item",      "aten::_local_scalar_dense",
      "aten::is_nonzero", "aten::is_same_size", "aten::requires_grad_", "aten::retain_grad", "aten::set_data",  "aten::data",
      "aten::_version",   "aten::is_leaf",      "aten::output_nr",      "aten::pin_memory",  "aten::is_pinned"};
  return names;
}

const Names& products() {
  static const Names names{"aten::linear",
                           "aten::addmm",
                           "aten::mm",
                           "aten::matmul",
                           "aten::bmm",
                           "aten::baddbmm",
                           "aten::addmv",
                           "aten::mv",
                           "aten::einsum",
                           "aten::tensordot",
                           "aten::bilinear",
                           "aten::conv1d",
                           "aten::conv2d",
                           "aten::conv3d",
                           "aten::conv_transpose1d",
                           "aten::conv_transpose2d",
                           "aten::conv_transpose3d",
                           "aten::convolution",
                           "aten::_convolution",
                           "aten::lstm",
                           "aten::gru",
                           "aten::rnn_tanh",
                           "aten::rnn_relu",
                           "aten::lstm_cell",
                           "aten::gru_cell",
                           "aten::rnn_tanh_cell",
                           "aten::rnn_relu_cell"};
  return names;
}

/// And what else parameters are for.
const Names& others() {
  static const Names names{"aten::embedding",
                           "aten::embedding_bag",
                           "aten::batch_norm",
                           "aten::layer_norm",
                           "aten::group_norm",
                           "aten::instance_norm",
                           "aten::rms_norm",
                           "aten::native_batch_norm",
                           "aten::native_layer_norm",
                           "aten::native_group_norm",
                           "aten::prelu",
                           "aten::t",
                           "aten::transpose",
                           "aten::permute",
                           "aten::expand",
                           "aten::unsqueeze",
                           "aten::index_select",
                           "aten::index",
                           "aten::gather",
                           "aten::scaled_dot_product_attention"};
  return names;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) collect(item, tensors);
  }
}

}  // namespace

bool needs_one_dtype(const std::string& name) { return products().contains(name); }

OperatorUse operator_use(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, size_t argument, at::IntArrayRef sizes) {
  const c10::AliasInfo* const alias = schema.arguments()[argument].alias_info();
  if ((alias != nullptr && alias->isWrite()) || copies().contains(schema.name())) return OperatorUse::Slice;
  if (products().contains(schema.name()) || others().contains(schema.name())) return OperatorUse::Whole;
  bool alone = true;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i == argument) continue;
    std::vector<at::Tensor> tensors;
    collect(arguments[i], tensors);
    for (const at::Tensor& tensor : tensors) {
      alone = false;
      if (tensor.sizes() != sizes) return OperatorUse::Whole;
    }
  }
  return alone ? OperatorUse::Alone : OperatorUse::Alike;
}

}  // namespace tessera
