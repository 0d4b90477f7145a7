#include "tessera/tensor_parallel/layout_trace.h"

#include <algorithm>
#include <utility>

#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "tessera/core/error.h"
#include "tessera/nn/operands.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sharing.h"
#include "tessera/tensor_parallel/layout_rules.h"

// A wrong plan mostly runs, and trains something else: max(0, x) of a term of a sum has the right shape. So one forward pass is followed on meta before
// anything runs. Whole tensors have to be followed too: one through which a gradient reaches parameters must not meet a part, or that gradient would be one
// rank's term. A tensor is known by its address, which stays its own as it is kept alive; what is written in place is known by its storage, since others look
// at the same memory.

namespace tessera::tensor_parallel {
namespace {

using enum TensorLayout;

bool is_cut(TensorLayout layout) { return layout == Features || layout == Sequence; }

/// Whether it is made of other operators, which come one by one.
bool comes_apart(const nn::OperatorCall& operation) {
  const auto handle = c10::Dispatcher::singleton().findSchema(operation.schema().operator_name());
  return handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// What a program gives its model lies where it does in a run, and the weights on meta. What is written stays: of a copy nobody would see it.
void bring_to_meta(nn::OperatorCall& operation) {
  const size_t count = operation.schema().arguments().size();
  const auto first = operation.stack().end() - static_cast<std::ptrdiff_t>(count);
  bool any_on_meta = false;
  nn::for_each_operand(operation.arguments(), [&](const at::Tensor& tensor, const nn::OperandPlace&) { any_on_meta |= tensor.is_meta(); });
  if (!any_on_meta) return;
  const auto brought = [](const at::Tensor& tensor) { return tensor.defined() && !tensor.is_meta() && tensor.dim() > 0 ? tensor.to(at::kMeta) : tensor; };
  for (auto value = first; value != operation.stack().end(); ++value) {
    const auto* const alias = operation.schema().arguments()[static_cast<size_t>(value - first)].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    if (value->isTensor()) {
      *value = brought(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value->toTensorVector()) tensors.push_back(brought(tensor));
      *value = std::move(tensors);
    }
  }
}

/// Attention as libtorch writes it has no kernel there with a mask.
void run_on_meta(nn::OperatorCall& operation) {
  if (operation.name() != "aten::scaled_dot_product_attention" || !operation.arguments()[0].toTensor().is_meta()) {
    return operation.run(/*watch_inside=*/false);
  }
  const at::Tensor q = operation.arguments()[0].toTensor(), v = operation.arguments()[2].toTensor();
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  torch::jit::drop(operation.stack(), operation.schema().arguments().size());
  torch::jit::push(operation.stack(), at::empty(sizes, q.options()));
}

std::string dimension(const Cut& cut) {
  return cut.defined() ? detail::concat(" (dimension ", cut.dim, cut.is_plain() ? "" : ", with others in it", ")") : std::string();
}

}  // namespace

LayoutTrace::Trusted::Trusted(std::shared_ptr<LayoutTrace> trace) : trace_(std::move(trace)) {
  if (trace_) ++trace_->trusted_;
}
LayoutTrace::Trusted::~Trusted() {
  if (trace_) --trace_->trusted_;
}

LayoutTrace::Judged::Judged(std::shared_ptr<LayoutTrace> trace) : trace_(std::move(trace)) {
  if (trace_) trusted_ = std::exchange(trace_->trusted_, 0);
}
LayoutTrace::Judged::~Judged() {
  if (trace_) trace_->trusted_ = trusted_;
}

LayoutTrace::LayoutTrace(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    const Slice& slice = nn::slice_of(parameter);
    const bool is_term = std::ranges::any_of(nn::sharings_of(parameter), &nn::Sharing::is_term);
    remember(parameter, {.alive = parameter, .layout = is_term ? Copied : Replicated, .origin = slice.name, .parameter = true, .followed = slice.is_whole()});
  }
}

const LayoutTrace::Known* LayoutTrace::find(const at::Tensor& tensor) const {
  if (!tensor.defined()) return nullptr;
  if (const auto found = known_.find(tensor.unsafeGetTensorImpl()); found != known_.end()) return &found->second;
  const auto found = tensor.has_storage() ? written_.find(tensor.storage().unsafeGetStorageImpl()) : written_.end();
  return found == written_.end() ? nullptr : &found->second;
}

TensorLayout LayoutTrace::layout_of(const at::Tensor& tensor) const {
  const Known* known = find(tensor);
  return known ? known->layout : Replicated;
}

void LayoutTrace::remember(const at::Tensor& tensor, Known known) {
  known.alive = tensor;
  known_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(known));
}

void LayoutTrace::takes(const std::string& path, const at::Tensor& tensor, TensorLayout layout, const Cut& place) const {
  const Known* known = find(tensor);
  const TensorLayout held = layout_of(tensor);
  require(!known || known->followed, "tensor parallelism: '", path, "' takes what an operator made of '", known ? known->origin : std::string(),
          "', through which its layout could not be followed");
  const std::string from = known && !known->origin.empty() ? " from '" + known->origin + "'" : std::string();
  const Cut wanted = place.defined() ? place : Cut{.dim = tensor.dim() - 1};
  require(held == layout && (!is_cut(layout) || (known->cut.dim == wanted.dim && known->cut.is_plain())), "tensor parallelism: '", path, "' takes what is ",
          to_string(layout), is_cut(layout) ? detail::concat(" (dimension ", wanted.dim, ")") : "", ", and gets what is ", to_string(held),
          held == layout && known ? dimension(known->cut) : "", from,
          "; change the input of the one or the output of the other in the plan, or put PrepareInput on the module around it");
  if (!place.defined()) return;
  require(alike(known->cut, place), "tensor parallelism: '", path, "' takes a part of ", place.whole(), " positions, and gets one of ", known->cut.whole(),
          from, "; keep the length of what is cut, or gather it before it is changed");
}

void LayoutTrace::takes_features(const std::string& path, const at::Tensor& tensor, const std::vector<FeatureShare>& shares) const {
  const Known* known = find(tensor);
  const std::string from = known ? " from '" + known->origin + "'" : std::string();
  require(tensor.size(-1) == shares.front().size, "tensor parallelism: '", path, "' takes ", shares.front().size,
          " of its features on the first rank, and gets ", tensor.size(-1), from, "; give both layers the same FeatureCut");
  require(!known || !known->cut.defined() || alike(known->cut, {.shares = shares, .outer = known->cut.outer, .inner = known->cut.inner}),
          "tensor parallelism: '", path, "' takes other features than it gets", from, " on some ranks; give both layers the same FeatureCut");
}

void LayoutTrace::agrees(const std::string& path, const at::Tensor& tensor, TensorLayout layout, int64_t dim) const {
  const Known* known = find(tensor);
  const TensorLayout held = layout_of(tensor);
  const int64_t place = dim < 0 ? dim + tensor.dim() : dim;
  require(held == layout && (!is_cut(layout) || known->cut.dim == place), "tensor parallelism: the plan says that '", path, "' gives what is ",
          to_string(layout), is_cut(layout) ? detail::concat(" (dimension ", place, ")") : "", ", and it gives what is ", to_string(held),
          held == layout && known ? dimension(known->cut) : "", "; correct its Gives, or the styles of the layers inside");
}

Cut LayoutTrace::features_of(const at::Tensor& tensor) const {
  const Known* known = find(tensor);
  const bool is_last = known != nullptr && known->followed && known->layout == Features && known->cut.dim == tensor.dim() - 1;
  return is_last ? known->cut : Cut{};
}

Cut LayoutTrace::takes_heads(const std::string& path, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const auto is_features = [&](const at::Tensor& tensor) { return layout_of(tensor) == Features; };
  if (!is_features(q) && !is_features(k) && !is_features(v)) return {};
  for (const at::Tensor& keys : {k, v}) {
    require(is_features(q) && is_features(keys) && find(q)->cut.dim == 2 && find(keys)->cut.dim == 2 && grouped(find(q)->cut, find(keys)->cut),
            "tensor parallelism: '", path, "' takes query heads and the key-value heads that belong to them, and gets some that do not go together; cut the ",
            "layers before it by FeatureCut::query_heads and FeatureCut::key_value_heads of the same numbers");
  }
  return find(q)->cut;
}

void LayoutTrace::gives(const std::string& path, const at::Tensor& tensor, TensorLayout layout, Cut cut) {
  invariant(is_cut(layout) == cut.defined(), "'", path, "' gives what is ", to_string(layout), " and ", cut.defined() ? "" : "not ", "where it is cut");
  remember(tensor, {.alive = tensor, .layout = layout, .origin = path, .cut = std::move(cut)});
}

std::string LayoutTrace::where(const std::string& name, const Known& known) const {
  return detail::concat("tensor parallelism: ", name, inside_.empty() ? "" : " (in " + inside_.back() + ")", " of what '", known.origin, "' gives, which is ",
                        to_string(known.layout), dimension(known.cut));
}

LayoutTrace::Operands LayoutTrace::operands_of(const RuleCall& call) const {
  Operands operands;
  for (const at::Tensor& tensor : call.tensors()) {
    const Known* known = find(tensor);
    operands.parameters_alone &= tensor.dim() == 0 || (known && known->parameter);
    if (known == nullptr) continue;
    require(known->followed, "tensor parallelism: ", call.schema.name(), " of ", known->parameter ? "the parameter '" : "what an operator made of '",
            known->origin, known->parameter ? "', of which this rank holds a part" : "', whose layout could not be followed",
            "; use what its layer gives (ask it for output = Replicated where the whole is needed)");
    if (known->layout == Replicated) {
      if (operands.trained == nullptr || operands.trained->parameter) operands.trained = known;
    } else {
      (known->layout == Copied ? operands.copied : operands.split).push_back(known);
    }
  }
  return operands;
}

/// What lives in ways that do not go together, whatever the operator.
void LayoutTrace::refuse_mixtures(const RuleCall& call, const Known& first, const Operands& operands) const {
  for (const Known* other : operands.split) {
    if (other->layout != first.layout) {
      call.refuse(", with what '", other->origin, "' gives, which is ", to_string(other->layout), ": the two do not go together");
    }
  }
  if (first.layout == Partial && !operands.copied.empty()) {
    call.refuse(", with what '", operands.copied.front()->origin, "' gives, which is copied: the two do not go together; add the terms up before");
  }
}

/// What needs the whole of its gradient, and would get a rank's.
void LayoutTrace::refuse_trained(const RuleCall& call, const Known& first, const Known& trained) const {
  if (!trained.parameter) {
    call.refuse(", with what ", trained.origin.empty() ? "is made of parameters" : "'" + trained.origin + "' gives",
                ", which is whole on every rank: its gradient would be one rank's term; let the two meet where both are whole");
  }
  switch (first.layout) {
    case Features:
      call.refuse(
          ": the gradient of its parameter would be that of a part of the features; use it before the column-wise layer or after the row-wise one, or ask the "
          "column-wise layer for output = Replicated");
    case Sequence:
      call.refuse(": the gradient of its parameter would be that of a part of the sequence; give the module the style SequenceParallel");
    case Partial:
      call.refuse(": the gradient of its parameter would be one rank's term; let the layer's output be Replicated or Sequence, or add the terms up before");
    default:
      call.refuse(": the gradient of its weight would be one rank's term; give the layer a style, or hand it the tensor from before it was copied");
  }
}

/// What is written into keeps its layout: others may look at the same memory.
void LayoutTrace::refuse_writes(const RuleCall& call, const Known* result) const {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.writes(i)) continue;
    const Known* const before = find(call.tensor(i));
    const bool same = result && before && before->layout == result->layout && before->cut.dim == result->cut.dim && alike(before->cut, result->cut);
    if (!same) call.refuse(": it is written into a tensor that does not live this way; make a new one in place of writing");
  }
}

std::optional<LayoutTrace::Known> LayoutTrace::result_of(const RuleCall& call, const Known& first) const {
  Known known = first;
  known.parameter = false;
  if (first.layout == Partial) {
    std::vector<bool> terms;
    for (const at::Tensor& tensor : call.tensors()) terms.push_back(layout_of(tensor) == Partial);
    const bool all = std::ranges::count(terms, true) > 1;
    if (adds(call.schema.name()) && !all) {
      call.refuse(": what is added is the same on every rank, and would be added once for each; let the layer's output be Replicated or Sequence");
    }
    if (!keeps_sums(call, terms)) {
      call.refuse(
          ": a function of the terms is not a term of the function (max(0, a) + max(0, b) is not max(0, a + b)), or not of one of which that is known; let the "
          "layer's output be Replicated or Sequence, or add the terms up with PrepareOutput before it");
    }
    return known;
  }
  const Rule rule = rule_of(call.schema.name());
  if (rule == nullptr) {
    call.refuse(": its layout cannot be followed through this operator; gather it before (output = Replicated of the layer, or PrepareInput",
                first.layout == Sequence ? "{.from = Sequence, .to = Copied}" : "", " on the module around it), or write it with operators that are followed");
  }
  const auto cut = rule(call);
  if (!cut) return {};
  known.cut = *cut;
  return known;
}

void LayoutTrace::run(nn::OperatorCall& operation, const RuleCall& call, const std::optional<Known>& result) {
  const bool split = result && is_cut(result->layout);
  try {
    run_on_meta(operation);
  } catch (const c10::NotImplementedError& error) {
    call.refuse(": it has no kernel on meta, so that no plan around it can be checked (", error.what_without_backtrace(), ")");
  } catch (const c10::Error& error) {
    if (!split) throw;
    call.refuse(": it fails on a part (", error.what_without_backtrace(), "); ask for no sizes of the whole, but for -1 or those of the tensor");
  }
  bool first = true;
  const auto keep = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!result) {
      known_.erase(tensor.unsafeGetTensorImpl());
      return;
    }
    Known known = *result;
    if (split && (tensor.dim() <= known.cut.dim || tensor.size(known.cut.dim) != known.cut.size())) {
      if (first) call.refuse(": its layout cannot be followed to a result of shape ", tensor.sizes());
      known.followed = false;
    }
    remember(tensor, std::move(known));
  };
  for (const c10::IValue& value : operation.results()) {
    if (value.isTensor()) keep(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) keep(tensor);
    }
    first = false;
  }
  for (size_t i = 0; result && i < call.arguments.size(); ++i) {
    if (!call.writes(i) || !call.tensor(i).has_storage()) continue;
    Known known = *result;
    known.alive = call.tensor(i);
    if (known.layout == Replicated) written_.insert_or_assign(known.alive.storage().unsafeGetStorageImpl(), std::move(known));
  }
}

void LayoutTrace::call(nn::OperatorCall& operation) {
  bring_to_meta(operation);
  if (trusted_ > 0) return operation.run();
  const std::vector<c10::IValue> arguments = operation.arguments().vec();
  RuleCall call{.schema = operation.schema(),
                .arguments = arguments,
                .cut_of =
                    [this](const at::Tensor& tensor) {
                      const Known* const known = find(tensor);
                      return known && is_cut(known->layout) ? &known->cut : nullptr;
                    },
                .origin_of =
                    [this](const at::Tensor& tensor) {
                      const Known* const known = find(tensor);
                      return known ? known->origin : std::string();
                    },
                .layout = Replicated,
                .where = "tensor parallelism: " + operation.name()};
  const Operands operands = operands_of(call);
  if (operands.split.empty() && operands.copied.empty()) {
    std::optional<Known> result;
    if (operands.trained) result = *operands.trained;
    if (result && !operands.parameters_alone && result->parameter) result = Known{.alive = {}, .layout = Replicated, .origin = {}};
    return run(operation, call, result);
  }
  const Known& first = *(operands.split.empty() ? operands.copied : operands.split).front();
  call.layout = first.layout;
  call.where = where(operation.name(), first);
  refuse_mixtures(call, first, operands);
  if (operands.trained && !is_cut(first.layout)) refuse_trained(call, first, *operands.trained);
  if (first.layout == Copied) {
    Known result = first;
    result.parameter = operands.parameters_alone;
    refuse_writes(call, &result);
    return run(operation, call, result);
  }
  // No rule of its own, but what it is made of may have some.
  if (rule_of(operation.name()) == nullptr && comes_apart(operation)) {
    inside_.push_back(operation.name());
    try {
      operation.run(/*watch_inside=*/true);
    } catch (...) {
      inside_.pop_back();
      throw;
    }
    inside_.pop_back();
    return;
  }
  const auto result = result_of(call, first);
  if (operands.trained) refuse_trained(call, first, *operands.trained);
  refuse_writes(call, result ? &*result : nullptr);
  run(operation, call, result);
}

}  // namespace tessera::tensor_parallel
