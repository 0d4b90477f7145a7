#include "tessera/nn/step_protocol.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/backward_pass.h"

namespace tessera {

struct StepProtocol::Pass {
  StepProtocol* protocol;
  std::weak_ptr<int> alive;  ///< the protocol is
  bool ended = false;        ///< as passes end

  Pass(StepProtocol* protocol, std::weak_ptr<int> alive) : protocol(protocol), alive(std::move(alive)) {}
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  ~Pass() {
    if (!ended && !alive.expired()) protocol->pass_failed();
  }
};

void StepProtocol::begin_step() {
  const State before = state_;
  const bool failed = leave_step();
  require(failed || before != State::Explicit, technique_, ": begin_step() was called again before finish() of the step before; call finish() once a step");
  require(
      failed || before != State::Plain, technique_,
      ": begin_step() was called after backward passes under no_sync() that no pass without it completed; in the plain loop leave out begin_step and finish");
  actions_.open(/*plain=*/false);
  state_ = State::Explicit;
}

bool StepProtocol::leave_step() {
  const bool failed = std::exchange(in_pass_, false);
  in_micro_batch_ = false;
  is_last_announced_ = true;
  if (std::exchange(state_, State::Between) != State::Between) actions_.abandon();
  return failed;
}

void StepProtocol::before_micro_batch(const MicroBatchPosition& position) {
  require(state_ == State::Explicit, technique_, ": before_micro_batch() was called outside a step; call begin_step() first");
  require(!in_micro_batch_, technique_, ": before_micro_batch() was called again before after_micro_batch() of the micro-batch before");
  in_micro_batch_ = true;
  is_last_announced_ = position.last;
}

void StepProtocol::after_micro_batch(const MicroBatchPosition& /*position*/) {
  require(in_micro_batch_, technique_, ": after_micro_batch() was called without before_micro_batch()");
  in_micro_batch_ = false;
  actions_.end_pass(is_last_announced_);
}

void StepProtocol::finish() {
  require(state_ == State::Explicit, technique_,
          ": finish() was called without begin_step(); in the plain loop a step is complete when its last backward pass returns, and needs neither");
  require(!in_micro_batch_, technique_, ": finish() was called before after_micro_batch() of the last micro-batch");
  state_ = State::Between;
  in_pass_ = false;
  actions_.complete();
}

void StepProtocol::after_update() const { require(state_ != State::Explicit, technique_, ": after_update() was called before finish() of the step"); }

void StepProtocol::arriving(const std::string& parameter) {
  if (in_pass_ && !pass_.expired()) return;
  if (in_pass_ && state_ == State::Plain) leave_step();
  const bool in_backward = nn::backward_pass() >= 0;
  if (state_ == State::Between) {
    require(actions_.plain_loop_refusal.empty() && in_backward, technique_, ": '", parameter, "' got a gradient outside a step; ",
            in_backward ? actions_.plain_loop_refusal : "one that no backward pass brings needs begin_step() before");
    actions_.open(/*plain=*/true);
    state_ = State::Plain;
  }
  if (in_backward) begin_pass();
}

void StepProtocol::begin_pass() {
  auto pass = std::make_shared<Pass>(this, alive_);
  pass_ = pass;
  in_pass_ = true;
  last_pass_ = *holds_ == 0 && (state_ == State::Plain || is_last_announced_);
  nn::at_end_of_backward([pass = std::move(pass)] {
    pass->ended = true;
    if (!pass->alive.expired()) pass->protocol->end_of_backward();
  });
  actions_.begin_pass(last_pass_);
}

void StepProtocol::end_of_backward() {
  if (state_ == State::Plain && nn::is_inside_of_backward()) {
    leave_step();
    throw ConfigError(
        technique_ +
        ": a backward pass inside of another (a checkpoint that calls backward itself) brought the first gradient, and its end is not that of the "
        "whole; let a parameter outside of it be used later in the forward pass, or use tessera's recomputation");
  }
  in_pass_ = false;
  if (state_ == State::Between || in_micro_batch_) return;
  actions_.end_pass(last_pass_);
  if (state_ != State::Plain || !last_pass_) return;
  state_ = State::Between;
  try {
    actions_.complete();
  } catch (const CommError& error) {
    throw CommError(
        detail::concat(error.what(), " (", technique_,
                       ", plain loop: a rank whose backward pass brings no gradient at all to the wrapped module makes none of its collectives, and the "
                       "others wait for it)"));
  }
}

/// Called as an exception unwinds.
void StepProtocol::pass_failed() {
  if (state_ == State::Plain && in_pass_ && pass_.expired()) leave_step();
}

}  // namespace tessera
