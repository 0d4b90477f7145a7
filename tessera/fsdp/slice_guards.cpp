#include "tessera/fsdp/slice_guards.h"

#include <algorithm>
#include <optional>

#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/fsdp/operator_use.h"
#include "tessera/nn/given_parts.h"
#include "tessera/nn/gradient_dispatcher.h"

// What a rank computes with its rows alone is wrong without a word, or ends in libtorch's word about two sizes. So each thing that programs were seen to do
// with parameters, gradients and state is known by its operators, and refused on every rank where it would be wrong on any: shapes here are no ground for a
// decision where they differ between ranks.

namespace tessera {
namespace {

/// Whether `sizes` are those of some rank's slice, and not of this one's.
bool is_another_ranks(at::IntArrayRef sizes, const UnitTensors& tensors, const UnitPlace& place) {
  if (sizes == tensors.slice_sizes(place)) return false;  // as an optimizer's state is, at each of its operators
  const std::vector<std::vector<int64_t>> slices = tensors.slices_of_ranks(place);
  return std::ranges::find(slices, sizes.vec()) != slices.end();
}

}  // namespace

SliceGuards::SliceGuards(const torch::nn::Module& module, const UnitTensors& tensors, const ShardedStep& step)
    : module_(module), tensors_(tensors), step_(step) {}

void SliceGuards::before(const c10::FunctionSchema& schema, Arguments arguments, bool in_call) {
  refuse_local_norms(schema, arguments);
  refuse_flat_gradients(schema, arguments);
  refuse_whole_state(schema, arguments, in_call);
  refuse_by_rows(schema, arguments);
  refuse_draws(schema, arguments);
}

void SliceGuards::refuse_local_norms(const c10::FunctionSchema& schema, Arguments arguments) {
  const auto is_gradient = [&](const c10::IValue& value) { return tensors_.are_cut() && step_.looped() && tensors_.is_gradient(value); };
  if (norms_.is_one(schema, arguments, is_gradient) && !stays_in_rows(schema, arguments)) nn::refuse_local_norm("fully_shard", schema);
}

/// Of a gradient's rows one by one, of which a slice has whole ones, unless somebody has cut them along other dimensions before.
bool SliceGuards::stays_in_rows(const c10::FunctionSchema& schema, Arguments arguments) const {
  const auto dims = schema.argumentIndexWithName("dim");
  if (!dims || !arguments[static_cast<size_t>(*dims)].isIntList()) return false;
  const std::vector<int64_t> along = arguments[static_cast<size_t>(*dims)].toIntVector();
  const at::Tensor& given = arguments[0].toTensor();
  const auto found = std::ranges::find_if(tensors_.parameters(), [&](const auto& item) {
    const at::Tensor& gradient = item.first->grad();
    const bool alias = gradient.defined() && gradient.has_storage() && gradient.storage().is_alias_of(given.storage());
    return alias && gradient.storage_offset() == given.storage_offset() && gradient.sizes() == given.sizes() && gradient.strides() == given.strides();
  });
  if (found == tensors_.parameters().end() || along.empty()) return false;
  const at::IntArrayRef gathered = tensors_.whole_sizes(found->second);
  const std::vector<int64_t>& whole = nn::slice_of(tensors_.named(found->second).tensor).shape;
  return std::ranges::all_of(along, [&](int64_t dim) {
    const auto at = static_cast<size_t>(c10::maybe_wrap_dim(dim, given.dim()));
    return at > 0 && gathered[at] == whole[at];
  });
}

/// torch::optim::LBFGS lays all gradients end to end and takes dot products of that.
void SliceGuards::refuse_flat_gradients(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (schema.name() != "aten::cat" || !tensors_.are_cut() || !step_.looped()) return;
  const std::vector<at::Tensor> list = arguments[0].toTensorVector();
  int64_t elements = 0, given = 0;
  for (const auto& item : tensors_.parameters()) elements += item.first->grad().defined() ? item.first->grad().numel() : 0;
  for (const at::Tensor& part : list) given += tensors_.is_gradient(part) ? part.numel() : 0;  // of parameters without a gradient it makes zeros
  const bool all = elements > 0 && given >= elements;
  require(!all,
          "fully_shard: aten::cat was given the gradients of all parameters, of which this rank has slices: torch::optim::LBFGS, and whoever takes products of "
          "whole gradients, would go in a direction and by steps of its own on each rank; use an optimizer that goes element by element (Adam, AdamW, SGD, "
          "Adagrad, RMSprop), or DistributedDataParallel with a closure that returns the loss of all ranks; for a copy of this rank's slices clone them first");
}

/// libtorch's optimizers begin with their state: they add a gradient to it, or with weight decay the sum of a gradient and its parameter. State that was made
/// of whole parameters, or of another rank's slices, would end in a word about two sizes, or, where a slice of one row fits them, in sums that nobody meant.
void SliceGuards::refuse_whole_state(const c10::FunctionSchema& schema, Arguments arguments, bool in_call) const {
  const std::string& name = schema.name();
  if ((name != "aten::add_" && name != "aten::addcmul_") || at::GradMode::is_enabled() || in_call || !tensors_.are_cut()) return;
  if (!arguments[0].isTensor() || !arguments[1].isTensor()) return;
  const at::Tensor &state = arguments[0].toTensor(), &added = arguments[1].toTensor();
  if (state.sizes() == added.sizes() || tensors_.find_memory(state) || tensors_.find_memory(added)) return;
  const bool fits = at::is_expandable_to(added.sizes(), state.sizes());
  for (const auto& [parameter, place] : tensors_.parameters()) {
    const at::IntArrayRef whole = tensors_.whole_sizes(place), slice = tensors_.slice_sizes(place);
    if (added.sizes() != slice) continue;
    const bool another_ranks = is_another_ranks(state.sizes(), tensors_, place), known = state.sizes() == whole || another_ranks;
    const at::Tensor& gradient = parameter->grad();
    const bool of_gradient = gradient.defined() && gradient.is_alias_of(added);
    if (fits ? !(known && of_gradient) : !(known || of_gradient)) continue;
    throw ConfigError(detail::concat("fully_shard: ", name, " adds this rank's slice ", slice, " of the gradient of '", tensors_.name(place), "', which is ",
                                     whole, ", to what has shape ", state.sizes(), ": ", nn::whose_state(state.sizes(), whole, another_ranks, "fully_shard")));
  }
}

void SliceGuards::refuse_draws(const c10::FunctionSchema& schema, Arguments arguments) {
  const nn::LocalDraws::Kind kind = draws_.kind_of(schema, arguments);
  const at::Tensor drawn = kind == nn::LocalDraws::Kind::None ? nn::LocalDraws::drawn_out(schema, arguments) : arguments[0].toTensor();
  if (!drawn.defined() || !tensors_.are_cut()) return;
  const UnitPlace* const parameter = tensors_.parameter(drawn);
  const bool copied = kind == nn::LocalDraws::Kind::Copied;
  const std::optional<UnitPlace> place = copied ? tensors_.find_memory(drawn) : parameter ? std::optional(*parameter) : std::nullopt;
  if (place && !drawn.is_meta()) nn::refuse_local_draw("fully_shard", schema, kind, tensors_.name(*place), "before fully_shard, or after unshard");
}

/// Each rank would take its own rows for the matrix: triu_, fill_diagonal_, index_fill_. Handles (detach()) are this rank's rows, and who only reads may want
/// these: printing takes rows of what it shows, and none where a rank has none.
void SliceGuards::refuse_by_rows(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!tensors_.are_cut()) return;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    if (tensor.is_meta() || !writes_by_rows(schema, arguments, operand)) return;
    const UnitPlace* const parameter = tensors_.parameter(tensor);
    const bool may_be_gradient = !parameter && !tensor.requires_grad() && step_.looped();
    const std::optional<UnitPlace> gradient = may_be_gradient ? tensors_.find_gradient(tensor) : std::nullopt;
    if (!parameter && !gradient) return;
    throw ConfigError(detail::concat(
        "fully_shard: ", schema.name(), " was given ", gradient ? "the gradient of '" : "'", tensors_.name(parameter ? *parameter : *gradient),
        "', of which each rank has a slice, some rows, and does what goes by the number of a row in the whole, or by all rows: each rank would take its slice ",
        "for the whole. ", gradient ? "" : "Do so before fully_shard, or after unshard; or ", gradient ? "Write" : "write",
        " by elements with this rank's rows of a whole mask, as in mul_(take(mask, nn::slice_of(parameter))); for this rank's rows alone give the operator a "
        "detach()"));
  });
}

/// Whether an operator that is no layer takes `handle` beside values of another shape, as a forward does and an optimizer in a loop does not.
bool SliceGuards::stretches(Arguments arguments, const at::Tensor& handle) const {
  if (!tensors_.are_cut() || (!at::GradMode::is_enabled() && module_.is_training())) return false;
  return std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) return false;
    const at::Tensor& other = argument.toTensor();
    return other.is_floating_point() && other.numel() > 1 && other.sizes() != handle.sizes();
  });
}

/// A handle on a slice (detach(), data()) is what its maker asked for; a layer over it is not.
void SliceGuards::refuse_layers_over_slices(const c10::FunctionSchema& schema, Arguments arguments, const std::vector<at::Tensor>& handles) const {
  for (const at::Tensor& handle : handles) {
    if (!is_layer(schema.name()) && !stretches(arguments, handle)) continue;
    // A layer may be given it turned (w.detach().t()), which nothing but a slice's own shape would tell from what an optimizer takes.
    const std::optional<UnitPlace> place = is_layer(schema.name()) ? tensors_.find_memory(handle) : tensors_.find_slice(handle);
    require(!place, "fully_shard: ", schema.name(), " was given a handle (detach(), data()) on '", place ? tensors_.name(*place) : "",
            "' that was made outside of a forward, when the parameter was this rank's slice; make it in forward, behind an operator with the module's input, "
            "or, where one module's parameters update another's between steps (a moving average), wrap each of the two by a fully_shard of its own");
  }
}

/// What runs without gradients may be the inside of a torch::autograd::Function. Then autograd has taken down already of what shape its gradient will be.
void SliceGuards::refuse_functions_over_slices(const std::vector<SeenSlice>& seen) const {
  for (const auto& [tensor, place, operand] : seen) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    if (!accumulator || tensors_.has_all_rows(place)) continue;
    const at::IntArrayRef slice = tensors_.slice_sizes(place);
    const auto noted = accumulator->input_metadata(0).shape_as_dim_vector();
    require(noted != c10::fromIntArrayRefSlow(slice), "fully_shard: '", tensors_.name(place),
            "' was given to a torch::autograd::Function when it was this rank's slice ", slice, " of ", tensors_.whole_sizes(place),
            ", before any operator of the forward; let an operator use it, or the module's input with it, before");
  }
}

/// Two slices of parameters (a teacher's that follows a student's) may be other rows of theirs, even where their shapes agree.
void SliceGuards::refuse_other_rows(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!tensors_.are_cut()) return;
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    const auto place = tensors_.find_slice(tensor);
    if (!place) return;
    for (const at::Tensor& other : tensors_beside(arguments, operand)) {
      const auto beside = tensors_.find_slice(other);
      require(!beside || tensors_.same_rows(*place, *beside), "fully_shard: ", schema.name(), " was given the slices of '", tensors_.name(*place), "' and '",
              beside ? tensors_.name(*beside) : "",
              "', which are other rows on some rank, for the units that they lie in differ; let the modules whose parameters follow each other be units of the "
              "same parameters (wrap), or wrap each by a fully_shard of its own");
    }
  });
}

/// The same of a parameter of ours that another wrapper's follows. A rank where the two slices have one shape by chance would take it for an update and gather
/// nothing, the others would gather: so it goes by both layouts, which every rank knows, before anything is gathered.
void SliceGuards::refuse_rows_of_other_wrappers(const c10::FunctionSchema& schema, Arguments arguments) const {
  if (!tensors_.are_cut() || at::GradMode::is_enabled() || !writes(schema)) return;
  for_each_operand(arguments, [&](const at::Tensor& written, const OperandPlace& operand) {
    if (!writes(schema, operand.argument) || tensors_.parameter(written)) return;
    const auto* const dispatcher = nn::GradientDispatcher::find(written);
    const auto* const wrapper = dispatcher ? dynamic_cast<const FullyShardedDataParallel*>(dispatcher->owner()) : nullptr;
    if (wrapper == nullptr) return;
    const auto [theirs, index] = wrapper->layout_of(written);
    if (theirs == nullptr) return;
    for (const at::Tensor& other : tensors_beside(arguments, operand)) {
      const auto own = tensors_.find_memory(other);
      if (!own || tensors_.whole_sizes(*own) != theirs->parameters[index].shape) continue;  // of other shapes no rank takes it for an update
      require(same_rows(*theirs, index, tensors_.flat(*own).layout(), own->index), "fully_shard: ", schema.name(), " writes '", nn::slice_of(written).name,
              "' of one wrapper from '", tensors_.name(*own),
              "' of another, which are other rows on some rank, for the units that they lie in differ: by what else lies in them (wrap), or by what was frozen "
              "when the modules were wrapped. For parameters that follow others (a moving average), wrap each of the two by a fully_shard of its own, with the "
              "same wrap and the same parameters frozen, and freeze afterwards");
    }
  });
}

/// An optimizer would say that two sizes differ, and not why.
void SliceGuards::refuse_whole_gradients(Arguments arguments) const {
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace&) {
    const auto place = tensors_.find_slice(tensor);
    if (!place) return;
    const nn::NamedParameter& parameter = tensors_.named(*place);
    refuse_whole_gradient(parameter, parameter.tensor.grad(), tensors_.slice_sizes(*place));
  });
}

/// A module that sets its own parameter in forward (data-dependent initialization) has values for all of it, and this rank has some rows; and in a call it
/// writes what is gathered, which is thrown away.
void SliceGuards::refuse_whole_values(const c10::FunctionSchema& schema, Arguments arguments, bool in_call) const {
  if (!tensors_.are_cut() || !writes(schema) || schema.name() == "aten::set_") return;  // set_ gives other memory, which is taken in
  constexpr const char* between_steps =
      "between steps write this rank's rows (nn::slice_of), or the whole before fully_shard or after unshard; where one module's parameters update another's "
      "(a moving average), wrap each of the two by a fully_shard of its own, so that like parameters have like rows; ";
  for_each_operand(arguments, [&](const at::Tensor& written, const OperandPlace& operand) {
    if (!writes(schema, operand.argument)) return;
    const std::optional<UnitPlace> whole = tensors_.find_whole(written);
    const std::optional<UnitPlace> place = whole ? whole : tensors_.find_slice(written);
    if (!place || tensors_.has_all_rows(*place)) return;
    const at::IntArrayRef shape = tensors_.whole_sizes(*place);
    if (operand.item && shape.empty()) return;  // beside it may be a number of steps (_fused_adamw_); one number fits a slice without any
    const bool of_all = std::ranges::any_of(tensors_beside(arguments, operand),
                                            [&](const at::Tensor& other) { return other.sizes() == shape && !tensors_.find_memory(other); });
    require(!of_all || schema.name() != "aten::addcdiv_", "fully_shard: ", schema.name(), " writes '", tensors_.name(*place),
            "', of which this rank has a slice, from ", nn::whose_state(shape, shape, is_another_ranks(shape, tensors_, *place), "fully_shard"));
    require(!of_all && !(whole && in_call), "fully_shard: ", schema.name(), " writes '", tensors_.name(*place), "' of shape ", shape,
            ", of which this rank has the slice ", tensors_.slice_sizes(*place), ": ", in_call ? "" : between_steps,
            "a module that sets its own parameters in forward (data-dependent initialization) is given its first batch before fully_shard");
  });
}

/// What is gathered is thrown away, and with it what is written there: by a handle that was made in a forward (data(), detach()), or to a part of one. Without
/// gradients a write of all of it, element by element, ends the forward, and is one of this rank's rows.
void SliceGuards::refuse_lost_writes(const c10::FunctionSchema& schema, Arguments arguments, bool may_end) const {
  for_each_operand(arguments, [&](const at::Tensor& written, const OperandPlace& operand) {
    if (!writes_elements(schema, operand.argument)) return;
    const std::optional<UnitPlace> place = tensors_.find_in_wholes(written);
    if (!place || (may_end && tensors_.find_whole(written) && !(tensors_.are_cut() && writes_by_rows(schema, arguments, operand)))) return;
    throw ConfigError(detail::concat(
        "fully_shard: ", schema.name(), " writes '", tensors_.name(*place),
        "' where it is gathered for a forward, by a handle (data(), detach()) or a view of it, and what is gathered is thrown away, while each rank keeps its "
        "slice as it was. Write the parameter between steps: element by element (w.clamp_(), w.mul_()) under NoGradGuard, by this rank's rows of a whole mask, "
        "mul_(take(mask, nn::slice_of(parameter))), or all of it before fully_shard or after unshard; or compute with another tensor, "
        "w * mask or w.clamp(low, high), which writes nothing"));
  });
}

/// A whole, or what autograd has computed of one, beside what has this rank's rows, which libtorch would stretch where they are one, and where there are none
/// would take the whole for nothing. It goes by what each was made of, which is alike on every rank: one that has all rows sees two of one shape.
void SliceGuards::refuse_rows_beside_wholes(const c10::OperatorHandle& op, Arguments arguments, bool given_whole) const {
  if (!tensors_.are_cut()) return;
  const c10::FunctionSchema& schema = op.schema();
  const bool may_be_computed = at::GradMode::is_enabled() && goes_by_elements(op);
  for_each_operand(arguments, [&](const at::Tensor& tensor, const OperandPlace& operand) {
    const UnitPlace* const parameter = given_whole ? tensors_.parameter(tensor) : nullptr;
    std::optional<UnitPlace> place = parameter ? std::optional(*parameter) : tensors_.find_in_wholes(tensor);
    const bool whole = place && operator_use(schema, arguments, operand, tensor) != OperatorUse::Slice;
    if (!whole && !(may_be_computed && !place && tensor.requires_grad() && !tensors_.is_of_slices(tensor))) return;
    const std::vector<at::Tensor> beside = tensors_beside(arguments, operand);
    if (std::ranges::none_of(beside, [this](const at::Tensor& other) { return tensors_.is_of_slices(other) && !tensors_.parameter(other); })) return;
    if (!whole) place = tensors_.find_behind(tensor);
    require(!place, "fully_shard: ", schema.name(), " was given ", whole ? "'" : "what was computed of '", place ? tensors_.name(*place) : "",
            "', all of it, beside a tensor that was made of this rank's slices: of a gradient or a detach(), of a module in another wrapper, too, or like a "
            "parameter (zeros_like) outside of a forward. For this rank's rows give it the parameter's detach(), behind the backward pass. In a forward let "
            "the first operator be a layer's, with the module's input, make the other like the parameter behind that, and take what a penalty holds the "
            "parameter to (an anchor) of the module before fully_shard");
  });
}

/// Of one that writes nothing, beside a whole parameter of which some rank's slice fits the whole as well (one row): what has the shape of any rank's slice may
/// be meant for either there, where the parameter has a gradient, with which an optimizer may come. Whether it is refused goes by the shapes of all ranks'
/// slices, not by what fits here, so that ranks with rows of their own number each refuse their slice.
void SliceGuards::refuse_fitting_both(const c10::FunctionSchema& schema, const UnitPlace& place, const std::vector<at::Tensor>& others) const {
  if (!tensors_.are_cut()) return;
  const std::vector<int64_t> whole = tensors_.whole_sizes(place).vec();
  std::vector<std::vector<int64_t>> slices = tensors_.slices_of_ranks(place);
  std::erase(slices, whole);
  const bool may_step = tensors_.named(place).tensor.grad().defined();
  const auto fits = std::ranges::find_if(slices, [&](const std::vector<int64_t>& slice) { return at::is_expandable_to(slice, whole); });
  if (fits == slices.end()) return;
  for (const at::Tensor& other : others) {
    if (!may_step && broadcast_together(other.sizes(), whole)) continue;
    require(tensors_.is_gradient(other) || tensors_.is_of_own_slices(other) || std::ranges::find(slices, other.sizes().vec()) == slices.end(),
            "fully_shard: within a forward, without gradients, ", schema.name(), " was given '", tensors_.name(place), "' of shape ", at::IntArrayRef(whole),
            " beside a tensor of shape ", other.sizes(), ", which is that of one rank's slice, too, and a slice of shape ", at::IntArrayRef(*fits),
            " fits the whole as well: nobody can tell which of the two is meant. For the whole, give the tensor the whole's shape "
            "(other.expand(weight.sizes())), or call zero_grad() before; for slices, compute behind the backward pass, or outside of a forward");
  }
}

}  // namespace tessera
