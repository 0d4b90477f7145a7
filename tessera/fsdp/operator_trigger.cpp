#include "tessera/fsdp/operator_trigger.h"

#include <algorithm>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/saved_tensors.h"

// Of a plain module only its operators can be seen, and of an operator only its arguments. Storages say which unit: all views of a whole share one. Whether a
// slice or the whole is meant has to come out alike on all ranks, for a rank that gathers alone waits for ever; and a rank that happens to have all rows of a
// parameter sees equal shapes where others see different ones. Hence the questions about parameters that lie on one rank: what such a rank cannot tell, nobody
// may act on. What remains unclear is refused, with the line to change.

namespace tessera {
namespace {

constexpr const char* kWholeState =
    "the state of an optimizer that was made, or has stepped, before fully_shard, and is of whole parameters; make the optimizer behind fully_shard, and bring "
    "the state over by checkpoint::save and checkpoint::load";

}  // namespace

OperatorTrigger::OperatorTrigger(torch::nn::Module& module, ShardedUnits& units, ShardedStep& step, Role role, std::optional<at::ScalarType> one_dtype)
    : module_(module), units_(units), step_(step), role_(role), one_dtype_(one_dtype), last_(units.size()) {
  find_storages();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (size_t flat = 0; flat < units.flats(unit).size(); ++flat) {
      const FlatParameters& parameters = units.flats(unit)[flat];
      for (size_t index = 0; index < parameters.parameters().size(); ++index) {
        parameters_.emplace(parameters.parameters()[index].tensor.unsafeGetTensorImpl(), UnitPlace{unit, flat, index});
      }
    }
  }
}

void OperatorTrigger::find_storages() {
  storages_.clear();
  storages_of_ = units_.times_taken_in();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t flat = 0; flat < units_.flats(unit).size(); ++flat) {
      const FlatParameters& parameters = units_.flats(unit)[flat];
      storages_.emplace(parameters.whole_storage(), Storage{{unit, flat, 0}, true});
      for (size_t index = 0; index < parameters.parameters().size(); ++index) {
        storages_.emplace(parameters.slice_storage(index), Storage{{unit, flat, index}, false});
      }
    }
  }
}

void OperatorTrigger::note(size_t unit) {
  if (std::ranges::find(met_, unit) == met_.end()) met_.push_back(unit);
}

void OperatorTrigger::meet(const at::Tensor& tensor, size_t argument) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == storages_.end()) {
    replaced_ = replaced_ || parameters_.contains(tensor.unsafeGetTensorImpl());
    return;
  }
  if (found->second.whole) return note(found->second.place.unit);
  const auto parameter = parameters_.find(tensor.unsafeGetTensorImpl());
  if (parameter == parameters_.end()) {
    touched_.push_back(tensor);
  } else {
    seen_.push_back({tensor, parameter->second, argument});
  }
}

void OperatorTrigger::meet(const c10::IValue& value, size_t argument) {
  if (value.isTensor()) {
    meet(value.toTensor(), argument);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) meet(tensor, argument);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) meet(item, argument);
  }
}

OperatorUse OperatorTrigger::use_of(const c10::FunctionSchema& schema, Arguments arguments) const {
  // What is written is this rank's rows, whatever else the operator takes: a whole that was gathered is given up again.
  if (std::ranges::any_of(seen_, [&](const Seen& seen) { return writes(schema, seen.argument); })) return OperatorUse::Slice;
  OperatorUse use = OperatorUse::Slice;
  for (const Seen& seen : seen_) {
    const OperatorUse own = operator_use(schema, arguments, seen.argument, seen.tensor);
    if (own == OperatorUse::Whole) return own;
    if (own != OperatorUse::Slice && use != OperatorUse::Unlike) use = own;
  }
  return use;
}

void OperatorTrigger::scan(Arguments arguments) {
  if (storages_of_ != units_.times_taken_in()) find_storages();
  met_.clear();
  seen_.clear();
  touched_.clear();
  replaced_ = false;
  for (size_t i = 0; i < arguments.size(); ++i) meet(arguments[i], i);
}

bool OperatorTrigger::has_all_rows(const UnitPlace& place) const {
  const FlatParameters& flat = units_.flats(place.unit)[place.flat];
  return flat.slice_sizes(place.index) == at::IntArrayRef(flat.layout().parameters[place.index].shape);
}

bool OperatorTrigger::is_on_one_rank(const UnitPlace& place) const {
  const UnitLayout& layout = units_.flats(place.unit)[place.flat].layout();
  const int64_t numel = layout.parameters[place.index].numel;
  if (!units_.are_cut() || numel == 0) return false;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    if (elements_of(layout, place.index, rank) == numel) return true;
  }
  return false;
}

/// Whether a rank that has all rows of the one parameter would find the others to be of its slice's shape, where this rank does not.
bool OperatorTrigger::looks_alike_elsewhere(Arguments arguments) const {
  if (seen_.size() != 1 || !is_on_one_rank(seen_.front().place)) return false;
  const auto& [tensor, place, argument] = seen_.front();
  const at::IntArrayRef whole = units_.flats(place.unit)[place.flat].layout().parameters[place.index].shape;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i == argument) continue;
    if (arguments[i].isTensorList()) return false;
    if (arguments[i].isTensor() && arguments[i].toTensor().defined() && arguments[i].toTensor().sizes() != whole) return false;
  }
  return true;
}

/// Without gradients and outside of a step: whether an operator that takes the parameter beside what has not its slice's shape may have the whole. Where one
/// rank has all rows, that rank sees a slice beside what has its shape, and asks for nothing: then there must be nothing to gather.
bool OperatorTrigger::agrees_on_whole(const c10::FunctionSchema& schema, Arguments arguments, bool forward) const {
  if (!looks_alike_elsewhere(arguments) || (forward && !writes(schema)) || units_.held(seen_.front().place.unit)) return true;
  const std::string& name = name_of(seen_.front().place);
  throw ConfigError(detail::concat("fully_shard: ", schema.name(), " was given '", name,
                                   "', of which this rank has a slice, beside a tensor of the whole's shape, and one rank has all rows of it: that rank cannot "
                                   "tell the two apart, and gathers "
                                   "nothing. What follows the parameters (a moving average) keep in slices, made of their detach() after fully_shard, or, of "
                                   "another module's parameters, wrap each of the two by a fully_shard of its own; before an evaluation say model->eval()"));
}

/// An evaluation that is under way, as far as anybody knows, until something is written to a slice or recorded for a backward pass.
bool OperatorTrigger::in_evaluation() const { return evaluating_ && !module_.is_training(); }

/// Whether what is made like a parameter is a part of a forward: libtorch writes `1 - weight` as empty_like(weight).fill_(1).sub_(weight). Zeros like what has
/// a gradient and was never updated are the state that an optimizer begins with.
bool OperatorTrigger::shapes_forward(const c10::FunctionSchema& schema) const {
  if (!in_evaluation()) return false;
  const at::Tensor& parameter = seen_.front().tensor;
  return schema.name() != "aten::zeros_like" || !parameter.grad().defined() || updated_.contains(parameter.unsafeGetTensorImpl());
}

/// libtorch's `1 - weight` and `1 / weight`, the first operators of a forward: empty_like(weight), fill_(1), and sub_ or div_ by the weight, one behind the
/// other. Nobody but libtorch has the tensor between them. Whether this is the third.
bool OperatorTrigger::follow_scalar(const c10::FunctionSchema& schema, Arguments arguments) {
  const ScalarOperator before = std::exchange(scalar_, {});
  const std::string& name = schema.name();
  const auto given = [&]() -> const c10::TensorImpl* { return arguments[0].isTensor() ? arguments[0].toTensor().unsafeGetTensorImpl() : nullptr; };
  if (name == "aten::empty_like" && seen_.size() == 1) {
    scalar_.parameter = seen_.front().tensor.unsafeGetTensorImpl();
  } else if (before.parameter != nullptr && name == "aten::fill_" && given() != nullptr && given()->sizes() == before.parameter->sizes() &&
             arguments[1].isScalar()) {
    scalar_ = {.parameter = before.parameter, .filled = given(), .value = arguments[1].toScalar()};
  } else if (before.filled != nullptr && (name == "aten::sub_" || name == "aten::div_") && given() == before.filled && seen_.size() == 1 &&
             seen_.front().tensor.unsafeGetTensorImpl() == before.parameter) {
    scalar_ = before;
    return true;
  }
  return false;
}

/// What libtorch has filled becomes as large as the whole.
void OperatorTrigger::fill_whole(const at::Tensor& filled) {
  const at::NoGradGuard no_grad;
  const auto& [unit, flat, index] = seen_.front().place;
  filled.set_(at::full(units_.flats(unit)[flat].layout().parameters[index].shape, scalar_.value, filled.options()));
}

bool OperatorTrigger::scalar_wants_whole(const c10::FunctionSchema& schema) const {
  if (at::GradMode::is_enabled()) return role_ == Role::Trigger || seen_.front().tensor.requires_grad();
  if (evaluating_ || !module_.is_training()) return true;
  if (role_ == Role::Trigger) refuse_unclear(schema);
  return false;
}

/// Where calls trigger, parameters are slices between them, for whoever looks.
bool OperatorTrigger::wants_whole(const c10::FunctionSchema& schema, Arguments arguments, OperatorUse use) const {
  if (use == OperatorUse::Shape) return shapes_forward(schema);
  if (scalar_.is_applied) return scalar_wants_whole(schema);
  if (role_ == Role::Trigger) return begins_forward(schema, arguments, use);
  if (use == OperatorUse::Whole || use == OperatorUse::Slice) return use == OperatorUse::Whole;
  if (use == OperatorUse::Clone || use == OperatorUse::Cast) return false;
  if (in_call() || step_.running()) return true;
  if (at::GradMode::is_enabled() && begins_between_calls(schema, arguments, use)) return true;
  if (use == OperatorUse::Unlike) return at::GradMode::is_enabled() || agrees_on_whole(schema, arguments, /*forward=*/!module_.is_training());
  if (use == OperatorUse::Alike) return !at::GradMode::is_enabled() && forward_in_evaluation(schema, arguments);
  return evaluating_ || (use == OperatorUse::Alone && !makes_views(schema) && !module_.is_training());
}

/// Whether an operator is one of a forward where autograd records what is made of a parameter and no call is under way: a method of the program's own uses it,
/// or a penalty in the loss. What may be a look at slices as well (one number for a log, a view, beside slices of before) is one of a forward that has begun.
/// The answer follows from the operator and the step, not from how much of the parameter this rank has.
bool OperatorTrigger::begins_between_calls(const c10::FunctionSchema& schema, Arguments arguments, OperatorUse use) const {
  if (std::ranges::none_of(seen_, [](const Seen& seen) { return seen.tensor.requires_grad(); })) return false;
  if (use == OperatorUse::Alone && !makes_views(schema)) return true;
  if (!step_.is_open()) return false;
  return use != OperatorUse::Alike || takes_parameters_alone(arguments) || means_whole_on_one_rank(schema);
}

/// And nothing else: an optimizer takes a parameter beside its gradient or its state, not beside another one.
bool OperatorTrigger::takes_parameters_alone(Arguments arguments) const {
  size_t tensors = 0;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensorList()) return false;
    tensors += argument.isTensor() && argument.toTensor().defined() ? 1 : 0;
  }
  return tensors == seen_.size();
}

/// Where nothing but operators shows what runs. Optimizers, and whoever prints or copies, work on slices: beside other slices and without gradients.
bool OperatorTrigger::begins_forward(const c10::FunctionSchema& schema, Arguments arguments, OperatorUse use) const {
  if (use == OperatorUse::Whole || use == OperatorUse::Slice) return use == OperatorUse::Whole;
  if (step_.running()) return true;
  if (at::GradMode::is_enabled()) {
    const bool under_way = units_.any_held() || step_.is_open();  // a frozen model's forward runs without a step
    if (use == OperatorUse::Look && !under_way) refuse_unclear(schema);
    if (use == OperatorUse::Alike && writes(schema)) refuse_made_by_slices(schema);
    return true;
  }
  const bool forward = evaluating_ || !module_.is_training();  // as far as anybody knows
  switch (use) {
    case OperatorUse::Look:
      if (evaluating_) return true;
      refuse_unclear(schema);
    case OperatorUse::Clone:
      refuse_unclear(schema);
    case OperatorUse::Alike: {
      const bool several = takes_parameters_alone(arguments);
      if (several && !forward) refuse_unclear(schema);
      return several || forward_in_evaluation(schema, arguments);
    }
    case OperatorUse::Unlike:
      return agrees_on_whole(schema, arguments, !module_.is_training());
    default:
      if (!forward) refuse_unclear(schema);
      return true;
  }
}

/// Whether, where the parameter lies on one rank as a whole, an operator that takes it beside what has its slice's shape is one of an evaluation: an optimizer
/// takes it beside its gradient, a moving average is written.
bool OperatorTrigger::forward_in_evaluation(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (module_.is_training() || writes(schema)) return false;
  if (std::ranges::any_of(arguments, [this](const c10::IValue& argument) { return is_gradient(argument); })) return false;
  if (means_whole_on_one_rank(schema)) return true;
  if (units_.are_cut()) refuse_made_by_slices(schema);
  return false;
}

/// An operator takes the parameter beside what has its slice's shape, where a forward may be. A rank that has all rows cannot tell a slice from the whole:
/// there it is a forward, and nothing else may be meant anywhere.
bool OperatorTrigger::means_whole_on_one_rank(const c10::FunctionSchema& schema) const {
  if (seen_.size() != 1 || !is_on_one_rank(seen_.front().place)) return false;
  if (!has_all_rows(seen_.front().place)) refuse_unclear(schema);
  return true;
}

const std::string& OperatorTrigger::name_of(const UnitPlace& place) const { return units_.flats(place.unit)[place.flat].parameters()[place.index].name; }

void OperatorTrigger::refuse_unclear(const c10::FunctionSchema& schema) const {
  const std::string& name = name_of(seen_.front().place);
  require(schema.name() != "aten::clone", "fully_shard: aten::clone was given '", name,
          "', of which this rank has a slice, where no forward runs. A copy of the model (model->clone()) is made before fully_shard, or after "
          "unshard(model), which brings the slices together; a copy of this rank's slice is detach().clone()");
  throw ConfigError(
      detail::concat("fully_shard: ", schema.name(), " was given '", name,
                     "', of which this rank has a slice, where nothing tells a forward from an optimizer, a copy or a line for a log. For the slice take its "
                     "detach(); in a forward let the first operator be one with the module's input, and before an evaluation say model->eval()"));
}

/// A forward made a tensor as large as the parameter seemed to it: of a slice.
void OperatorTrigger::refuse_made_by_slices(const c10::FunctionSchema& schema) const {
  throw ConfigError(detail::concat(
      "fully_shard: ", schema.name(), " was given '", name_of(seen_.front().place),
      "', of which this rank has a slice, beside a tensor of the slice's shape. For a line of a log, or what follows the parameters, take its detach(). In a "
      "forward the other was made by the slice's sizes(): let the first operator be one with the module's input, and make it like the parameter (ones_like, "
      "zeros_like), before an evaluation behind model->eval()"));
}

/// Whether an operator that is no layer takes `handle` beside values of another shape, as a forward does and an optimizer in a loop does not.
bool OperatorTrigger::stretches(Arguments arguments, const at::Tensor& handle) const {
  if (!units_.are_cut() || (!at::GradMode::is_enabled() && module_.is_training())) return false;
  return std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const at::Tensor& other = argument.toTensor();
    return other.is_floating_point() && other.numel() > 1 && other.sizes() != handle.sizes();
  });
}

/// A handle on a slice (detach(), data()) is what its maker asked for; a layer over it is not.
void OperatorTrigger::refuse_layers_over_slices(const c10::FunctionSchema& schema, Arguments arguments) const {
  for (const at::Tensor& handle : touched_) {
    if (!is_layer(schema.name()) && !stretches(arguments, handle)) continue;
    const std::optional<UnitPlace> place = sliced_parameter(handle);
    require(!place, "fully_shard: ", schema.name(), " was given a handle (detach(), data()) on '", place ? name_of(*place) : "",
            "' that was made outside of a forward, when the parameter was this rank's slice; make it in forward, behind an operator with the module's input, "
            "or, where one module's parameters update another's between steps (a moving average), wrap each of the two by a fully_shard of its own");
  }
}

/// Which parameter's slice `tensor` is, or is a handle on.
std::optional<UnitPlace> OperatorTrigger::sliced_parameter(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == storages_.end() || found->second.whole) return std::nullopt;
  const UnitPlace& place = found->second.place;
  if (tensor.storage_offset() != 0 || tensor.sizes() != units_.flats(place.unit)[place.flat].slice_sizes(place.index)) return std::nullopt;
  return place;
}

bool OperatorTrigger::same_rows(const UnitPlace& a, const UnitPlace& b) const {
  const UnitLayout &of_a = units_.flats(a.unit)[a.flat].layout(), &of_b = units_.flats(b.unit)[b.flat].layout();
  for (int rank = 0; rank < of_a.ranks; ++rank) {
    if (rows_of(of_a, a.index, rank) != rows_of(of_b, b.index, rank)) return false;
  }
  return true;
}

/// Two slices of parameters (a teacher's that follows a student's) may be other rows of theirs, even where their shapes agree.
void OperatorTrigger::refuse_other_rows(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!units_.are_cut() || seen_.size() + touched_.size() < 2) return;
  std::optional<UnitPlace> first;
  for (const c10::IValue& argument : arguments) {
    const auto place = argument.isTensor() ? sliced_parameter(argument.toTensor()) : std::nullopt;
    if (!place) continue;
    require(
        !first || same_rows(*first, *place), "fully_shard: ", schema.name(), " was given the slices of '", first ? name_of(*first) : "", "' and '",
        name_of(*place),
        "', which are other rows on some rank, for the units that they lie in differ; let the modules whose parameters follow each other be units of the same "
        "parameters (wrap), or wrap each by a fully_shard of its own");
    if (!first) first = place;
  }
}

/// What runs without gradients may be the inside of a torch::autograd::Function. Then autograd has taken down already of what shape its gradient will be.
void OperatorTrigger::refuse_functions_over_slices() const {
  for (const auto& [tensor, place, argument] : seen_) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    if (!accumulator || has_all_rows(place)) continue;
    const FlatParameters& flat = units_.flats(place.unit)[place.flat];
    const at::IntArrayRef slice = flat.slice_sizes(place.index);
    const auto noted = accumulator->input_metadata(0).shape_as_dim_vector();
    require(noted != c10::fromIntArrayRefSlow(slice), "fully_shard: '", name_of(place),
            "' was given to a torch::autograd::Function when it was this rank's slice ", slice, " of ",
            at::IntArrayRef(flat.layout().parameters[place.index].shape),
            ", before any operator of the forward; let an operator use it, or the module's input with it, before");
  }
}

/// torch::nn::init::orthogonal_ draws beside its parameter, and copies what it made of that.
bool OperatorTrigger::copies_drawn(const c10::FunctionSchema& schema, Arguments arguments) {
  if (schema.name() == "aten::linalg_qr" && !at::GradMode::is_enabled()) factored_ = arguments[0].toTensor().numel();
  if (schema.name() != "aten::copy_" || factored_ == 0) return false;
  return std::exchange(factored_, 0) == arguments[0].toTensor().numel();
}

/// Every rank would draw its own rows from the start of one sequence: not the values of one process, and the same rows again where ranks are seeded alike.
void OperatorTrigger::refuse_draws(const c10::FunctionSchema& schema, Arguments arguments) {
  const bool copied = copies_drawn(schema, arguments);
  if ((!copied && !draws_in_place(schema.name())) || !units_.are_cut()) return;
  const at::Tensor& drawn = arguments[0].toTensor();
  const auto found = parameters_.find(drawn.unsafeGetTensorImpl());
  std::optional<UnitPlace> place = found == parameters_.end() ? std::nullopt : std::optional(found->second);
  if (copied) place = memory_of(drawn);
  require(!place || drawn.is_meta(), "fully_shard: ", copied ? "an orthogonal matrix of this rank's own (torch::nn::init::orthogonal_)" : schema.name(),
          copied ? " was copied into '" : " was given '", place ? name_of(*place) : "",
          "', of which each rank has a slice, and would draw other values than one process does, the same ones on ranks that are seeded alike; initialize in "
          "on_meta (its second argument, nn::set_init) and materialize, or before fully_shard, or after unshard",
          copied ? "" : ". For this rank's rows alone draw into parameter.detach()");
}

/// Which parameter `tensor` lies in, be it the slice, in whatever shape, or the whole.
std::optional<UnitPlace> OperatorTrigger::memory_of(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == storages_.end()) return std::nullopt;
  return found->second.whole ? whole_parameter(tensor) : std::optional(found->second.place);
}

/// A module that sets its own parameter in forward (data-dependent initialization) has values for all of it, and this rank has some rows; and in a call it
/// writes what is gathered, which is thrown away.
void OperatorTrigger::refuse_whole_values(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!units_.are_cut() || !writes(schema) || schema.name() == "aten::set_") return;  // set_ gives other memory, which is taken in
  constexpr const char* between_steps =
      "between steps write this rank's rows (nn::slice_of), or the whole before fully_shard or after unshard; where one module's parameters update another's "
      "(a moving average), wrap each of the two by a fully_shard of its own, so that like parameters have like rows; ";
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !writes(schema, i)) continue;
    const std::optional<UnitPlace> whole = whole_parameter(arguments[i].toTensor());
    const std::optional<UnitPlace> place = whole ? whole : sliced_parameter(arguments[i].toTensor());
    if (!place || has_all_rows(*place)) continue;
    const at::IntArrayRef shape = units_.flats(place->unit)[place->flat].layout().parameters[place->index].shape;
    const bool of_all = std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
      return argument.isTensor() && argument.toTensor().defined() && argument.toTensor().sizes() == shape && !memory_of(argument.toTensor());
    });
    require(!of_all || schema.name() != "aten::addcdiv_", "fully_shard: ", schema.name(), " writes '", name_of(*place),
            "', of which this rank has a slice, from ", kWholeState);
    require(!of_all && !(whole && in_call()), "fully_shard: ", schema.name(), " writes '", name_of(*place), "' of shape ", shape,
            ", of which this rank has the slice ", units_.flats(place->unit)[place->flat].slice_sizes(place->index), ": ", in_call() ? "" : between_steps,
            "a module that sets its own parameters in forward (data-dependent initialization) is given its first batch before fully_shard");
  }
}

/// libtorch's optimizers begin with their state: they add a gradient to it, or with weight decay the sum of a gradient and its parameter. State that was made
/// of whole parameters would end in a word about two sizes, or, where a slice of one row fits them, in sums that nobody meant.
void OperatorTrigger::refuse_whole_state(const c10::FunctionSchema& schema, Arguments arguments) const {
  const std::string& name = schema.name();
  if ((name != "aten::add_" && name != "aten::addcmul_") || at::GradMode::is_enabled() || in_call() || !units_.are_cut()) return;
  if (!arguments[0].isTensor() || !arguments[1].isTensor()) return;
  const at::Tensor &state = arguments[0].toTensor(), &added = arguments[1].toTensor();
  if (state.sizes() == added.sizes() || memory_of(state) || memory_of(added)) return;
  const bool fits = at::is_expandable_to(added.sizes(), state.sizes());
  for (const auto& [parameter, place] : parameters_) {
    const FlatParameters& flat = units_.flats(place.unit)[place.flat];
    const at::IntArrayRef whole = flat.layout().parameters[place.index].shape, slice = flat.slice_sizes(place.index);
    if (state.sizes() != whole || added.sizes() != slice) continue;
    const at::Tensor& gradient = parameter->grad();
    if (fits && !(gradient.defined() && gradient.is_alias_of(added))) continue;
    throw ConfigError(detail::concat("fully_shard: ", name, " adds this rank's slice ", slice, " of the gradient of '", name_of(place),
                                     "' to what has the whole's shape, ", whole, ": ", kWholeState));
  }
}

bool OperatorTrigger::is_gradient(const c10::IValue& value) const {
  const auto is = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return false;
    return std::ranges::any_of(parameters_, [&](const auto& item) {
      const at::Tensor& gradient = item.first->grad();
      return gradient.defined() && gradient.has_storage() && gradient.storage().is_alias_of(tensor.storage());
    });
  };
  if (value.isTensor()) return is(value.toTensor());
  if (!value.isTensorList()) return false;
  const std::vector<at::Tensor> list = value.toTensorVector();
  return std::ranges::any_of(list, is);
}

/// An optimizer would say that two sizes differ, and not why.
void OperatorTrigger::refuse_whole_gradients(Arguments arguments) const {
  for (const c10::IValue& argument : arguments) {
    const auto place = argument.isTensor() ? sliced_parameter(argument.toTensor()) : std::nullopt;
    if (!place) continue;
    const FlatParameters& flat = units_.flats(place->unit)[place->flat];
    const nn::NamedParameter& parameter = flat.parameters()[place->index];
    refuse_whole_gradient(parameter, parameter.tensor.grad(), flat.slice_sizes(place->index));
  }
}

/// clip_grad_norm_ of libtorch takes a norm of each gradient, or the largest absolute value.
void OperatorTrigger::refuse_local_norms(const c10::FunctionSchema& schema, Arguments arguments) {
  const bool absolute = std::exchange(absolute_, false);
  const std::string& name = schema.name();
  const bool norm = name == "aten::norm" || name == "aten::linalg_vector_norm" || name == "aten::_foreach_norm";
  const bool largest = absolute && name == "aten::max" && arguments.size() == 1;
  if (!norm && name != "aten::abs" && !largest) return;
  if (!units_.are_cut() || !step_.looped() || arguments.empty()) return;
  if (name == "aten::abs") {
    absolute_ = is_gradient(arguments[0]);
    return;
  }
  require(
      !largest && !is_gradient(arguments[0]), "fully_shard: ", name,
      " was given a gradient, of which this rank has a slice: a norm of slices, such as torch::nn::utils::clip_grad_norm_ takes, is another on each rank; call "
      "tessera::clip_grad_norm(sharded, max_norm), which sums over the ranks and returns the norm");
}

/// torch::optim::LBFGS lays all gradients end to end and takes dot products of that.
void OperatorTrigger::refuse_flat_gradients(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (schema.name() != "aten::cat" || !units_.are_cut() || !step_.looped()) return;
  const std::vector<at::Tensor> list = arguments[0].toTensorVector();
  int64_t elements = 0, given = 0;
  for (const auto& item : parameters_) elements += item.first->grad().defined() ? item.first->grad().numel() : 0;
  for (const at::Tensor& part : list) given += is_gradient(part) ? part.numel() : 0;  // of parameters without a gradient it makes zeros
  const bool all = elements > 0 && given >= elements;
  require(!all,
          "fully_shard: aten::cat was given the gradients of all parameters, of which this rank has slices: torch::optim::LBFGS, and whoever takes products of "
          "whole gradients, would go in a direction and by steps of its own on each rank; use an optimizer that goes element by element (Adam, AdamW, SGD, "
          "Adagrad, RMSprop), or DistributedDataParallel with a closure that returns the loss of all ranks; for a copy of this rank's slices clone them first");
}

/// The parameter that `tensor` is, or is an alias of (data(), which optimizers take), while parameters show their whole shapes.
std::optional<UnitPlace> OperatorTrigger::whole_parameter(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == storages_.end() || !found->second.whole) return std::nullopt;
  const auto [unit, flat, first] = found->second.place;
  const auto index = units_.flats(unit)[flat].find_whole(tensor);
  return index ? std::optional(UnitPlace{unit, flat, *index}) : std::nullopt;
}

/// Whether an operator whose parameters show their whole shapes means slices: it writes one, or takes one, as no forward does, beside what has the shape of its
/// slice, or puts another tensor in its place. A rank that has all rows of a parameter cannot tell by shapes: an optimizer takes it beside its gradient, what
/// follows it is written. And it makes zeros like a parameter that has a gradient: the state that an optimizer begins with.
bool OperatorTrigger::means_slices(const c10::FunctionSchema& schema, Arguments arguments) const {
  std::vector<at::Tensor> others;
  std::vector<UnitPlace> parameters;
  bool written = false;
  const auto look = [&](const at::Tensor& tensor, size_t argument) {
    if (!tensor.defined()) return;
    const auto place = whole_parameter(tensor);
    if (!place) return others.push_back(tensor);
    written = written || writes(schema, argument) || (argument == 0 && replaces(schema.name()));
    parameters.push_back(*place);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) look(arguments[i].toTensor(), i);
    if (!arguments[i].isTensorList()) continue;
    for (const at::Tensor& tensor : arguments[i].toTensorVector()) look(tensor, i);
  }
  if (written || is_forward(schema.name())) return written;
  if (schema.name() == "aten::zeros_like" && parameters.size() == 1) {
    const auto& [unit, flat, index] = parameters.front();
    const FlatParameters& of = units_.flats(unit)[flat];
    const at::Tensor& gradient = of.parameters()[index].tensor.grad();
    return gradient.defined() && gradient.sizes() == of.slice_sizes(index);
  }
  for (const UnitPlace& place : parameters) {
    if (!writes(schema)) refuse_fitting_both(schema, place, others);
  }
  return std::ranges::any_of(parameters, [&](const UnitPlace& place) {
    const at::IntArrayRef sizes = units_.flats(place.unit)[place.flat].slice_sizes(place.index);
    const bool tells = writes(schema) || !units_.are_cut() || !has_all_rows(place);
    return std::ranges::any_of(others, [&](const at::Tensor& other) { return other.sizes() == sizes && (tells || is_gradient(other)); });
  });
}

namespace {
std::vector<int64_t> slice_shape(const UnitLayout& layout, size_t index, int rank) {
  std::vector<int64_t> shape = layout.parameters[index].shape;
  const int64_t rows = rows_of(layout, index, rank).second;
  if (!shape.empty()) {
    shape[0] = rows;
  } else if (rows == 0) {
    shape = {0};
  }
  return shape;
}
}  // namespace

/// Of one that writes nothing, beside a whole parameter of which some rank's slice fits the whole as well (one row): what has the shape of any rank's slice may
/// be meant for either there. Whether it is refused goes by the shapes of all ranks' slices, not by what fits here, so that ranks with rows of their own
/// number each refuse their slice.
void OperatorTrigger::refuse_fitting_both(const c10::FunctionSchema& schema, const UnitPlace& place, const std::vector<at::Tensor>& others) const {
  const FlatParameters& flat = units_.flats(place.unit)[place.flat];
  const std::vector<int64_t>& whole = flat.layout().parameters[place.index].shape;
  if (!units_.are_cut()) return;
  std::vector<std::vector<int64_t>> slices;
  for (int rank = 0; rank < flat.layout().ranks; ++rank) slices.push_back(slice_shape(flat.layout(), place.index, rank));
  std::erase(slices, whole);
  const auto fits = std::ranges::find_if(slices, [&](const std::vector<int64_t>& slice) { return at::is_expandable_to(slice, whole); });
  if (fits == slices.end()) return;
  for (const at::Tensor& other : others) {
    require(is_gradient(other) || std::ranges::find(slices, other.sizes().vec()) == slices.end(), "fully_shard: within a forward, without gradients, ",
            schema.name(), " was given '", name_of(place), "' of shape ", at::IntArrayRef(whole), " beside a tensor of shape ", other.sizes(),
            ", which is that of one rank's slice, too, and a slice of shape ", at::IntArrayRef(*fits),
            " fits the whole as well: nobody can tell which of the two is meant. For the whole, give the tensor the whole's shape "
            "(other.expand(weight.sizes())); for slices, compute behind the backward pass, or outside of a forward");
  }
}

/// An optimizer came after a forward whose backward has not come: what it was given while parameters were whole becomes slices.
void OperatorTrigger::leave_forward(torch::jit::Stack& stack, size_t first) {
  std::vector<std::pair<size_t, UnitPlace>> aliases;
  for (size_t i = first; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || parameters_.contains(stack[i].toTensor().unsafeGetTensorImpl())) continue;
    if (const auto place = whole_parameter(stack[i].toTensor())) aliases.emplace_back(i, *place);
  }
  step_.leave();
  for (const auto& [i, place] : aliases) stack[i] = units_.flats(place.unit)[place.flat].slice_view(place.index);
}

/// libtorch would say that two dtypes differ, and not which of them is ours.
void OperatorTrigger::check_dtypes(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!one_dtype_ || !needs_one_dtype(schema.name()) || met_.empty()) return;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (!tensor.is_floating_point() || tensor.scalar_type() == *one_dtype_ || at::autocast::is_autocast_enabled(tensor.device().type())) continue;
    throw ConfigError(detail::concat("fully_shard: ", schema.name(), " got an input of ", tensor.scalar_type(), " beside a parameter of unit '",
                                     units_.name(met_.front()), "', which is gathered in param_dtype = ", *one_dtype_,
                                     "; cast what the model is given, as in model->forward(x.to(at::k", *one_dtype_, ")), or leave param_dtype out"));
  }
}

c10::IValue OperatorTrigger::with_wholes(const c10::IValue& value) const {
  const auto whole = [&](const at::Tensor& tensor) {
    const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
    return found == parameters_.end() ? tensor : units_.flats(found->second.unit)[found->second.flat].whole_view(found->second.index);
  };
  if (value.isTensor()) return whole(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(whole(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional(whole(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

void OperatorTrigger::begin_forward(torch::jit::Stack& stack, size_t first) {
  const bool step = at::GradMode::is_enabled() && std::ranges::any_of(parameters_, [](const auto& item) { return item.first->requires_grad(); });
  for (const Seen& seen : seen_) note(seen.place.unit);
  if (step && !step_.running()) step_.begin(Drive::Loop);
  if (step) return step_.resume();
  if (in_call()) return;  // acquired in place, and given back when the call ends
  refuse_functions_over_slices();
  evaluating_ = !at::GradMode::is_enabled();
  for (size_t i = first; i < stack.size(); ++i) stack[i] = with_wholes(stack[i]);
}

/// Parameters that the operator writes as slices. Of others that it takes, it may be one rank alone that reads them.
std::vector<at::Tensor> OperatorTrigger::written_slices(const c10::FunctionSchema& schema) const {
  std::vector<at::Tensor> written;
  for (const Seen& seen : seen_) {
    if (writes(schema, seen.argument)) written.push_back(seen.tensor);
  }
  return written;
}

/// Whether no step runs, and every rank can tell that its operator was given slices.
bool OperatorTrigger::means_slices_between_steps(OperatorUse use) const {
  // A rank that has all rows of a parameter cannot tell whether it was read as a slice: so no rank lets go for that.
  const bool alike = use == OperatorUse::Alike && std::ranges::all_of(seen_, [this](const Seen& seen) { return is_on_one_rank(seen.place); });
  // Nor for a line of one rank's log where all units wait for backward, but for a write.
  const bool awaits_backward = units_.are_together() && step_.is_open();
  return !step_.running() && !in_call() && !alike && !awaits_backward;
}

void OperatorTrigger::before(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  // What a module that is computed again only looks at, without gradients, is no part of the pass that computes it.
  const bool looks = nn::recomputing() && !at::GradMode::is_enabled() && !step_.in_backward();
  const bool backward = nn::backward_pass() >= 0 && !looks;
  if (!backward) step_.recover();
  // Backward may have operators that take nothing of ours and bring gradients of ours all the same: of an embedding, of a layer whose input needs none.
  if (backward && std::exchange(backward_pass_, nn::backward_pass()) != nn::backward_pass()) step_.foresee_sums();
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack.size() - count;
  const Arguments arguments(stack.data() + first, count);
  if (!backward) refuse_local_norms(schema, arguments);
  if (!backward) refuse_flat_gradients(schema, arguments);
  if (!backward) refuse_whole_state(schema, arguments);
  if (!backward) refuse_draws(schema, arguments);
  scan(arguments);
  if (replaced_ && !backward && !replaces(schema.name())) {  // what is put there now may be what a refusal asked for
    if (step_.running() && !step_.driven()) step_.leave();
    for (size_t unit = 0; unit < units_.size(); ++unit) units_.take_in(unit);
    scan(arguments);
  }
  if (evaluating_ && !backward && at::GradMode::is_enabled()) {  // evaluation is over
    evaluating_ = false;
    if (!step_.running()) units_.release_all();
  }
  if (met_.empty() && seen_.empty() && touched_.empty()) {
    follow_scalar(schema, arguments);
    return;
  }
  require(schema.name() != "aten::embedding_renorm_",
          "fully_shard: an embedding with max_norm writes rows of its weight in forward, which on each rank holds some of them; leave max_norm out");
  const OperatorUse use = use_of(schema, arguments);
  if (backward) {
    if (met_.empty() && (seen_.empty() || use == OperatorUse::Slice || use == OperatorUse::Shape)) return;
    step_.begin_backward();
    for (const Seen& seen : seen_) note(seen.place.unit);
    return use_met();
  }
  if (!touched_.empty() && !in_call()) refuse_layers_over_slices(schema, arguments);
  scalar_.is_applied = follow_scalar(schema, arguments);
  if (!seen_.empty() && wants_whole(schema, arguments, use)) {
    if (scalar_.is_applied) fill_whole(arguments[0].toTensor());
    begin_forward(stack, first);
  } else if (!seen_.empty() || !touched_.empty()) {
    refuse_other_rows(schema, arguments);
    if (writes(schema)) {
      refuse_whole_gradients(arguments);
      const std::vector<at::Tensor> written = written_slices(schema);
      for (const at::Tensor& slice : written) {
        if (slice.grad().defined()) updated_.insert(slice.unsafeGetTensorImpl());
      }
      if (!written.empty() || !touched_.empty()) step_.close();
    }
    if (means_slices_between_steps(use)) {  // what is held is stale, if the slice is written
      units_.release_all();
      evaluating_ = false;
    }
    if (in_own_loop() && (use == OperatorUse::Slice || use == OperatorUse::Shape)) step_.leave();
  } else if (in_own_loop() && !at::GradMode::is_enabled() && means_slices(schema, arguments)) {
    refuse_whole_values(schema, arguments);
    return leave_forward(stack, first);
  }
  refuse_whole_values(schema, arguments);
  check_dtypes(schema, Arguments(stack.data() + first, count));
  try {
    use_met();
  } catch (...) {  // the forward ends here, and shows slices to whoever mends what was refused
    if (in_own_loop()) step_.leave();
    throw;
  }
}

bool OperatorTrigger::comes_soon(size_t unit) const {
  if (!step_.running()) return false;
  for (size_t ahead = 0; ahead < 2; ++ahead) {
    const size_t* next = step_.order().next(ahead);
    if (next && *next == unit) return true;
  }
  return false;
}

void OperatorTrigger::use_met() {
  if (met_.empty()) return;
  if (role_ == Role::Trigger) return use_in_step();
  for (const size_t unit : met_) {
    if (units_.held(unit)) continue;
    if (step_.running()) {
      step_.use(unit, step_.order());
    } else {
      acquire_for_operator(unit);
    }
  }
}

/// Outside of a step and of calls the operator has been given the whole: parameters stay slices.
void OperatorTrigger::acquire_for_operator(size_t unit) {
  step_.agree_on(unit);
  units_.acquire(unit);
  if (in_call()) return;
  units_.settle();
  for (size_t any = 0; any < units_.size(); ++any) units_.show_slices(any);
}

void OperatorTrigger::use_in_step() {
  if (pass_ != step_.pass()) {
    pass_ = step_.pass();
    last_ = units_.size();
  }
  const bool same = met_.size() == 1 && met_.front() == last_;
  if (same && units_.held(last_)) return;
  if (!same) {
    for (const size_t unit : met_) {
      if (!step_.running()) continue;
      step_.agree_on(unit, step_.order());
      step_.order().saw(unit);
    }
    last_ = met_.back();
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_.held(unit) && std::ranges::find(met_, unit) == met_.end() && !comes_soon(unit)) units_.release_for_now(unit);
    }
  }
  if (!step_.running()) {
    for (const size_t unit : met_) acquire_for_operator(unit);
    return;
  }
  for (const size_t unit : met_) units_.acquire(unit);
  units_.prefetch(step_.order());
}

}  // namespace tessera
