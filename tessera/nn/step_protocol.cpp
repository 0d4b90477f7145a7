#include "tessera/nn/step_protocol.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera {

void StepProtocol::begin_step() {
  const bool plain = plain_;
  const bool broken_off = calls_.is_broken_off();
  const bool failed = leave_step() || broken_off;
  require(
      failed || !plain, technique_,
      ": begin_step() was called after backward passes under no_sync() that no pass without it completed; in the plain loop leave out begin_step and finish");
  try {
    calls_.begin_step(/*restarts=*/failed);
    actions_.open(/*plain=*/false);
  } catch (...) {
    calls_.leave();
    throw;
  }
}

bool StepProtocol::leave_step() {
  const bool failed = std::exchange(in_pass_, false);
  if (std::exchange(plain_, false) || calls_.in_step()) actions_.abandon();
  return failed;
}

void StepProtocol::after(ActionKind action) {
  calls_.after(action);
  if (action != ActionKind::Forward) actions_.end_pass(calls_.is_last(), calls_.is_complete());
}

void StepProtocol::finish() {
  calls_.finish();
  in_pass_ = false;
  actions_.complete();
}

void StepProtocol::arriving(const std::string& parameter) {
  if (in_pass_ && !pass_.is_over()) return;
  if (in_pass_ && plain_) leave_step();
  const bool in_backward = nn::backward_pass() >= 0;
  if (!plain_ && !calls_.in_step()) {
    require(actions_.plain_loop_refusal.empty() && in_backward, technique_, ": '", parameter, "' got a gradient outside a step; ",
            in_backward
                ? actions_.plain_loop_refusal
                : "one that no backward pass brings needs begin_step() before (those of a schedule with backwards in two halves: docs/pipeline-modules.md, "
                  "pipeline::ExecutorOptions::around)");
    actions_.open(/*plain=*/true);
    plain_ = true;
  }
  if (in_backward) begin_pass();
}

void StepProtocol::require_stated_step(const std::string& parameter) const {
  require(calls_.in_step(), technique_, ": '", parameter, "' got a gradient outside a step; ", actions_.plain_loop_refusal);
}

void StepProtocol::begin_pass() {
  in_pass_ = true;
  last_pass_ = !holds_.any() && (plain_ || calls_.is_last());
  pass_.begin(turn_, [this] { end_of_backward(); }, [this] { pass_failed(); });
  actions_.begin_pass(last_pass_);
}

void StepProtocol::end_of_backward() {
  if (plain_ && nn::is_inside_of_backward()) {
    leave_step();
    throw ConfigError(
        technique_ +
        ": a backward pass inside of another (a checkpoint that calls backward itself) brought the first gradient, and its end is not that of the "
        "whole; let a parameter outside of it be used later in the forward pass, or use tessera's recomputation");
  }
  in_pass_ = false;
  if (calls_.in_action()) calls_.pass_ended();
  if (calls_.in_action() || (!plain_ && !calls_.in_step())) return;
  actions_.end_pass(last_pass_, /*complete=*/true);
  if (!plain_ || !last_pass_) return;
  plain_ = false;
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
  if (plain_ && in_pass_) leave_step();
}

}  // namespace tessera
