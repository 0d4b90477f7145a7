#include "tessera/fsdp/sharded_step.h"

#include <algorithm>

#include <torch/csrc/autograd/engine.h>

#include "tessera/comm/call_site.h"
#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"

namespace tessera {
namespace {

std::vector<UnitPlace> trained_places(const ShardedUnits& units) {
  std::vector<UnitPlace> places;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (size_t flat = 0; flat < units.flats(unit).size(); ++flat) {
      if (!units.flats(unit)[flat].trained()) continue;
      for (size_t index = 0; index < units.flats(unit)[flat].parameters().size(); ++index) places.push_back({unit, flat, index});
    }
  }
  return places;
}

std::vector<nn::NamedParameter> parameters_at(const ShardedUnits& units, const std::vector<UnitPlace>& places) {
  std::vector<nn::NamedParameter> parameters;
  for (const UnitPlace& place : places) parameters.push_back(units.flats(place.unit)[place.flat].parameters()[place.index]);
  return parameters;
}

}  // namespace

ShardedStep::ShardedStep(ShardedUnits& units, const comm::Group& group, const FullyShardOptions& options)
    : units_(units),
      group_(group),
      replicas_(options.replicate),
      reduce_each_(options.reduce_each_micro_batch),
      find_unused_(options.find_unused_parameters),
      places_(trained_places(units)),
      parameters_(parameters_at(units, places_)),
      used_(parameters_),
      retired_(units.size()),
      final_(units.size()),
      awaited_(units.size()) {
  listen();
}

void ShardedStep::listen() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(nn::GradientDispatcher::of(parameters_[i].tensor).listen([this, i](const at::Tensor&) { accumulated(i); }));
    hooks_.add(Attachment([tensor = parameters_[i].tensor] { nn::GradientDispatcher::of(tensor).withdraw_place(); }));
  }
}

/// Lets gradients be computed where they are reduced. A unit's buffer is made when the first of its places is taken.
void ShardedStep::offer_places() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
    if (flat_of(places_[i]).offers_place(places_[i].index)) {
      dispatcher.offer_place([this, i] { return flat_of(places_[i]).place(places_[i].index); });
    } else {
      dispatcher.withdraw_place();
    }
  }
}

void ShardedStep::begin() {
  units_.clear_gradients();
  units_.release_all();  // what a step left that did not end
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_whole(unit);
  units_.statistics() = {};
  used_.clear();
  final_.assign(units_.size(), false);
  running_ = last_ = true;
  end_pass();
}

void ShardedStep::begin_micro_batch(bool last) {
  last_ = last;
  if (!in_backward_) end_pass();
}

void ShardedStep::use(size_t unit, UseOrder& order) {
  const bool noted = in_backward_ && units_.held(unit);
  units_.acquire(unit);
  if (noted) return;
  order.saw(unit);
  units_.prefetch(order);
}

void ShardedStep::begin_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  order_.turn();
  retired_.assign(units_.size(), false);
  std::ranges::fill(awaited_, 0);
  for (const UnitPlace& place : places_) ++awaited_[place.unit];
  torch::autograd::Engine::get_default_engine().queue_callback([this, alive = std::weak_ptr(alive_)] {
    if (!alive.expired()) end_backward();
  });
}

void ShardedStep::accumulated(size_t parameter) {
  const auto& [name, tensor, aliases] = parameters_[parameter];
  const UnitPlace& place = places_[parameter];
  require(running_, "fully_shard: '", name, "' got a gradient outside a step; call begin_step before the first forward pass of each step");
  require(!final_[place.unit], "fully_shard: '", name,
          "' got another gradient after its unit was reduced; call set_last_micro_batch(false) before each pass of a step but the last, and begin_step before "
          "each step");
  begin_backward();
  flat_of(place).take_up(place.index, tensor.grad());
  set_gradient(tensor, {});
  used_.mark(parameter);
  if (--awaited_[place.unit] == 0 && retire_when_complete_) retire(place.unit);
}

void ShardedStep::retire(size_t unit) {
  retired_[unit] = true;
  units_.release(unit);
  if (units_.trained(unit) && (reduce_each_ || last_)) reduce(unit, last_);
}

void ShardedStep::reduce(size_t unit, bool last) {
  units_.reduce(unit, last);
  if (last) final_[unit] = true;
}

/// Units that backward did not leave by itself: those used throughout, and those that this rank did not use; the others may have.
void ShardedStep::end_backward() {
  if (last_call_) last_call_();
  for (size_t unit = units_.size(); unit-- > 0;) {
    if (!retired_[unit]) retire(unit);
  }
  in_backward_ = false;
  units_.statistics().num_early = units_.statistics().num_collectives;
  end_pass();
}

void ShardedStep::end_pass() {
  in_backward_ = false;
  units_.release_all();
  order_.restart();
  ++pass_;
  if (running_) offer_places();
}

std::vector<bool> ShardedStep::used_parameters() const {
  if (!find_unused_) return std::vector<bool>(parameters_.size(), true);
  const comm::CallSite site("fsdp.unused");
  std::vector<bool> used = used_.anywhere(group_);
  if (replicas_.size() == 1) return used;
  UsedParameters anywhere(parameters_);
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) anywhere.mark(i);
  }
  return anywhere.anywhere(replicas_);
}

void ShardedStep::finish() {
  invariant(running_, "FullyShardedDataParallel::finish without begin_step");
  running_ = false;
  for (const auto& parameter : parameters_) nn::GradientDispatcher::of(parameter.tensor).withdraw_place();
  const at::NoGradGuard no_grad;
  // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
  for (size_t unit = units_.size(); unit-- > 0;) {
    if (units_.trained(unit) && !final_[unit]) reduce(unit, /*last=*/true);
  }
  units_.finish_reductions();
  const std::vector<bool> used = used_parameters();
  units_.release_all();
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_slices(unit);
  if (!find_unused_) used_.refuse_unused(group_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (used[i]) set_gradient(parameters_[i].tensor, flat_of(places_[i]).local_gradient(places_[i].index));
  }
}

}  // namespace tessera
