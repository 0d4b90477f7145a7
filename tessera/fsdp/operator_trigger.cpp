#include "tessera/fsdp/operator_trigger.h"

#include <algorithm>
#include <utility>

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/saved_tensors.h"

// Of a plain module only its operators can be seen, and of an operator only its arguments. Storages say which unit: all views of a whole share one. Whether a
// slice or the whole is meant has to come out alike on all ranks, for a rank that gathers alone waits for ever; and a rank that happens to have all rows of a
// parameter sees equal shapes where others see different ones. Hence the questions about parameters that lie on one rank: what such a rank cannot tell, nobody
// may act on. What remains unclear is refused, with the line to change.

namespace tessera {
OperatorTrigger::OperatorTrigger(torch::nn::Module& module, ShardedUnits& units, ShardedStep& step, Role role, std::optional<at::ScalarType> one_dtype)
    : module_(module), units_(units), step_(step), role_(role), one_dtype_(one_dtype), tensors_(units), guards_(module, tensors_, step), last_(units.size()) {}

void OperatorTrigger::note(size_t unit) {
  if (std::ranges::find(met_, unit) == met_.end()) met_.push_back(unit);
}

void OperatorTrigger::meet(const at::Tensor& tensor, const OperandPlace& operand) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const UnitTensors::Storage* const storage = tensors_.storage_of(tensor);
  const UnitPlace* const parameter = tensors_.parameter(tensor);
  if (!storage) {
    replaced_ = replaced_ || parameter;
    const SliceNotes::Note* const note = tensors_.noted(tensor);
    rows_ = rows_ || note;
    noted_ = noted_ || (note && tensors_.is_own(*note));
  } else if (storage->whole) {
    note(storage->place.unit);
  } else if (parameter) {
    seen_.push_back({tensor, *parameter, operand});
  } else {
    touched_.push_back(tensor);
  }
}

OperatorUse OperatorTrigger::use_of(const c10::FunctionSchema& schema, Arguments arguments) const {
  // What is written is this rank's rows, whatever else the operator takes: a whole that was gathered is given up again.
  if (std::ranges::any_of(seen_, [&](const SeenSlice& seen) { return writes(schema, seen.operand.argument); })) return OperatorUse::Slice;
  OperatorUse use = OperatorUse::Slice;
  for (const SeenSlice& seen : seen_) {
    const OperatorUse own = operator_use(schema, arguments, seen.operand, seen.tensor);
    if (own == OperatorUse::Whole) return own;
    if (own != OperatorUse::Slice && use != OperatorUse::Unlike) use = own;
  }
  return use;
}

void OperatorTrigger::scan(Arguments arguments) {
  tensors_.refresh();
  met_.clear();
  seen_.clear();
  touched_.clear();
  replaced_ = noted_ = rows_ = false;
  for_each_operand(arguments, [this](const at::Tensor& tensor, const OperandPlace& operand) { meet(tensor, operand); });
}

/// Whether a rank that has all rows of the parameters would find what stands beside them to be of its slices' shapes, where this rank does not.
bool OperatorTrigger::looks_alike_elsewhere(Arguments arguments) const {
  std::optional<int> one_rank;
  for (const SeenSlice& seen : seen_) {
    const std::optional<int> rank = tensors_.rank_with_all_rows(seen.place);
    if (!rank || (one_rank && *one_rank != *rank)) return false;
    one_rank = rank;
    const at::IntArrayRef whole = tensors_.whole_sizes(seen.place);
    if (std::ranges::any_of(tensors_beside(arguments, seen.operand), [&](const at::Tensor& other) { return other.sizes() != whole; })) return false;
  }
  return one_rank.has_value();
}

/// Whether what stands beside the parameters has the shapes of some other rank's slices, cut as they are. Where nothing does, theirs alone may agree on such a
/// rank, which behind eval() computes with the wholes all the same.
bool OperatorTrigger::is_beside_rows_of_another(Arguments arguments) const {
  const bool alone = takes_parameters_alone(arguments);
  if (!tensors_.are_cut() || (alone && !module_.is_training())) return false;
  const int ranks = tensors_.flat(seen_.front().place).layout().ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool all = std::ranges::all_of(seen_, [&](const SeenSlice& seen) {
      const std::vector<int64_t> slice = tensors_.slice_of_rank(seen.place, rank);
      if (alone) return slice == tensors_.slice_of_rank(seen_.front().place, rank);
      return slice != tensors_.whole_sizes(seen.place) && std::ranges::all_of(tensors_beside(arguments, seen.operand), [&](const at::Tensor& other) {
               return tensors_.parameter(other) || other.sizes() == slice;
             });
    });
    if (all) return true;
  }
  return false;
}

/// Without gradients and outside of a step: whether an operator that takes the parameter beside what has not its slice's shape may have the whole. A rank whose
/// slice has that shape decides by forward_beside_alike, and where it refuses, all do. Where one rank has all rows, that rank sees a slice beside what has its
/// shape, and asks for nothing: then there must be nothing to gather.
bool OperatorTrigger::agrees_on_whole(const c10::OperatorHandle& op, Arguments arguments) const {
  const c10::FunctionSchema& schema = op.schema();
  const bool training = module_.is_training(), forward = !training || forward_goes_on();
  if (noted_ && (training || writes(schema))) return false;  // lerp(average, parameter, a tensor of one number)
  if (!forward_goes_on() && !writes(schema) && (training || goes_by_elements(op)) && is_beside_rows_of_another(arguments)) {
    if (training) refuse_unclear(schema);
    refuse_made_by_slices(schema);
  }
  if (!looks_alike_elsewhere(arguments) || (forward && !writes(schema)) || units_.held(seen_.front().place.unit)) return true;
  const std::string& name = tensors_.name(seen_.front().place);
  throw ConfigError(detail::concat("fully_shard: ", schema.name(), " was given '", name,
                                   "', of which this rank has a slice, beside a tensor of the whole's shape, and one rank has all rows of it: that rank cannot "
                                   "tell the two apart, and gathers "
                                   "nothing. What follows the parameters (a moving average) keep in slices, made of their detach() after fully_shard, or, of "
                                   "another module's parameters, wrap each of the two by a fully_shard of its own; before an evaluation say model->eval()"));
}

/// A forward without gradients that is under way, as far as anybody knows, until something is written to a slice or recorded for a backward pass, or the
/// module's mode is another.
bool OperatorTrigger::in_evaluation() const { return evaluating_ && module_.is_training() == evaluates_in_training_; }

/// An optimizer updates `given`, a parameter or a handle on one, as far as anybody knows. `hides_writes`: the parameter's version will not show it (data()).
void OperatorTrigger::note_update(const at::Tensor& given, bool hides_writes) {
  const std::optional<UnitPlace> place = tensors_.find_memory(given);
  if (!place) return;
  const at::Tensor& parameter = tensors_.named(*place).tensor;
  if (!parameter.grad().defined() || was_updated(parameter)) return;
  updated_[parameter.unsafeGetTensorImpl()] = parameter.unsafeGetTensorImpl()->version_counter().current_version() - (hides_writes ? 1 : 0);
}

void OperatorTrigger::note_updates(const c10::FunctionSchema& schema, Arguments arguments) {
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& place) {
    if (writes(schema, place.argument)) note_update(tensor, /*hides_writes=*/true);
  });
}

bool OperatorTrigger::was_updated(const at::Tensor& parameter) const {
  const auto found = updated_.find(parameter.unsafeGetTensorImpl());
  return found != updated_.end() && found->second != parameter.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Zeros like what has a gradient and was never updated are the state that an optimizer begins with, and so are those for which libtorch's optimizers say how
/// they lie in memory, at any time.
bool OperatorTrigger::begins_state(const c10::FunctionSchema& schema, Arguments arguments, const at::Tensor& parameter) const {
  if (schema.name() != "aten::zeros_like" || !parameter.grad().defined()) return false;
  const auto lies = schema.argumentIndexWithName("memory_format");
  return !was_updated(parameter) || (lies && !arguments[static_cast<size_t>(*lies)].isNone());
}

/// Whether what is made like a parameter is a part of a forward: libtorch writes `1 - weight` as empty_like(weight).fill_(1).sub_(weight).
bool OperatorTrigger::shapes_forward(const c10::FunctionSchema& schema, Arguments arguments) const {
  return in_evaluation() && !begins_state(schema, arguments, seen_.front().tensor);
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
  filled.set_(at::full(tensors_.whole_sizes(seen_.front().place), scalar_.value, filled.options()));
}

bool OperatorTrigger::scalar_wants_whole(const c10::FunctionSchema& schema) const {
  if (at::GradMode::is_enabled()) return role_ == Role::Trigger || seen_.front().tensor.requires_grad();
  if (in_evaluation() || !module_.is_training()) return true;
  if (role_ == Role::Trigger) refuse_unclear(schema);
  return false;
}

/// Where calls trigger, parameters are slices between them, for whoever looks.
bool OperatorTrigger::wants_whole(const c10::OperatorHandle& op, Arguments arguments, OperatorUse use) const {
  const c10::FunctionSchema& schema = op.schema();
  if (use == OperatorUse::Shape) return shapes_forward(schema, arguments);
  if (scalar_.is_applied) return scalar_wants_whole(schema);
  if (role_ == Role::Trigger) return begins_forward(op, arguments, use);
  if (use == OperatorUse::Whole || use == OperatorUse::Slice) return use == OperatorUse::Whole;
  if (use == OperatorUse::Clone || use == OperatorUse::Cast) return false;
  if (in_call() || step_.running()) return true;
  if (at::GradMode::is_enabled() && begins_between_calls(schema, arguments, use)) return true;
  if (use == OperatorUse::Unlike) return at::GradMode::is_enabled() || agrees_on_whole(op, arguments);
  if (use == OperatorUse::Alike) return !at::GradMode::is_enabled() && forward_beside_alike(op, arguments);
  return in_evaluation() || (use == OperatorUse::Alone && !module_.is_training());
}

/// Whether an operator is one of a forward where autograd records what is made of a parameter and no call is under way: a method of the program's own uses it,
/// or a penalty in the loss. What may be a look at slices as well (one number for a log, a view, beside slices of before) is one of a forward that has begun.
/// The answer follows from the operator and the step, not from how much of the parameter this rank has.
bool OperatorTrigger::begins_between_calls(const c10::FunctionSchema& schema, Arguments arguments, OperatorUse use) const {
  if (std::ranges::none_of(seen_, [](const SeenSlice& seen) { return seen.tensor.requires_grad(); })) return false;
  if (use == OperatorUse::Alone && !makes_views(schema)) return true;
  if (!step_.is_open()) return false;
  return use != OperatorUse::Alike || !tensors_.are_cut() || takes_parameters_alone(arguments) || means_whole_on_one_rank(schema);
}

/// And nothing else: an optimizer takes a parameter beside its gradient or its state, not beside another one.
bool OperatorTrigger::takes_parameters_alone(Arguments arguments) const {
  size_t tensors = 0;
  for_each_operand(arguments, [&](const at::Tensor&, const OperandPlace&) { ++tensors; });
  return tensors == seen_.size();
}

/// Where nothing but operators shows what runs. Optimizers, and whoever prints or copies, work on slices: beside other slices and without gradients.
bool OperatorTrigger::begins_forward(const c10::OperatorHandle& op, Arguments arguments, OperatorUse use) const {
  const c10::FunctionSchema& schema = op.schema();
  if (use == OperatorUse::Whole || use == OperatorUse::Slice) return use == OperatorUse::Whole;
  if (step_.running()) return true;
  if (at::GradMode::is_enabled()) {
    const bool under_way = units_.any_held() || step_.is_open();  // a frozen model's forward runs without a step
    if (use == OperatorUse::Look && !under_way) refuse_unclear(schema);
    const bool fits = takes_parameters_alone(arguments) || !goes_by_elements(op) ||
                      std::ranges::all_of(seen_, [this](const SeenSlice& seen) { return slices_fit(seen, /*on_any_rank=*/false); });
    if (use == OperatorUse::Alike && (writes(schema) || !fits)) refuse_made_by_slices(schema);
    return true;
  }
  const bool forward = in_evaluation() || !module_.is_training();  // as far as anybody knows
  switch (use) {
    case OperatorUse::Look:
      if (in_evaluation()) return true;
      refuse_unclear(schema);
    case OperatorUse::Clone:
      refuse_unclear(schema);
    case OperatorUse::Alike:
      if (!forward && takes_parameters_alone(arguments)) refuse_unclear(schema);
      return forward_beside_alike(op, arguments);
    case OperatorUse::Unlike:
      return agrees_on_whole(op, arguments);
    default:
      if (!forward) refuse_unclear(schema);
      return true;
  }
}

/// Whether the whole may stand, element by element, beside what has the shape of this rank's slice, or of any rank's.
bool OperatorTrigger::slices_fit(const SeenSlice& seen, bool on_any_rank) const {
  const at::IntArrayRef whole = tensors_.whole_sizes(seen.place);
  if (!on_any_rank) return broadcast_together(tensors_.slice_sizes(seen.place), whole);
  return std::ranges::any_of(tensors_.slices_of_ranks(seen.place), [&](const std::vector<int64_t>& slice) { return broadcast_together(slice, whole); });
}

/// Where the only shard has all rows, whether a tensor has the type in which they are kept, and not that in which they are gathered (param_dtype): what follows
/// the parameters goes by values that were not rounded, and to a forward they are as good.
bool OperatorTrigger::is_stored(const UnitPlace& parameter, const at::Tensor& other) const {
  if (tensors_.are_cut()) return false;
  const FlatParameters& flat = tensors_.flat(parameter);
  const at::ScalarType kept = flat.slice_view(parameter.index).scalar_type();
  return other.scalar_type() == kept && kept != flat.dtypes().gathered;
}

/// Whether, without gradients, an operator that takes a parameter beside what has its slice's shape is one of a forward: an optimizer takes it beside its
/// gradient, what follows it is written, and what else is done with slices goes by elements. Where that would not fit the whole, it is of slices, unless the
/// other was made by the slice's sizes.
bool OperatorTrigger::forward_beside_alike(const c10::OperatorHandle& op, Arguments arguments) const {
  const c10::FunctionSchema& schema = op.schema();
  if (writes(schema)) return false;
  if (std::ranges::any_of(arguments, [this](const c10::IValue& argument) { return tensors_.is_gradient(argument); })) return false;
  if ((in_evaluation() || !module_.is_training()) && takes_parameters_alone(arguments)) return true;
  const bool training = module_.is_training(), goes_on = forward_goes_on() && touched_.empty();
  const auto fits = [this](bool on_any_rank) { return std::ranges::all_of(seen_, [&](const SeenSlice& seen) { return slices_fit(seen, on_any_rank); }); };
  if (!goes_by_elements(op) && touched_.empty()) {
    if (role_ == Role::Trigger && training && !goes_on && tensors_.are_cut()) refuse_unclear(schema);
    return !training || goes_on;
  }
  const bool stored = std::ranges::any_of(seen_, [&](const SeenSlice& seen) {
    return std::ranges::any_of(tensors_beside(arguments, seen.operand), [&](const at::Tensor& other) { return is_stored(seen.place, other); });
  });
  if (stored) return false;
  if (goes_on && !noted_ && fits(/*on_any_rank=*/false)) return true;
  if (training) {
    if (goes_on && !noted_ && fits(/*on_any_rank=*/true)) refuse_unclear(schema);  // as where it fits would be gathered for
    return false;
  }
  if (!noted_ && means_whole_on_one_rank(schema)) return true;
  if (tensors_.are_cut()) refuse_made_by_slices(schema);
  return false;
}

/// An operator takes the parameter beside what has its slice's shape, where a forward may be. A rank that has all rows cannot tell a slice from the whole:
/// there it is a forward, and nothing else may be meant anywhere.
bool OperatorTrigger::means_whole_on_one_rank(const c10::FunctionSchema& schema) const {
  if (seen_.size() != 1 || !tensors_.is_on_one_rank(seen_.front().place)) return false;
  if (!tensors_.has_all_rows(seen_.front().place)) refuse_unclear(schema);
  return true;
}

void OperatorTrigger::refuse_unclear(const c10::FunctionSchema& schema, const UnitPlace& place) const {
  const std::string& name = tensors_.name(place);
  require(schema.name() != "aten::clone", "fully_shard: aten::clone was given '", name,
          "', of which this rank has a slice, where no forward runs. A copy of the model (model->clone()) is made before fully_shard, or after "
          "unshard(model), which brings the slices together; a copy of this rank's slice is detach().clone(), and one of the whole, in a forward, weight * 1");
  throw ConfigError(
      detail::concat("fully_shard: ", schema.name(), " was given '", name,
                     "', of which this rank has a slice, where nothing tells a forward from an optimizer, a copy or a line for a log. For the slice take its "
                     "detach(), and what follows it (a moving average) write in place: average.mul_(decay).add_(parameter, 1 - decay); in a forward let the "
                     "first operator be a layer's, with the module's input, and before an evaluation say model->eval()"));
}

/// A forward made a tensor as large as the parameter seemed to it: of a slice.
void OperatorTrigger::refuse_made_by_slices(const c10::FunctionSchema& schema) const {
  throw ConfigError(detail::concat(
      "fully_shard: ", schema.name(), " was given '", tensors_.name(seen_.front().place),
      "', of which this rank has a slice, beside a tensor of the slice's shape. For a line of a log, or what follows the parameters, take its detach(). In a "
      "forward let the first operator be a layer's, with the module's input, before an evaluation behind model->eval(); where the other was made by the "
      "slice's sizes(), make it like the parameter behind that (ones_like, zeros_like)"));
}

/// Whether an operator whose parameters show their whole shapes means slices: it writes one, or takes one, as no forward does, beside what has the shape of its
/// slice, or puts another tensor in its place. A rank that has all rows of a parameter cannot tell by shapes: an optimizer takes it beside its gradient, what
/// follows it is written. And it makes zeros like a parameter that has a gradient and was never updated: the state that an optimizer begins with. What does not
/// go by elements, or fits the whole, is one of the forward, in which no optimizer runs.
bool OperatorTrigger::means_slices(const c10::OperatorHandle& op, Arguments arguments) const {
  const c10::FunctionSchema& schema = op.schema();
  struct Operand {
    UnitPlace parameter;
    OperandPlace place;
  };
  std::vector<Operand> operands;
  bool written = false;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& place) {
    const auto parameter = tensors_.find_whole(tensor);
    if (!parameter) return;
    written = written || writes(schema, place.argument) || (place.argument == 0 && replaces(schema.name()));
    operands.push_back({*parameter, place});
  });
  if (written || is_forward(schema.name())) return written;
  if (schema.name() == "aten::zeros_like" && operands.size() == 1) {
    const UnitPlace& parameter = operands.front().parameter;
    const at::Tensor &tensor = tensors_.named(parameter).tensor, &gradient = tensor.grad();
    return gradient.defined() && gradient.sizes() == tensors_.slice_sizes(parameter) && begins_state(schema, arguments, tensor);
  }
  const auto others_beside = [&](const OperandPlace& place) {
    std::vector<at::Tensor> others = tensors_beside(arguments, place);
    std::erase_if(others, [this](const at::Tensor& other) { return tensors_.find_whole(other).has_value(); });
    return others;
  };
  const bool by_elements = goes_by_elements(op);
  for (const auto& [parameter, place] : operands) {
    if (!writes(schema) && by_elements) guards_.refuse_fitting_both(schema, parameter, others_beside(place));
  }
  return std::ranges::any_of(operands, [&](const Operand& operand) {
    const at::IntArrayRef sizes = tensors_.slice_sizes(operand.parameter);
    const bool tells = by_elements && !broadcast_together(sizes, tensors_.whole_sizes(operand.parameter));
    return std::ranges::any_of(others_beside(operand.place), [&](const at::Tensor& other) {
      if (other.sizes() != sizes) return false;
      if (writes(schema) || tensors_.is_of_own_slices(other) || tensors_.is_gradient(other)) return true;
      if (tells && tensors_.is_on_one_rank(operand.parameter)) refuse_unclear(schema, operand.parameter);  // that rank would stay
      return tells;
    });
  });
}

/// Whether an operator within a forward takes a parameter beside what follows those that are kept, and writes nothing.
bool OperatorTrigger::takes_stored(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (tensors_.are_cut() || writes(schema) || replaces(schema.name()) || is_forward(schema.name())) return false;
  bool stored = false;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    const auto whole = tensors_.find_whole(tensor);
    stored = stored || (whole && std::ranges::any_of(tensors_beside(arguments, operand),
                                                     [&](const at::Tensor& other) { return other.sizes() == tensor.sizes() && is_stored(*whole, other); }));
  });
  return stored;
}

/// Where an operator is given wholes: as aliases, and as `parameters` themselves.
std::vector<std::pair<OperandPlace, UnitPlace>> OperatorTrigger::wholes_among(Arguments arguments, bool parameters) const {
  std::vector<std::pair<OperandPlace, UnitPlace>> places;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    if (!parameters && tensors_.parameter(tensor)) return;
    if (const auto place = tensors_.find_whole(tensor)) places.emplace_back(operand, *place);
  });
  return places;
}

/// Puts slices in the place of those.
void OperatorTrigger::give_slices(torch::jit::Stack& stack, size_t first, const std::vector<std::pair<OperandPlace, UnitPlace>>& places) const {
  for (const auto& [operand, place] : places) {
    const at::Tensor slice = units_.flats(place.unit)[place.flat].slice_view(place.index);
    c10::IValue& value = stack[first + operand.argument];
    if (!operand.item) {
      value = slice;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list(value.toTensorList().copy());
      list.set(*operand.item, slice);
      value = list;
    }
  }
}

/// An optimizer came after a forward whose backward has not come: what it was given while parameters were whole becomes slices.
void OperatorTrigger::leave_forward(torch::jit::Stack& stack, size_t first) {
  const auto aliases = wholes_among(Arguments(stack.data() + first, stack.size() - first), /*parameters=*/false);
  step_.leave();
  give_slices(stack, first, aliases);
}

/// What the operator at hand, which is given slices, makes of them has this rank's rows, whatever its shape: that may be another one on each rank. What it
/// writes had them before or has not: a program may lay slices into a tensor of the whole, or bring together in a list what other ranks sent.
void OperatorTrigger::expect_slices(const c10::OperatorHandle& op, Arguments arguments) {
  if (!tensors_.are_cut()) return;
  const c10::FunctionSchema& schema = op.schema();
  const bool joined = joins(schema.name());
  if (!joined && !keeps_rows(op, arguments)) return;
  const bool in_place = writes(schema), views = makes_views(schema);
  bool all = true;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    const SliceNotes::Note* const note = tensors_.of_slices(tensor);
    all = all && note && note->has_values;
    if (!note) return;
    if (!in_place) {
      if (!views || makes_views(schema, operand.argument)) of_.push_back(operand.item);
    } else if (writes(schema, operand.argument)) {
      return written_.push_back(tensor);
    }
    of_what_.add(*note);
  });
  if (joined && !all) of_.clear();
  if (makes_alike(schema.name())) of_what_.has_values = false;
}

void OperatorTrigger::after(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const at::Tensor& written : written_) tensors_.note_written(written, of_what_);
  written_.clear();
  if (of_.empty()) return;
  const size_t count = op.schema().returns().size();
  for_each_operand(Arguments(stack.data() + stack.size() - count, count), [this](const at::Tensor& made, const OperandPlace& place) {
    const bool is_of = std::ranges::any_of(of_, [&](const std::optional<size_t>& item) { return !item || !place.item || *item == *place.item; });
    if (is_of) tensors_.note_of_slices(made, of_what_);
  });
  of_.clear();
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
    const UnitPlace* const place = tensors_.parameter(tensor);
    return place ? units_.flats(place->unit)[place->flat].whole_view(place->index) : tensor;
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
  const bool step = at::GradMode::is_enabled() && std::ranges::any_of(tensors_.parameters(), [](const auto& item) { return item.first->requires_grad(); });
  for (const SeenSlice& seen : seen_) note(seen.place.unit);
  if (step && !step_.running()) step_.begin(Drive::Loop);
  if (step) return step_.resume();
  if (in_call()) return;  // acquired in place, and given back when the call ends
  guards_.refuse_functions_over_slices(seen_);
  evaluating_ = !at::GradMode::is_enabled();
  evaluates_in_training_ = module_.is_training();
  for (size_t i = first; i < stack.size(); ++i) stack[i] = with_wholes(stack[i]);
}

/// Whether the operator writes parameters as slices. Of others that it takes, it may be one rank alone that reads them.
bool OperatorTrigger::writes_slices(const c10::FunctionSchema& schema) const {
  return std::ranges::any_of(seen_, [&](const SeenSlice& seen) { return writes(schema, seen.operand.argument); });
}

/// Whether no step runs, and every rank can tell that its operator was given slices.
bool OperatorTrigger::means_slices_between_steps(OperatorUse use) const {
  // A rank that has all rows of a parameter cannot tell whether it was read as a slice: so no rank lets go for that.
  const bool alike = use == OperatorUse::Alike &&
                     std::ranges::all_of(seen_, [this](const SeenSlice& seen) { return !tensors_.are_cut() || tensors_.is_on_one_rank(seen.place); });
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
  of_.clear();
  written_.clear();
  of_what_ = {.has_values = false};
  if (!backward && tensors_.are_cut() && std::exchange(gradients_of_, step_.pass()) != step_.pass()) tensors_.note_gradients();
  if (!backward) guards_.before(schema, arguments, in_call());
  scan(arguments);
  if (replaced_ && !backward && !replaces(schema.name())) {  // what is put there now may be what a refusal asked for
    if (step_.running() && !step_.driven()) step_.leave();
    for (size_t unit = 0; unit < units_.size(); ++unit) units_.take_in(unit);
    scan(arguments);
  }
  if ((rows_ || !touched_.empty()) && brings_together(schema.name())) tensors_.forget_of_slices(arguments[0]);
  if (evaluating_ && !backward && at::GradMode::is_enabled()) {  // evaluation is over
    evaluating_ = false;
    if (!step_.running()) units_.release_all();
  }
  if (met_.empty() && seen_.empty() && touched_.empty()) {
    follow_scalar(schema, arguments);
    if (rows_ && !backward) {
      guards_.refuse_rows_beside_wholes(op, arguments, /*given_whole=*/false);
      expect_slices(op, arguments);
    }
    return;
  }
  require(schema.name() != "aten::embedding_renorm_",
          "fully_shard: an embedding with max_norm writes rows of its weight in forward, which on each rank holds some of them; leave max_norm out");
  const OperatorUse use = use_of(schema, arguments);
  if (backward) {
    if (met_.empty() && (seen_.empty() || use == OperatorUse::Slice || use == OperatorUse::Shape)) return;
    step_.begin_backward();
    for (const SeenSlice& seen : seen_) note(seen.place.unit);
    return use_met();
  }
  guards_.refuse_rows_of_other_wrappers(schema, arguments);
  if (!touched_.empty() && !in_call()) guards_.refuse_layers_over_slices(schema, arguments, touched_);
  scalar_.is_applied = follow_scalar(schema, arguments);
  const auto refuse_rows = [&](bool given_whole) {
    if ((rows_ || !touched_.empty()) && !scalar_.is_applied) guards_.refuse_rows_beside_wholes(op, arguments, given_whole);
  };
  if (!seen_.empty() && wants_whole(op, arguments, use)) {
    refuse_rows(/*given_whole=*/true);
    if (scalar_.is_applied) fill_whole(arguments[0].toTensor());
    begin_forward(stack, first);
  } else if (!seen_.empty() || !touched_.empty()) {
    guards_.refuse_other_rows(schema, arguments);
    if (writes(schema)) {
      guards_.refuse_whole_gradients(arguments);
      note_updates(schema, arguments);
      if (writes_slices(schema) || !touched_.empty()) step_.close();
    } else if (schema.name() == "aten::detach") {  // by which tessera's optimizers write, past all operators
      for (const SeenSlice& seen : seen_) note_update(seen.tensor, /*hides_writes=*/false);
    }
    if (means_slices_between_steps(use)) {  // what is held is stale, if the slice is written
      units_.release_all();
      evaluating_ = evaluating_ && use == OperatorUse::Slice && !writes(schema);  // a forward makes handles, too
    }
    if (in_own_loop() && (use == OperatorUse::Slice || use == OperatorUse::Shape)) step_.leave();
    refuse_rows(/*given_whole=*/false);
    if (met_.empty()) expect_slices(op, arguments);
  } else if (in_own_loop() && !at::GradMode::is_enabled() && takes_stored(schema, arguments)) {
    return give_slices(stack, first, wholes_among(arguments, /*parameters=*/true));
  } else if (in_own_loop() && !at::GradMode::is_enabled() && means_slices(op, arguments)) {
    note_updates(schema, arguments);
    guards_.refuse_whole_values(schema, arguments, in_call());
    guards_.refuse_lost_writes(schema, arguments, /*may_end=*/true);
    leave_forward(stack, first);
    return expect_slices(op, Arguments(stack.data() + first, count));
  } else {
    refuse_rows(/*given_whole=*/false);
  }
  guards_.refuse_whole_values(schema, arguments, in_call());
  if (!met_.empty()) guards_.refuse_lost_writes(schema, arguments, /*may_end=*/false);
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
