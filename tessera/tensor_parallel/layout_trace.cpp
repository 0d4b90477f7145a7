#include "tessera/tensor_parallel/layout_trace.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::tensor_parallel {
namespace {

using enum TensorLayout;
using Names = std::initializer_list<std::string_view>;

constexpr const char* kNeedsFeatures = ": it needs all features; ask the column-wise layer for output = Replicated, or give the next one to RowParallel";
constexpr const char* kNeedsSequence = ": it needs the whole sequence; put PrepareInput{.from = Sequence, .to = Copied} on the module around it";

bool is_one_of(const std::string& name, Names names) { return std::ranges::find(names, name) != names.end(); }

/// The same elements, in another shape or dtype.
bool moves_only(const std::string& name) {
  return is_one_of(name, {"aten::view",   "aten::_unsafe_view", "aten::reshape",    "aten::_reshape_alias", "aten::alias",
                          "aten::detach", "aten::clone",        "aten::contiguous", "aten::_to_copy",       "aten::to",
                          "aten::t",      "aten::transpose",    "aten::permute",    "aten::unsqueeze",      "aten::squeeze",
                          "aten::slice",  "aten::narrow",       "aten::select",     "aten::expand",         "aten::as_strided",
                          "aten::copy_",  "aten::unflatten",    "aten::flatten",    "aten::split",          "aten::split_with_sizes",
                          "aten::chunk",  "aten::unbind"});
}

bool is_product(const std::string& name) {
  return is_one_of(
      name, {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear", "tessera::linear_cross_entropy", "aten::_scaled_mm"});
}

bool adds(const std::string& name) { return is_one_of(name, {"aten::add", "aten::add_", "aten::sub", "aten::sub_"}); }

bool is_elementwise(const std::string& name) { return adds(name) || is_one_of(name, {"aten::mul", "aten::mul_", "aten::div", "aten::div_"}); }

/// Whose operands meet element by element.
bool meets_elementwise(const std::string& name) { return is_elementwise(name) || name == "tessera::swiglu"; }

/// Of which f(a) + f(b) = f(a + b), where the other operands are the same on every rank.
bool is_linear(const std::string& name) {
  return moves_only(name) || is_product(name) || (is_elementwise(name) && !adds(name)) || is_one_of(name, {"aten::neg", "aten::sum", "aten::mean"});
}

bool over_features(const std::string& name) {
  return is_product(name) || is_one_of(name, {"aten::native_layer_norm", "aten::layer_norm", "tessera::rms_norm", "aten::_fused_rms_norm", "aten::rms_norm",
                                              "aten::_softmax", "aten::softmax", "aten::_log_softmax", "aten::log_softmax", "aten::mean", "aten::sum",
                                              "aten::amax", "aten::var", "aten::var_mean", "aten::cumsum", "aten::logsumexp", "aten::embedding"});
}

bool over_positions(const std::string& name) {
  return name.find("attention") != std::string::npos || is_one_of(name, {"aten::cumsum", "aten::roll", "aten::flip", "aten::convolution"});
}

/// Dimensions of the first argument that an operator goes along, as its schema names them: all where it reduces and names none. Nothing where it goes element
/// by element, or moves elements without a look at their order.
std::vector<int64_t> dims_gone_along(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const std::string& name = schema.name();
  const at::Tensor& tensor = arguments[0].toTensor();
  const int64_t count = tensor.dim();
  std::vector<int64_t> dims;
  if (name == "aten::constant_pad_nd") {
    const std::vector<int64_t> pad = arguments[1].toIntVector();
    for (size_t i = 0; i < pad.size(); ++i) {
      if (pad[i] != 0) dims.push_back(count - 1 - static_cast<int64_t>(i / 2));
    }
    return dims;
  }
  const bool picks = is_one_of(name, {"aten::slice", "aten::narrow", "aten::select"});
  if ((moves_only(name) && !picks) || is_product(name)) return dims;
  bool named = false;
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "dim" && schema.arguments()[i].name() != "dims") continue;
    named = true;
    if (arguments[i].isInt()) dims.push_back(arguments[i].toInt());
    if (arguments[i].isIntList()) dims = arguments[i].toIntVector();
  }
  if (name == "aten::slice" && arguments.size() >= 5 && named) {
    const int64_t size = tensor.size(dims.front()), begin = arguments[2].isInt() ? arguments[2].toInt() : 0,
                  end = arguments[3].isInt() ? arguments[3].toInt() : size;
    if (begin == 0 && end >= size && arguments[4].toInt() == 1) return {};
  }
  const bool reduces = named || is_one_of(name, {"aten::sum", "aten::mean", "aten::prod", "aten::max", "aten::min", "aten::norm", "aten::std", "aten::var",
                                                 "aten::median", "aten::argmax", "aten::argmin", "aten::nansum", "aten::any", "aten::all"});
  if (dims.empty() && reduces) {
    for (int64_t dim = 0; dim < count; ++dim) dims.push_back(dim);
  }
  for (int64_t& dim : dims) dim += dim < 0 ? count : 0;
  return dims;
}

bool broadcast(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t dim = 1; dim <= std::min(a.dim(), b.dim()); ++dim) {
    if (a.size(-dim) != b.size(-dim) && a.size(-dim) != 1 && b.size(-dim) != 1) return false;
  }
  return true;
}

}  // namespace

LayoutTrace::Trusted::Trusted(std::shared_ptr<LayoutTrace> trace) : trace_(std::move(trace)) {
  if (trace_) ++trace_->trusted_;
}
LayoutTrace::Trusted::~Trusted() {
  if (trace_) --trace_->trusted_;
}

LayoutTrace::ByPosition::ByPosition(std::shared_ptr<LayoutTrace> trace) : trace_(std::move(trace)) {
  if (trace_) ++trace_->by_position_;
}
LayoutTrace::ByPosition::~ByPosition() {
  if (trace_) --trace_->by_position_;
}

LayoutTrace::LayoutTrace(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters())
    known_.emplace(parameter.unsafeGetTensorImpl(), Known{.alive = parameter, .layout = {}, .origin = {}});
}

const LayoutTrace::Known* LayoutTrace::find(const at::Tensor& tensor) const {
  const auto found = known_.find(tensor.unsafeGetTensorImpl());
  return found == known_.end() ? nullptr : &found->second;
}

TensorLayout LayoutTrace::layout_of(const at::Tensor& tensor) const {
  const Known* known = find(tensor);
  return known && known->layout ? *known->layout : Replicated;
}

void LayoutTrace::remember(const at::Tensor& tensor, Known known) {
  known.alive = tensor;
  known_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(known));
}

void LayoutTrace::takes(const std::string& path, const at::Tensor& tensor, TensorLayout layout) const {
  const TensorLayout held = layout_of(tensor);
  if (held == layout) return;
  const Known* known = find(tensor);
  require(false, "tensor parallelism: '", path, "' takes what is ", to_string(layout), ", and gets what is ", to_string(held),
          known && !known->origin.empty() ? " from '" + known->origin + "'" : std::string(),
          "; change the input of the one or the output of the other in the plan, or put PrepareInput on the module around it");
}

void LayoutTrace::takes_features(const std::string& path, const at::Tensor& tensor, int64_t features) const {
  if (tensor.size(-1) == features) return;
  const Known* known = find(tensor);
  require(false, "tensor parallelism: '", path, "' takes ", features, " of its features on the first rank, and gets ", tensor.size(-1),
          known ? " from '" + known->origin + "'" : std::string(), "; give both layers the same FeatureCut");
}

void LayoutTrace::agrees(const std::string& path, const at::Tensor& tensor, TensorLayout layout) const {
  const TensorLayout held = layout_of(tensor);
  require(held == layout, "tensor parallelism: the plan says that '", path, "' gives what is ", to_string(layout), ", and it gives what is ", to_string(held),
          "; correct its Gives, or the styles of the layers inside");
}

void LayoutTrace::gives(const std::string& path, const at::Tensor& tensor, TensorLayout layout) {
  remember(tensor, {.alive = tensor, .layout = layout, .origin = path});
}

LayoutTrace::Operands LayoutTrace::operands_of(at::ArrayRef<c10::IValue> arguments) const {
  Operands operands;
  at::Tensor cut, whole;
  const auto visit = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const Known* known = find(tensor);
    if (known && known->layout == Replicated) {
      operands.trained = known;
      operands.replicated = true;
      whole = tensor;
    } else if (known && known->layout) {
      operands.cut.push_back(known);
      if (cut.defined()) operands.parts_fit &= broadcast(cut, tensor);
      cut = tensor;
    } else if (known) {
      operands.parameter = true;
    } else {
      operands.replicated |= tensor.dim() > 0;
      whole = tensor;
    }
  };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) visit(argument.toTensor());
    if (!argument.isTensorList()) continue;
    for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
  }
  if (cut.defined() && whole.defined()) operands.fit = broadcast(cut, whole);
  return operands;
}

/// What the operator's results are, or a refusal. Nothing: replicated, and no parameter has a part in it.
std::optional<LayoutTrace::Known> LayoutTrace::result_of(const std::string& name, const Operands& operands) const {
  if (operands.cut.empty()) {
    if (operands.trained != nullptr) return *operands.trained;
    if (!operands.parameter) return std::nullopt;
    if (!operands.replicated) return Known{.alive = {}, .layout = {}, .origin = {}};
    return Known{.alive = {}, .layout = Replicated, .origin = {}};
  }
  const Known& first = *operands.cut.front();
  const std::string where = detail::concat("tensor parallelism: ", name, " of what '", first.origin, "' gives, which is ", to_string(*first.layout));
  for (const Known* other : operands.cut) {
    require(other->layout == first.layout, where, ", with what '", other->origin, "' gives, which is ", to_string(*other->layout),
            ": the two do not go together");
  }
  require(operands.parts_fit || !meets_elementwise(name), where, ", with what '", operands.cut.back()->origin,
          "' gives: the two are cut in different ways; give both layers the same FeatureCut");
  require(operands.fit || !is_elementwise(name), where,
          ", with a tensor that is whole: the two do not go together; ask for output = Replicated, or cut the other one as well");
  require(operands.trained == nullptr || *first.layout == Partial || *first.layout == Copied, where, ", with what ",
          operands.trained == nullptr || operands.trained->origin.empty() ? "is made of parameters" : "'" + operands.trained->origin + "' gives",
          ", which is whole on every rank: its gradient would be one rank's term; let the two meet where both are whole");
  switch (*first.layout) {
    case Partial:
      require(adds(name) || moves_only(name) || (is_linear(name) && operands.cut.size() == 1), where,
              ": a function of the terms is not a term of the function (max(0, a) + max(0, b) is not max(0, a + b)); let the layer's output be Replicated or "
              "Sequence, or add the terms "
              "up with PrepareOutput before it");
      require(!adds(name) || operands.cut.size() > 1, where, ": what is added is the same on every rank, and would be added once for each");
      break;
    case Features:
      require(!first.features_last || !over_features(name), where, kNeedsFeatures);
      require(!operands.parameter, where,
              ": the gradient of its parameter would be that of a part of the features; use it before the column-wise layer or after the row-wise one, or ask "
              "the column-wise layer for output = Replicated");
      break;
    case Sequence:
      require(!operands.parameter || by_position_ > 0, where,
              ": the gradient of its parameter would be that of a part of the sequence; give the module the style SequenceParallel");
      require(!over_positions(name), where, kNeedsSequence);
      break;
    case Copied:
      require(!operands.parameter, where,
              ": the gradient of its weight would be one rank's term; give the layer a style, or hand it the tensor from before it was copied");
      break;
    case Replicated:
      break;
  }
  return first;
}

/// What goes along the dimension that is cut meets a part of it: a mean, a softmax, an order, a neighbour, the first one.
void LayoutTrace::refuse_along_the_cut(const nn::OperatorCall& operation) const {
  const at::ArrayRef<c10::IValue> arguments = operation.arguments();
  if (arguments.empty() || !arguments[0].isTensor() || !arguments[0].toTensor().defined()) return;
  const Known* const known = find(arguments[0].toTensor());
  if (known == nullptr || !known->layout) return;
  const int64_t dims = arguments[0].toTensor().dim();
  const bool features = known->layout == Features && known->features_last, sequence = known->layout == Sequence && dims == 3;
  if (!features && !sequence) return;
  const std::vector<int64_t> along = dims_gone_along(operation.schema(), arguments);
  require(std::ranges::find(along, features ? dims - 1 : 1) == along.end(), "tensor parallelism: ", operation.name(), " of what '", known->origin,
          "' gives, which is ", to_string(*known->layout), features ? kNeedsFeatures : kNeedsSequence);
}

void LayoutTrace::call(nn::OperatorCall& operation) {
  if (trusted_ > 0) return operation.run();
  refuse_along_the_cut(operation);
  const Operands operands = operands_of(operation.arguments());
  const bool first_is_cut = !operation.arguments().empty() && operation.arguments()[0].isTensor() && find(operation.arguments()[0].toTensor());
  const int64_t dims = first_is_cut ? operation.arguments()[0].toTensor().dim() : -1;
  const auto result = result_of(operation.name(), operands);
  operation.run(/*watch_inside=*/false);
  for (const c10::IValue& value : operation.results()) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (!result) {
      known_.erase(tensor.unsafeGetTensorImpl());
      continue;
    }
    Known known = *result;
    // Heads that are taken apart leave the cut dimension in front of the last one; put together again, it is the last.
    if (known.layout == Features && dims >= 0 && moves_only(operation.name())) {
      if (tensor.dim() > dims) known.features_last = false;
      if (tensor.dim() < dims) known.features_last = true;
    }
    remember(tensor, std::move(known));
  }
}

}  // namespace tessera::tensor_parallel
