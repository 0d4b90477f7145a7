#include "tessera/fsdp/operator_use.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>

// An operator's schema says whether it writes; its name, what it is for. Those that nothing but a forward calls, and those that nothing but a copy does, are
// listed. All others are judged by their company: an optimizer takes a parameter, element by element, beside its gradient or its state, which have the slice's
// shape, a forward beside activations, which have another, or by chance the same: then it goes by whether a forward is under way.

namespace tessera {
namespace {

using Names = std::unordered_set<std::string>;

/// Made of a parameter without looking at it as a part of a model.
const Names& copies() {
  static const Names names{"aten::detach",
                           "aten::detach_",
                           "aten::cpu",
                           "aten::cuda",
                           "aten::alias",
                           "aten::contiguous",
                           "aten::equal",
                           "aten::item",
                           "aten::_local_scalar_dense",
                           "aten::is_nonzero",
                           "aten::is_same_size",
                           "aten::requires_grad_",
                           "aten::retain_grad",
                           "aten::set_data",
                           "aten::data",
                           "aten::_has_compatible_shallow_copy_type",
                           "aten::view_as",
                           "aten::reshape_as",
                           "aten::type_as",
                           "aten::new_empty",
                           "aten::new_zeros",
                           "aten::new_ones",
                           "aten::new_full",
                           "aten::new_empty_strided",
                           "aten::_version",
                           "aten::is_leaf",
                           "aten::output_nr",
                           "aten::pin_memory",
                           "aten::is_pinned"};
  return names;
}

/// Of a parameter's shape, whatever it holds.
const Names& shapes() {
  static const Names names{"aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like", "aten::rand_like", "aten::randn_like"};
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

/// Norms and look-ups.
const Names& layers() {
  static const Names names{"aten::embedding",         "aten::embedding_bag",     "aten::batch_norm", "aten::layer_norm",
                           "aten::group_norm",        "aten::instance_norm",     "aten::rms_norm",   "aten::native_batch_norm",
                           "aten::native_layer_norm", "aten::native_group_norm", "aten::prelu",      "aten::scaled_dot_product_attention"};
  return names;
}

/// And what else parameters are for.
const Names& others() {
  static const Names names{"aten::t",         "aten::transpose",    "aten::permute", "aten::expand",
                           "aten::unsqueeze", "aten::index_select", "aten::index",   "aten::gather"};
  return names;
}

/// Of which one number comes, where no dimension is named.
const Names& reductions() {
  static const Names names{"aten::norm",   "aten::linalg_vector_norm",
                           "aten::sum",    "aten::mean",
                           "aten::std",    "aten::var",
                           "aten::max",    "aten::min",
                           "aten::median", "aten::prod",
                           "aten::any",    "aten::all",
                           "aten::abs",    "aten::argmax",
                           "aten::argmin", "aten::count_nonzero",
                           "aten::aminmax"};
  return names;
}

/// No gradient goes through them.
const Names& comparisons() {
  static const Names names{"aten::isnan", "aten::isinf", "aten::isfinite", "aten::eq",    "aten::ne",     "aten::gt",
                           "aten::ge",    "aten::lt",    "aten::le",       "aten::histc", "aten::nonzero"};
  return names;
}

/// Element by element, made of operators that libtorch marks so.
const Names& by_elements() {
  static const Names names{"aten::where",
                           "aten::rsub",
                           "aten::subtract",
                           "aten::multiply",
                           "aten::divide",
                           "aten::arctan2",
                           "aten::floor_divide",
                           "aten::greater",
                           "aten::less",
                           "aten::not_equal",
                           "aten::greater_equal",
                           "aten::isclose",
                           "aten::allclose",
                           "aten::less_equal",
                           "aten::masked_fill",
                           "aten::dist",
                           "aten::mse_loss",
                           "aten::l1_loss",
                           "aten::smooth_l1_loss",
                           "aten::huber_loss",
                           "aten::masked_select",
                           "aten::expand_as",
                           "aten::kl_div",
                           "aten::binary_cross_entropy",
                           "aten::binary_cross_entropy_with_logits",
                           "aten::soft_margin_loss",
                           "aten::poisson_nll_loss"};
  return names;
}

/// By row and column, or by position.
const Names& writes_by_position() {
  static const Names names{"aten::triu_", "aten::tril_", "aten::fill_diagonal_", "aten::put_", "aten::masked_scatter_"};
  return names;
}

/// All of what is written, which is their last argument.
const Names& sequences() {
  static const Names names{"aten::eye", "aten::arange", "aten::range", "aten::linspace", "aten::logspace", "aten::randperm"};
  return names;
}

/// "In place", and no element is written.
const Names& keeps_elements() {
  static const Names names{"aten::requires_grad_", "aten::detach_",     "aten::set_",      "aten::set_data",   "aten::t_",
                           "aten::transpose_",     "aten::swapaxes_",   "aten::swapdims_", "aten::squeeze_",   "aten::rename_",
                           "aten::unsqueeze_",     "aten::as_strided_", "aten::resize_",   "aten::retain_grad"};
  return names;
}

/// Along the dimension that they name.
const Names& writes_along_a_dimension() {
  static const Names names{"aten::index_add_",      "aten::index_copy_",   "aten::index_fill_", "aten::scatter_", "aten::scatter_add_",
                           "aten::scatter_reduce_", "aten::index_reduce_", "aten::cumsum_",     "aten::cumprod_"};
  return names;
}

const c10::IValue* named(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const std::string& name) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == name && !arguments[i].isNone()) return &arguments[i];
  }
  return nullptr;
}

/// Of what goes by elements: whether one number of them all comes.
bool reduces(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  static const Names numbers{"aten::dist", "aten::_foreach_norm", "aten::_foreach_max"};
  const c10::IValue* const reduction = named(schema, arguments, "reduction");
  return numbers.contains(schema.name()) || (reduction != nullptr && reduction->isInt() && reduction->toInt() != at::Reduction::None);
}

bool is_look(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  if (comparisons().contains(schema.name())) return true;
  if (!reductions().contains(schema.name())) return false;
  const c10::IValue* const dimensions = named(schema, arguments, "dim");
  return dimensions == nullptr || (dimensions->isIntList() && dimensions->toIntVector().empty());
}

/// To another device, or to the dtype that it has: a handle. Double on the CPU is what printing casts to.
OperatorUse use_of_cast(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const at::Tensor& parameter) {
  std::optional<at::ScalarType> dtype;
  if (const auto* const other = named(schema, arguments, "other"); other != nullptr && other->isTensor()) dtype = other->toTensor().scalar_type();
  if (const auto* const given = named(schema, arguments, "dtype"); given != nullptr && given->isInt()) dtype = given->toScalarType();
  if (!dtype || *dtype == parameter.scalar_type()) return OperatorUse::Slice;
  return *dtype == at::kDouble ? OperatorUse::Look : OperatorUse::Cast;
}

/// A mask, which has the shape of what it is given, goes by elements.
bool indexes_rows(const c10::IValue& indices) {
  if (!indices.isList() || indices.toListRef().empty() || !indices.toListRef()[0].isTensor()) return false;
  const at::Tensor& first = indices.toListRef()[0].toTensor();
  return first.defined() && first.scalar_type() != at::kBool && first.scalar_type() != at::kByte;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) collect(item, tensors);
  }
}

}  // namespace

std::vector<at::Tensor> tensors_beside(at::ArrayRef<c10::IValue> arguments, const OperandPlace& place) {
  std::vector<at::Tensor> beside;
  const size_t own = place.item ? arguments[place.argument].toListRef().size() : 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i == place.argument) continue;
    const bool in_pairs = place.item && arguments[i].isList() && arguments[i].toListRef().size() == own;
    collect(in_pairs ? arguments[i].toListRef()[*place.item] : arguments[i], beside);
  }
  return beside;
}

bool needs_one_dtype(const std::string& name) { return products().contains(name); }
bool brings_together(const std::string& name) { return name.starts_with("c10d::") && name != "c10d::send"; }
/// Kernels of ours are layers' and losses'; our optimizers call theirs past the dispatcher.
bool is_layer(const std::string& name) { return products().contains(name) || layers().contains(name) || name.starts_with("tessera::"); }
bool is_forward(const std::string& name) { return is_layer(name) || others().contains(name); }

bool goes_by_elements(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return op.hasTag(at::Tag::pointwise) || by_elements().contains(name) || name.starts_with("aten::_foreach_");
}

bool keeps_rows(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.schema().name();
  static const Names copying{"aten::clone", "aten::_to_copy", "aten::copy_", "aten::zero_"};
  if (goes_by_elements(op)) return !reduces(op.schema(), arguments);
  return makes_views(op.schema()) || makes_alike(name) || copying.contains(name);
}

bool makes_alike(const std::string& name) { return shapes().contains(name); }

bool joins(const std::string& name) {
  static const Names joining{"aten::stack", "aten::cat", "aten::concat", "aten::hstack", "aten::vstack"};
  return joining.contains(name);
}

bool broadcast_together(at::IntArrayRef a, at::IntArrayRef b) { return at::is_expandable_to(a, b) || at::is_expandable_to(b, a); }

bool writes(const c10::FunctionSchema& schema, size_t argument) {
  const c10::AliasInfo* const alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool writes(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (writes(schema, i)) return true;
  }
  return false;
}

bool writes_elements(const c10::FunctionSchema& schema, size_t argument) { return writes(schema, argument) && !keeps_elements().contains(schema.name()); }

bool replaces(const std::string& name) { return name == "aten::set_data" || name == "aten::_has_compatible_shallow_copy_type"; }

bool makes_views(const c10::FunctionSchema& schema, size_t argument) {
  const c10::AliasInfo* const alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && !alias->isWrite();
}

bool makes_views(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (makes_views(schema, i)) return true;
  }
  return false;
}

bool writes_by_rows(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const OperandPlace& place) {
  if (!writes(schema, place.argument)) return false;
  const std::string& name = schema.name();
  if (sequences().contains(name)) return true;
  if (place.argument != 0 || !arguments[0].isTensor()) return false;
  const int64_t dims = arguments[0].toTensor().dim();
  if (writes_by_position().contains(name)) return dims <= 2 || (name != "aten::triu_" && name != "aten::tril_");
  if (name == "aten::index_put_" || name == "aten::_index_put_impl_") return indexes_rows(arguments[1]);
  const c10::IValue* const dimension = named(schema, arguments, "dim");
  if (dimension == nullptr || !dimension->isInt()) return false;
  const bool is_of_rows = dimension->toInt() == 0 || dimension->toInt() == -std::max<int64_t>(dims, 1);
  if (name == "aten::renorm_") return !is_of_rows;  // of each row by itself
  return writes_along_a_dimension().contains(name) && is_of_rows;
}

OperatorUse operator_use(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const OperandPlace& place, const at::Tensor& parameter) {
  if (writes(schema, place.argument) || copies().contains(schema.name())) return OperatorUse::Slice;
  if (shapes().contains(schema.name())) return OperatorUse::Shape;
  if (is_forward(schema.name())) return OperatorUse::Whole;
  if (schema.name() == "aten::clone") return OperatorUse::Clone;
  if (schema.name() == "aten::to" || schema.name() == "aten::_to_copy") return use_of_cast(schema, arguments, parameter);
  const std::vector<at::Tensor> beside = tensors_beside(arguments, place);
  if (std::ranges::any_of(beside, [&](const at::Tensor& tensor) { return tensor.sizes() != parameter.sizes(); })) return OperatorUse::Unlike;
  if (!beside.empty()) return OperatorUse::Alike;
  return is_look(schema, arguments) ? OperatorUse::Look : OperatorUse::Alone;
}

}  // namespace tessera
