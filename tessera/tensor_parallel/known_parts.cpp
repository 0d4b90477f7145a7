#include "tessera/tensor_parallel/known_parts.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sum.h>

#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/nn/given_parts.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/sharing.h"

namespace tessera::tensor_parallel {

namespace {

/// libtorch's optimizers write behind the version counter, so it is values that tell.
at::Tensor sum_of(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return parameter.detach().sum(at::kDouble);
}

bool is_part(const at::Tensor& parameter, const comm::Group& group) {
  const auto dealt = nn::dealt_of(parameter);
  if (std::ranges::any_of(dealt, [](const nn::Dealt& one) { return one.by != kName; })) return false;  // who deals experts looks at them
  return parameter.is_floating_point() && std::ranges::any_of(nn::sharings_of(parameter), [&](const nn::Sharing& one) {
           return one.axis == group.name() && one.sets == group.size() && one.even;
         });
}

std::vector<nn::NamedParameter> parts_with_data(const std::vector<nn::NamedParameter>& parameters, const comm::Group& group) {
  std::vector<nn::NamedParameter> parts;
  std::ranges::copy_if(parameters, std::back_inserter(parts), [&](const auto& each) { return is_part(each.tensor, group) && !each.tensor.is_meta(); });
  return parts;
}

std::vector<at::Tensor> tensors_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

/// Whether a part is one row, or column, over and over along where it is cut: then the whole may be so, and all parts alike.
bool is_repeated(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const nn::NotRepeated looking;
  const at::Tensor values = nn::in_use(part).detach();
  const std::vector<int64_t>& whole = nn::slice_of(part).shape;
  int64_t dim = 0;
  while (dim + 1 < values.dim() && values.size(dim) == whole[static_cast<size_t>(dim)]) ++dim;
  return values.numel() > 0 && values.eq(values.narrow(dim, 0, 1)).all().item<bool>();
}

/// nn::bits_of a part of which nobody has seen it written; 0 also of what may be all ranks' of a purpose, or was all ranks' when it was cut.
int64_t bits_if_apart(const at::Tensor& part) {
  const nn::NotRepeated looking;
  return is_repeated(part) || nn::is_as_alike_at_cut(part) ? 0 : nn::bits_of(part);
}

/// What this rank tells of its parts; of those that were given behind the last comparison their layers have told, with the values from before an update.
/// Nothing where a sharded one was given since, which is shown while its layer is called.
std::optional<int64_t> told_of(const std::vector<nn::NamedParameter>& parts, const ToldParts& told) {
  if (told.empty() && std::ranges::none_of(parts, [](const auto& part) { return nn::was_given(part.tensor); })) return 0;
  std::vector<int64_t> bits;
  for (const auto& [name, part, aliases] : parts) {
    const auto found = told.find(part.unsafeGetTensorImpl());
    std::optional<int64_t> own;
    if (found != told.end() && found->second.times_given == nn::times_given(part)) {
      own = found->second.bits;
    } else if (!nn::keeps_memory(part)) {
      own = nn::bits_given(part);
    } else if (nn::was_given(part)) {
      return std::nullopt;
    }
    if (!own) return 0;
    bits.push_back(*own);
  }
  return nn::told_together(bits);
}

void refuse_one_ranks_parts(const comm::Group& group, const std::vector<nn::NamedParameter>& parameters, ToldParts& told) {
  if (!group.engine()->moves_data() || group.size() == 1) return;
  const std::vector<nn::NamedParameter> parts = parts_with_data(parameters, group);
  if (parts.empty()) return;
  const std::optional<int64_t> tells = told_of(parts, told);
  const std::vector<int64_t> heard = nn::tell_ranks(group, parts.front().tensor, tells.value_or(0));
  const auto first = std::ranges::find_if(parts, [](const auto& part) { return nn::was_given(part.tensor); });
  require(
      !nn::were_given_alike(heard), "parallelize_module: '", first == parts.end() ? parts.front().name : first->name,
      "' and all other parts have the same values on every rank of ", group.name(),
      ", and were given since they were cut: a file that torch::save made of one rank's model holds that rank's parts, and so does a vector of "
      "its parameters, and a broadcast gives them to all; load by checkpoint::load, each rank what it saved itself, or the whole before parallelize_module");
  if (!tells) return;
  for (const auto& part : parts) nn::forget_given(part.tensor);  // behind the last refusal: until other values are loaded, it is refused again
  told.clear();
}

/// A pass that is recorded for its shapes has no values, and answers questions about them.
bool is_recorded(const nn::Values& inputs) {
  return std::ranges::any_of(inputs, [](const c10::IValue& in) { return in.isTensor() && in.toTensor().is_meta(); });
}

}  // namespace

KnownParts::KnownParts(std::string axis, const std::vector<at::Tensor>& parameters, bool watches_terms, std::shared_ptr<ToldParts> told)
    : axis_(std::move(axis)), watches_terms_(watches_terms), told_(std::move(told)) {
  for (const at::Tensor& parameter : parameters) parts_.push_back({nn::slice_of(parameter).name, WeakTensor(parameter.getIntrusivePtr())});
}

nn::Values KnownParts::call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) {
  const bool recorded = is_recorded(inputs);
  for (Part& part : parts_) {
    auto impl = part.tensor.lock();
    if (!impl) continue;
    const at::Tensor parameter(std::move(impl));
    check_known(part.name, parameter);
    if (watches_terms_ && !recorded && !parameter.is_meta()) tell(part, parameter);
    if (watches_terms_ && !part.is_looked_after && at::GradMode::is_enabled() && !recorded) look_after_term(part, parameter);
  }
  return next(std::move(inputs));
}

/// Now, before an update makes another of it: what was given, and in the first call what another wrapper has taken, who may show it to nobody else.
void KnownParts::tell(Part& part, const at::Tensor& parameter) const {
  const bool is_given = nn::was_given(parameter), is_first = !std::exchange(part.was_shown, true);
  if (!is_given && !(is_first && nn::keeps_memory(parameter))) return;
  const int64_t bits = is_given ? nn::bits_given(parameter).value() : bits_if_apart(parameter);
  told_->insert_or_assign(parameter.unsafeGetTensorImpl(), Told{.bits = bits, .times_given = nn::times_given(parameter)});
  nn::forget_given(parameter);
}

void KnownParts::check_known(const std::string& name, const at::Tensor& parameter) const {
  require(nn::is_shared_over(parameter, axis_), "parallelize_module: '", name, "', which ranks of ", axis_,
          " share out, was given data of another shape since, ", parameter.sizes(),
          " (set_data, torch::load of a model that was not cut), which is no part of it; "
          "load by checkpoint::load, or before parallelize_module");
}

void KnownParts::look_after_term(Part& part, const at::Tensor& parameter) const {
  if (parameter.is_meta() || !parameter.is_leaf() || !parameter.requires_grad()) return;
  const GradientSynchronizer* const owner = nn::owner_of(parameter);
  const bool is_sharded = owner != nullptr && !owner->held_elements(0).empty();
  part.is_looked_after = is_sharded || !nn::axis_of_unsummed_term(parameter);
  if (part.is_looked_after) return part.listening.detach();
  if (!part.at_gradient) {
    part.at_gradient = std::make_shared<at::Tensor>();
    part.listening = nn::GradientDispatcher::of(parameter).listen([sum = part.at_gradient](const at::Tensor& own) { *sum = sum_of(own); });
  }
  require(!part.at_gradient->defined() || part.at_gradient->equal(sum_of(parameter)), "parallelize_module: '", part.name, "' was updated, each rank of '",
          axis_,
          "' has a term of its gradient, and they were never summed, so ranks drift apart: behind each backward pass, "
          "before clipping and the update, call nn::sum_terms(parallel->group(), wrapper.updated()), or, without a wrapper, of nn::unique_parameters(*model)");
}

WholeParts::WholeParts(comm::Group group, const std::vector<nn::NamedParameter>& parameters, std::set<const nn::Module*> meeting,
                       std::shared_ptr<ToldParts> told)
    : group_(std::move(group)), meeting_(std::move(meeting)), told_(std::move(told)) {
  std::vector<bool> have_values;
  for (const auto& parameter : parameters) {
    parts_.emplace_back(parameter.name, parameter.tensor.getIntrusivePtr());
    times_given_.push_back(nn::times_given(parameter.tensor));
    const bool part = is_part(parameter.tensor, group_), on_meta = parameter.tensor.is_meta();
    have_values.push_back(part && !on_meta);
    may_be_written_ |= part && group_.engine()->moves_data();
    was_cut_on_meta_ |= part && on_meta;
  }
  since_cut_.mark(parameters, have_values);
}

std::vector<nn::NamedParameter> WholeParts::parameters() const {
  std::vector<nn::NamedParameter> there;
  for (const auto& [name, tensor] : parts_) {
    if (auto impl = tensor.lock()) there.push_back({name, at::Tensor(std::move(impl)), {}});
  }
  return there;
}

namespace {
constexpr int64_t kNotWritten = 0, kWritten = -1;
}  // namespace

/// kWritten where this rank has seen parts written in place; where it cannot tell, of parts that were cut on meta, given or loaded since, how they begin.
int64_t WholeParts::writes_of(const std::vector<nn::NamedParameter>& there, const std::vector<nn::NamedParameter>& parts) const {
  const auto is_told = [&](const auto& part) { return nn::was_given(part.tensor) || told_->contains(part.tensor.unsafeGetTensorImpl()); };
  const bool is_shared_out = std::ranges::any_of(parts, [](const auto& part) { return nn::keeps_memory(part.tensor); });
  if (is_shared_out || std::ranges::all_of(parts, is_told)) return kNotWritten;  // what their layers tell of them is compared
  bool is_known = !was_cut_on_meta_ && there.size() == parts_.size();
  for (size_t i = 0; i < there.size() && is_known; ++i) {
    is_known = !is_part(there[i].tensor, group_) || nn::times_given(there[i].tensor) == times_given_[i];
  }
  if (!is_known) return nn::beginnings_of(tensors_of(parts));
  return !since_cut_.first_written(there).empty() || since_cut_.changed(there) ? kWritten : kNotWritten;
}

/// Where a rank has written parts in place, all may hold one rank's: of a broadcast that rank has written nothing. Where none can tell, their bits do.
void WholeParts::refuse_what_was_written_alike(const std::vector<nn::NamedParameter>& there) {
  const std::vector<nn::NamedParameter> parts = parts_with_data(there, group_);
  if (parts.empty()) return;
  const nn::NotRepeated looking;
  const auto tell = [&](int64_t number) { return nn::tell_ranks(group_, parts.front().tensor, number); };
  const std::vector<int64_t> writes = tell(writes_of(there, parts));
  since_cut_.clear();
  const bool written = std::ranges::find(writes, kWritten) != writes.end();
  if (!written && !nn::were_given_alike(writes)) return;
  std::vector<int64_t> bits;
  for (const auto& part : parts) bits.push_back(written ? nn::bits_of(part.tensor) : bits_if_apart(part.tensor));
  require(
      !nn::were_given_alike(tell(nn::told_together(bits))), "parallelize_module: '", parts.front().name,
      "' and all other parts have the same values on every rank of ", group_.name(),
      ", and were written since they were cut: a broadcast gives all ranks one rank's parts, and ranks that are seeded alike draw the same; write the whole "
      "before parallelize_module (replicas = ReplicaStart::Broadcast takes rank 0's), or load by checkpoint::load");
}

nn::Values WholeParts::call(nn::Module& module, nn::Values inputs, const nn::Next& next) {
  if (is_recorded(inputs)) return next(std::move(inputs));
  const bool trains = at::GradMode::is_enabled();
  Passes& passes = trains ? training_ : evaluation_;
  if (passes.first == nullptr && (trains || meeting_.contains(&module))) passes.first = &module;
  if (passes.first == &module) {
    if (std::exchange(may_be_written_, false)) refuse_what_was_written_alike(parameters());
    if (nn::is_due(++passes.count)) {
      const std::vector<nn::NamedParameter> there = parameters();
      std::vector<nn::NamedParameter> shown;
      std::ranges::copy_if(there, std::back_inserter(shown), [](const auto& parameter) { return !nn::keeps_memory(parameter.tensor); });
      if (trains) nn::require_alike(group_, shown);
      refuse_one_ranks_parts(group_, there, *told_);
    }
  }
  return next(std::move(inputs));
}

}  // namespace tessera::tensor_parallel
