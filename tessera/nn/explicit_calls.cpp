#include "tessera/nn/explicit_calls.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera {
namespace {

const char* begin_of(ActionKind action) {
  switch (action) {
    case ActionKind::Forward:
      return "before_micro_batch(), or before() of a forward,";
    case ActionKind::Backward:
      return "before() of a backward";
    case ActionKind::Weights:
      return "before() of weight gradients";
  }
  return "";
}

const char* end_of(ActionKind action) { return action == ActionKind::Backward ? "after_micro_batch(), or after() of a backward," : "after()"; }

}  // namespace

void ExplicitCalls::begin_step(bool restarts) {
  require(!in_step_ || restarts, technique_, ": begin_step() was called again before finish() of the step before; call finish() once a step");
  leave();
  in_step_ = true;
}

void ExplicitCalls::before(ActionKind action, const MicroBatchPosition& position) {
  const char* const call = begin_of(action);
  require(in_step_, technique_, ": ", call, " was called outside a step; call begin_step() first");
  require(!action_, technique_, ": ", call, " was called before ", end_of(action_.value_or(action)), " of the one before");
  switch (action) {
    case ActionKind::Forward:
      require(!has_last_, technique_, ": ", call, " was called after the step's last micro-batch (MicroBatchPosition::last); call finish()");
      ++forwards_;
      break;
    case ActionKind::Backward:
      require(alive() > 0, technique_, ": ", call, " was called before the forward of its micro-batch");
      ++backwards_;
      awaited_weights_ += position.weights_later ? 1 : 0;
      has_last_ = is_last_ = position.last;
      is_complete_ = !position.weights_later;
      break;
    case ActionKind::Weights:
      require(awaited_weights_ > 0, technique_, ": ", call, " was called for what no backward has left for later (MicroBatchPosition::weights_later)");
      --awaited_weights_;
      is_last_ = position.last;
      is_complete_ = true;
      break;
  }
  action_ = action;
  pass_ended_ = false;
}

void ExplicitCalls::after(ActionKind action) {
  require(action_ == action, technique_, ": ", end_of(action), " was called without ", action == ActionKind::Backward ? "before_micro_batch()" : "before()");
  action_.reset();
}

void ExplicitCalls::finish() {
  require(in_step_, technique_,
          ": finish() was called without begin_step(); in the plain loop a step is complete when its last backward pass returns, and needs neither");
  require(!action_, technique_, ": finish() was called before ", end_of(action_.value_or(ActionKind::Forward)), " of the last one");
  require(alive() == 0, technique_, ": finish() was called before the backward of ", alive(), " micro-batches whose forward has run");
  require(awaited_weights_ == 0, technique_, ": finish() was called before the weight gradients of ", awaited_weights_, " micro-batches");
  require(backwards_ == 0 || has_last_, technique_, ": finish() was called before the step's last micro-batch: no call said MicroBatchPosition::last");
  leave();
}

void ExplicitCalls::after_update() const { require(!in_step_, technique_, ": after_update() was called before finish() of the step"); }

}  // namespace tessera
