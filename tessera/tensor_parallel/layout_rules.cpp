#include "tessera/tensor_parallel/layout_rules.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

// A rule holds where the operator on parts gives the parts of the operator on the whole, and says along which dimension they then lie. What is not listed has
// no rule, for a wrong guess would show as slightly wrong gradients and not as an error. Operators share a rule by what they do with dimensions, not by what
// they compute. Dimensions of several operands are counted from the end, where broadcasting aligns them.

namespace tessera::tensor_parallel {
namespace {

const at::Tensor kNone;

int64_t wrapped(int64_t dim, int64_t count) { return dim < 0 ? dim + count : dim; }

/// The only tensor that is cut, the first argument.
const Cut& only(const RuleCall& call) {
  const Cut* const first = call.cut_of(call.tensor(0));
  for (const at::Tensor& tensor : call.tensors()) {
    if (call.cut_of(tensor) && (first == nullptr || !tensor.is_same(call.tensor(0)))) {
      call.refuse(": its layout cannot be followed through an operator that takes what is cut in this place; gather it before (output = Replicated)");
    }
  }
  invariant(first != nullptr, "a rule of ", call.schema.name(), " on nothing that is cut");
  return *first;
}

/// An int, or a list of them, as dimensions of `count`; nothing where none are named: all of them.
std::optional<std::vector<int64_t>> dims_of(const RuleCall& call, int64_t count) {
  std::optional<std::vector<int64_t>> dims;
  for (const char* name : {"dim", "dims", "axis"}) {
    const c10::IValue* const given = call.find(name);
    if (given == nullptr) continue;
    dims = given->isInt() ? std::vector{given->toInt()} : given->toIntVector();
    break;
  }
  if (!dims || dims->empty()) return {};
  for (int64_t& dim : *dims) dim = wrapped(dim, count);
  return dims;
}

int64_t integer(const RuleCall& call, const char* name, int64_t otherwise = 0) {
  const c10::IValue* const given = call.find(name);
  return given && given->isInt() ? given->toInt() : otherwise;
}

[[noreturn]] void refuse_rearranged(const RuleCall& call) {
  call.refuse(": the part may not be rearranged as the whole would be; give the sizes of what is not cut, and -1 for what is: view({b, s, -1, head_dim})");
}

/// Of an operand that is not cut: dimension `from_end` (negative) of the result must be one that it does not have.
void require_constant_along(const RuleCall& call, const at::Tensor& tensor, int64_t from_end) {
  if (tensor.defined() && tensor.dim() >= -from_end && tensor.size(from_end) != 1) {
    call.refuse(", with a tensor that is whole: the two do not go together; ask for output = Replicated, or cut the other one as well");
  }
}

[[noreturn]] void refuse_unlike(const RuleCall& call, const at::Tensor& other) {
  call.refuse(", with what '", call.origin_of(other), "' gives: the two are cut in different ways; give both layers the same FeatureCut, and keep their order");
}

/// Element by element, shapes broadcast: what is cut, alike; the rest constant along it.
std::optional<Cut> pointwise(const RuleCall& call) {
  const std::vector<at::Tensor> tensors = call.tensors();
  const Cut* cut = nullptr;
  int64_t from_end = 0, dims = 0;
  for (const at::Tensor& tensor : tensors) {
    dims = std::max(dims, tensor.dim());
    const Cut* const own = call.cut_of(tensor);
    if (own == nullptr) continue;
    if (cut && (own->dim - tensor.dim() != from_end || !alike(*own, *cut))) refuse_unlike(call, tensor);
    cut = own;
    from_end = own->dim - tensor.dim();
  }
  for (const at::Tensor& tensor : tensors) {
    if (!call.cut_of(tensor)) require_constant_along(call, tensor, from_end);
  }
  return cut->in_dim(from_end + dims);
}

/// Along dimensions that it names, and of the same shape.
std::optional<Cut> along(const RuleCall& call) {
  const Cut& cut = only(call);
  const auto dims = dims_of(call, call.tensor(0).dim());
  if (!dims || std::ranges::find(*dims, cut.dim) != dims->end()) call.refuse_along();
  return cut;
}

/// Takes dimensions away.
std::optional<Cut> reduction(const RuleCall& call) {
  if (call.find("other")) return pointwise(call);  // aten::max of two
  const Cut cut = *along(call);
  const c10::IValue* const keep = call.find("keepdim");
  if (keep && keep->toBool()) return cut;
  const auto dims = *dims_of(call, call.tensor(0).dim());
  return cut.in_dim(cut.dim - std::ranges::count_if(dims, [&](int64_t dim) { return dim < cut.dim; }));
}

/// Takes one place of a dimension, and the dimension with it.
std::optional<Cut> pick(const RuleCall& call) {
  const Cut& cut = only(call);
  const int64_t dim = wrapped(integer(call, "dim"), call.tensor(0).dim());
  if (dim == cut.dim) call.refuse_along();
  return cut.in_dim(cut.dim - (dim < cut.dim ? 1 : 0));
}

/// Some places of a dimension, or all of any.
std::optional<Cut> slice(const RuleCall& call) {
  const Cut& cut = only(call);
  if (wrapped(integer(call, "dim"), call.tensor(0).dim()) != cut.dim) return cut;
  const int64_t end = integer(call, "end", std::numeric_limits<int64_t>::max());
  if (integer(call, "start") != 0 || end != std::numeric_limits<int64_t>::max() || integer(call, "step", 1) != 1) call.refuse_along();
  return cut;
}

/// Without a dimension given, the first: split, chunk, unbind.
std::optional<Cut> parts(const RuleCall& call) {
  const Cut& cut = only(call);
  if (wrapped(integer(call, "dim"), call.tensor(0).dim()) == cut.dim) call.refuse_along();
  return cut;
}

std::optional<Cut> padding(const RuleCall& call) {
  const Cut& cut = only(call);
  const std::vector<int64_t> pad = call.find("pad")->toIntVector();
  const auto place = static_cast<size_t>(call.tensor(0).dim() - 1 - cut.dim) * 2;
  if (place < pad.size() && (pad[place] != 0 || pad[place + 1] != 0)) call.refuse_along();
  return cut;
}

std::optional<Cut> over_last_two(const RuleCall& call) {
  const Cut& cut = only(call);
  if (cut.dim >= call.tensor(0).dim() - 2) call.refuse_along();
  return cut;
}

std::optional<Cut> view(const RuleCall& call) {
  const Cut& cut = only(call);
  const c10::IValue* sizes = call.find("size");
  if (sizes == nullptr) sizes = call.find("shape");
  if (sizes == nullptr || !sizes->isIntList()) call.refuse(": its layout cannot be followed through a view of another dtype");
  const auto viewed = cut.rearranged(call.tensor(0).sizes(), sizes->toIntVector());
  if (!viewed) refuse_rearranged(call);
  return viewed;
}

std::optional<Cut> flatten(const RuleCall& call) {
  const Cut& cut = only(call);
  const at::Tensor& tensor = call.tensor(0);
  if (!call.find("start_dim") || !call.find("start_dim")->isInt() || tensor.dim() == 0) refuse_rearranged(call);
  return cut.merged(tensor.sizes(), wrapped(integer(call, "start_dim"), tensor.dim()), wrapped(integer(call, "end_dim", -1), tensor.dim()));
}

std::optional<Cut> unflatten(const RuleCall& call) {
  const Cut& cut = only(call);
  const at::Tensor& tensor = call.tensor(0);
  const int64_t dim = wrapped(integer(call, "dim"), tensor.dim());
  const std::vector<int64_t> sizes = call.find("sizes")->toIntVector();
  if (dim != cut.dim) return cut.in_dim(cut.dim + (dim < cut.dim ? static_cast<int64_t>(sizes.size()) - 1 : 0));
  // As a view of this dimension alone.
  const auto viewed = cut.in_dim(0).rearranged({tensor.size(dim)}, sizes);
  if (!viewed) refuse_rearranged(call);
  return viewed->in_dim(viewed->dim + dim);
}

std::optional<Cut> transpose(const RuleCall& call) {
  const Cut& cut = only(call);
  const int64_t count = call.tensor(0).dim(), one = wrapped(integer(call, "dim0"), count), other = wrapped(integer(call, "dim1", 1), count);
  return cut.in_dim(cut.dim == one ? other : cut.dim == other ? one : cut.dim);
}

std::optional<Cut> permute(const RuleCall& call) {
  const Cut& cut = only(call);
  const auto dims = *dims_of(call, call.tensor(0).dim());
  return cut.in_dim(std::ranges::find(dims, cut.dim) - dims.begin());
}

std::optional<Cut> turn(const RuleCall& call) {
  const Cut& cut = only(call);
  return cut.in_dim(call.tensor(0).dim() == 2 ? 1 - cut.dim : cut.dim);
}

std::optional<Cut> unsqueeze(const RuleCall& call) {
  const Cut& cut = only(call);
  return cut.in_dim(cut.dim + (wrapped(integer(call, "dim"), call.tensor(0).dim() + 1) <= cut.dim ? 1 : 0));
}

std::optional<Cut> squeeze(const RuleCall& call) {
  const Cut& cut = only(call);
  const at::Tensor& tensor = call.tensor(0);
  const auto dims = dims_of(call, tensor.dim());
  const auto goes = [&](int64_t dim) { return tensor.size(dim) == 1 && (!dims || std::ranges::find(*dims, dim) != dims->end()); };
  if (goes(cut.dim)) call.refuse_along();
  int64_t before = 0;
  for (int64_t dim = 0; dim < cut.dim; ++dim) before += goes(dim) ? 1 : 0;
  return cut.in_dim(cut.dim - before);
}

/// To `size`, or `repeats` times, of which the last ones are those of the tensor; what is cut stays as it is.
std::optional<Cut> expansion(const RuleCall& call) {
  const Cut& cut = only(call);
  const at::Tensor& tensor = call.tensor(0);
  const bool repeats = call.find("repeats") != nullptr;
  const std::vector<int64_t> sizes = call.find(repeats ? "repeats" : "size")->toIntVector();
  const int64_t added = static_cast<int64_t>(sizes.size()) - tensor.dim(), wanted = sizes[static_cast<size_t>(cut.dim + added)];
  if (repeats ? wanted != 1 : wanted != -1 && wanted != tensor.size(cut.dim)) call.refuse_along();
  return cut.in_dim(cut.dim + added);
}

/// Side by side, along another dimension than the one that is cut.
std::optional<Cut> joined(const RuleCall& call) {
  const std::vector<at::Tensor> tensors = call.tensors();
  const Cut* const first = call.cut_of(tensors.front());
  for (const at::Tensor& tensor : tensors) {
    const Cut* const cut = call.cut_of(tensor);
    if (!first || !cut) call.refuse(", with a tensor that is whole: the two do not go together; ask for output = Replicated, or cut the other one as well");
    if (cut->dim != first->dim || !alike(*cut, *first)) refuse_unlike(call, tensor);
  }
  const bool stacks = call.schema.name() == "aten::stack";
  const int64_t dim = wrapped(integer(call, "dim"), tensors.front().dim() + (stacks ? 1 : 0));
  if (!stacks && dim == first->dim) call.refuse_along();
  return first->in_dim(first->dim + (stacks && dim <= first->dim ? 1 : 0));
}

/// a [..., m, k] b [..., k, n].
std::optional<Cut> product_of(const RuleCall& call, const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() < 2 || b.dim() < 2) call.refuse(": its layout cannot be followed through the product of a vector; give it a second dimension");
  const Cut *const left = call.cut_of(a), *const right = call.cut_of(b);
  const int64_t dims = std::max(a.dim(), b.dim()), of_left = left ? left->dim - a.dim() : 0, of_right = right ? right->dim - b.dim() : 0;
  if (of_left == -1 || of_right == -2) call.refuse_along();
  if (left && right) {
    if (of_left != of_right || of_left > -3) call.refuse_along();
    if (!alike(*left, *right)) refuse_unlike(call, b);
  } else if (left && of_left < -2) {
    require_constant_along(call, b, of_left);
  } else if (right && of_right < -2) {
    require_constant_along(call, a, of_right);
  }
  return left ? left->in_dim(of_left + dims) : right->in_dim(of_right + dims);
}

std::optional<Cut> product(const RuleCall& call) { return product_of(call, call.tensor(0), call.tensor(1)); }

/// What is added first, and then the two factors.
std::optional<Cut> product_with_sum(const RuleCall& call) {
  if (call.cut_of(call.tensor(0))) call.refuse_along();
  const auto cut = product_of(call, call.tensor(1), call.tensor(2));
  require_constant_along(call, call.tensor(0), cut->dim - std::max(call.tensor(1).dim(), call.tensor(2).dim()));
  return cut;
}

std::optional<Cut> linear(const RuleCall& call) {
  const Cut& cut = only(call);
  if (cut.dim == call.tensor(0).dim() - 1) call.refuse_along();
  return cut;
}

/// Of labels for every dimension and a result that is written out; what is cut has one label in all that are cut, which is in the result.
std::optional<Cut> einsum(const RuleCall& call) {
  std::string equation = call.find("equation")->toStringRef();
  std::erase(equation, ' ');
  const size_t arrow = equation.find("->");
  if (arrow == std::string::npos || equation.find('.') != std::string::npos) {
    call.refuse(": its layout cannot be followed where dimensions are left to be found; write all labels, and the result: \"bqhd,bkhd->bhqk\"");
  }
  const std::string result = equation.substr(arrow + 2);
  const std::vector<at::Tensor> tensors = call.tensors();
  std::vector<std::string> labels;
  for (size_t begin = 0; begin <= arrow;) {
    const size_t end = std::min(equation.find(',', begin), arrow);
    labels.push_back(equation.substr(begin, end - begin));
    begin = end + 1;
  }
  char label = 0;
  const Cut* cut = nullptr;
  for (size_t i = 0; i < tensors.size() && i < labels.size(); ++i) {
    const Cut* const own = call.cut_of(tensors[i]);
    if (!own) continue;
    if (labels[i].size() != static_cast<size_t>(tensors[i].dim())) call.refuse(": '", labels[i], "' does not name its dimensions");
    const char of_own = labels[i][static_cast<size_t>(own->dim)];
    if (cut && (label != of_own || !alike(*cut, *own))) call.refuse_along();
    cut = own;
    label = of_own;
  }
  for (size_t i = 0; i < tensors.size() && i < labels.size(); ++i) {
    const auto times = std::ranges::count(labels[i], label);
    if (times > 1 || (times == 1 && !call.cut_of(tensors[i]))) call.refuse_along();
  }
  const size_t place = result.find(label);
  if (place == std::string::npos) call.refuse_along();
  return cut->in_dim(static_cast<int64_t>(place));
}

/// Over the last dimensions, as many as `normalized_shape` has.
std::optional<Cut> norm(const RuleCall& call) {
  const Cut& cut = only(call);
  const c10::IValue* const shape = call.find("normalized_shape");
  if (cut.dim >= call.tensor(0).dim() - (shape ? static_cast<int64_t>(shape->toIntVector().size()) : 1)) call.refuse_along();
  return cut;
}

std::optional<Cut> embedding(const RuleCall& call) {
  if (call.cut_of(call.tensor(0))) call.refuse_along();
  return *call.cut_of(call.tensor(1));
}

/// q, k, v [..., H, S, D]: by heads, or by what is before them.
std::optional<Cut> attention(const RuleCall& call) {
  const at::Tensor& q = call.tensor(0);
  const Cut* const queries = call.cut_of(q);
  for (const size_t other : {1, 2}) {
    const Cut* const keys = call.cut_of(call.tensor(other));
    if (!queries || !keys || queries->dim != keys->dim) call.refuse(", with a tensor that is whole: the two do not go together; cut q, k and v alike");
    if (queries->dim >= q.dim() - 2) call.refuse_along();
    if (queries->dim == q.dim() - 3 ? !grouped(*queries, *keys) : !alike(*queries, *keys)) refuse_unlike(call, call.tensor(other));
  }
  const c10::IValue* const mask = call.find("attn_mask");
  if (mask && mask->isTensor() && mask->toTensor().defined()) {
    if (call.cut_of(mask->toTensor())) refuse_unlike(call, mask->toTensor());
    require_constant_along(call, mask->toTensor(), queries->dim - q.dim());
  }
  const c10::IValue* const dropped = call.find("dropout_p");
  if (dropped && dropped->toDouble() != 0) call.refuse(": each rank would draw a mask of its own; leave the dropout of attention's weights out");
  return *queries;
}

/// x [B, S, H, D] turned by tables of S and D.
std::optional<Cut> rope(const RuleCall& call) {
  const Cut& cut = only(call);
  if (cut.dim != 2 && (cut.dim != 0 || call.tensor(1).dim() == 3)) call.refuse_along();
  return cut;
}

/// Of the part of a sequence the module knows which it is (nn::Dropout under SequenceParallel), and of features that are the last dimension.
std::optional<Cut> dropout(const RuleCall& call) {
  call.refuse(
      ": the mask of a part is known along the sequence, and of features that are the last dimension (flatten(-2) of heads); put nn::Dropout there, or where "
      "all is whole, or give it the style SequenceParallel");
}

/// Of `self` only dtype and device count.
std::optional<Cut> made_anew(const RuleCall&) { return std::nullopt; }

struct Row {
  Rule rule;
  std::initializer_list<std::string_view> names;
};

/// All that is followed. Names that end in "_" are the same in place, where libtorch has them.
const Row kRows[] = {
    {pointwise, {"aten::alias", "aten::detach", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::copy_", "aten::lift_fresh"}},
    {pointwise, {"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::zero_", "aten::fill_"}},
    {pointwise, {"aten::relu",        "aten::relu6",       "aten::gelu",       "aten::silu",       "aten::sigmoid",   "aten::tanh",      "aten::elu",
                 "aten::leaky_relu",  "aten::softplus",    "aten::mish",       "aten::hardtanh",   "aten::hardswish", "aten::threshold", "aten::hardsigmoid",
                 "aten::exp",         "aten::expm1",       "aten::exp2",       "aten::log",        "aten::log1p",     "aten::log2",      "aten::log10",
                 "aten::sqrt",        "aten::rsqrt",       "aten::square",     "aten::reciprocal", "aten::pow",       "aten::neg",       "aten::abs",
                 "aten::sign",        "aten::sin",         "aten::cos",        "aten::tan",        "aten::sinh",      "aten::cosh",      "aten::atan",
                 "aten::erf",         "aten::floor",       "aten::ceil",       "aten::round",      "aten::trunc",     "aten::frac",      "aten::clamp",
                 "aten::clamp_min",   "aten::clamp_max",   "aten::nan_to_num", "aten::isnan",      "aten::isinf",     "aten::isfinite",  "aten::logical_not",
                 "aten::bitwise_not", "aten::log_sigmoid", "aten::logit",      "tessera::activate"}},
    {pointwise,
     {"aten::add",         "aten::sub",         "aten::rsub",      "aten::mul",         "aten::div",        "aten::floor_divide", "aten::remainder",
      "aten::fmod",        "aten::maximum",     "aten::minimum",   "aten::fmax",        "aten::fmin",       "aten::atan2",        "aten::where",
      "aten::masked_fill", "aten::addcmul",     "aten::addcdiv",   "aten::lerp",        "aten::eq",         "aten::ne",           "aten::lt",
      "aten::le",          "aten::gt",          "aten::ge",        "aten::logical_and", "aten::logical_or", "aten::logical_xor",  "aten::bitwise_and",
      "aten::bitwise_or",  "aten::bitwise_xor", "aten::logaddexp", "aten::xlogy",       "tessera::swiglu",  "tessera::geglu"}},
    {along,
     {"aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::sort",
      "aten::argsort", "aten::topk", "aten::flip", "aten::roll", "aten::glu", "aten::index_select"}},
    {reduction, {"aten::sum",          "aten::nansum",   "aten::mean",      "aten::prod", "aten::amax",
                 "aten::amin",         "aten::max",      "aten::min",       "aten::var",  "aten::std",
                 "aten::var_mean",     "aten::std_mean", "aten::logsumexp", "aten::norm", "aten::linalg_vector_norm",
                 "aten::argmax",       "aten::argmin",   "aten::any",       "aten::all",  "aten::median",
                 "aten::count_nonzero"}},
    {pick, {"aten::select"}},
    {slice, {"aten::slice"}},
    {parts, {"aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unsafe_chunk", "aten::unsafe_split"}},
    {pick, {"aten::unbind"}},
    {padding, {"aten::constant_pad_nd"}},
    {over_last_two, {"aten::tril", "aten::triu"}},
    {view, {"aten::view", "aten::_unsafe_view", "aten::reshape"}},
    {flatten, {"aten::flatten"}},
    {unflatten, {"aten::unflatten"}},
    {transpose, {"aten::transpose"}},
    {permute, {"aten::permute"}},
    {turn, {"aten::t"}},
    {unsqueeze, {"aten::unsqueeze"}},
    {squeeze, {"aten::squeeze"}},
    {expansion, {"aten::expand", "aten::repeat"}},
    {joined, {"aten::cat", "aten::stack"}},
    {product, {"aten::matmul", "aten::mm", "aten::bmm"}},
    {product_with_sum, {"aten::addmm", "aten::baddbmm"}},
    {linear, {"aten::linear"}},
    {einsum, {"aten::einsum"}},
    {norm, {"aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm", "tessera::rms_norm", "tessera::layer_norm"}},
    {embedding, {"aten::embedding"}},
    {attention, {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"}},
    {rope, {"tessera::rope"}},
    {dropout, {"tessera::dropout"}},
    {made_anew, {"aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::new_empty"}},
};

/// Of terms of a sum: what else is linear and has no parameters.
constexpr std::string_view kSums[] = {"aten::alias", "aten::detach", "aten::clone", "aten::contiguous", "aten::_to_copy",    "aten::neg",
                                      "aten::neg_",  "aten::sum",    "aten::mean",  "aten::flip",       "aten::index_select"};

}  // namespace

void RuleCall::refuse_along() const {
  if (layout == TensorLayout::Sequence) refuse(": it needs the whole sequence; put PrepareInput{.from = Sequence, .to = Copied} on the module around it");
  refuse(": it needs all features; ask the column-wise layer for output = Replicated, or give the next one to RowParallel");
}

const c10::IValue* RuleCall::find(const char* name) const {
  const auto index = schema.argumentIndexWithName(name);
  return index && !arguments[static_cast<size_t>(*index)].isNone() ? &arguments[static_cast<size_t>(*index)] : nullptr;
}

bool RuleCall::writes(size_t argument) const {
  const auto* const alias = schema.arguments()[argument].alias_info();
  return alias && alias->isWrite() && tensor(argument).defined();
}

const at::Tensor& RuleCall::tensor(size_t argument) const {
  return argument < arguments.size() && arguments[argument].isTensor() ? arguments[argument].toTensor() : kNone;
}

std::vector<at::Tensor> RuleCall::tensors() const {
  std::vector<at::Tensor> found;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) found.push_back(argument.toTensor());
    if (!argument.isList()) continue;
    for (const c10::IValue& element : argument.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) found.push_back(element.toTensor());
    }
  }
  return found;
}

Rule rule_of(const std::string& name) {
  static const auto rules = [] {
    std::unordered_map<std::string_view, Rule> table;
    for (const Row& row : kRows) {
      for (const std::string_view one : row.names) table.emplace(one, row.rule);
    }
    return table;
  }();
  auto found = rules.find(name);
  if (found == rules.end() && name.ends_with("_")) found = rules.find(std::string_view(name).substr(0, name.size() - 1));
  return found == rules.end() ? nullptr : found->second;
}

bool adds(const std::string& name) { return name == "aten::add" || name == "aten::add_" || name == "aten::sub" || name == "aten::sub_"; }

bool keeps_sums(const RuleCall& call, const std::vector<bool>& terms) {
  const std::string& name = call.schema.name();
  const auto count = static_cast<size_t>(std::ranges::count(terms, true));
  const c10::IValue* const dtype = call.find("dtype");
  if (dtype && dtype->isInt() && !at::isFloatingType(dtype->toScalarType())) return false;
  if (adds(name)) return count == 2;
  if (name == "aten::mul" || name == "aten::mul_") return count == 1;
  if (name == "aten::div" || name == "aten::div_") return count == 1 && terms.front() && call.find("rounding_mode") == nullptr;
  const Rule rule = rule_of(name);
  const auto is = [&](std::initializer_list<Rule> ones) { return std::ranges::find(ones, rule) != ones.end(); };
  if (is({joined})) return count == terms.size();
  if (is({view, flatten, unflatten, transpose, permute, turn, unsqueeze, squeeze, expansion, pick, slice, parts})) return rule != view || !dtype;
  return std::ranges::find(kSums, name) != std::end(kSums);
}

}  // namespace tessera::tensor_parallel
