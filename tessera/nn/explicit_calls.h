#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/nn/gradient_synchronizer.h"

/// Not part of the public surface.
namespace tessera {

/// The order of an engine's calls to a GradientSynchronizer. One that is missing or out of order is refused (ConfigError) at the next one, by name.
class ExplicitCalls {
 public:
  explicit ExplicitCalls(std::string technique) : technique_(std::move(technique)) {}

  /// `restarts`: a step that is open may be given up, as one whose pass, or action, ended by an exception.
  void begin_step(bool restarts);
  void before(ActionKind action, const MicroBatchPosition& position);
  void after(ActionKind action);
  void finish();
  void after_update() const;
  /// The step is given up.
  void leave() { *this = ExplicitCalls(std::move(technique_)); }

  /// A backward pass is complete in the action at hand.
  void pass_ended() { pass_ended_ = true; }
  /// Whether an action was begun that brought nothing and was not ended, as an exception leaves it.
  bool is_broken_off() const { return action_ && !pass_ended_; }

  bool in_step() const { return in_step_; }
  bool in(ActionKind action) const { return action_ == action; }
  bool in_action() const { return action_.has_value(); }
  /// Whether the micro-batch whose gradients come now, or came before, is the last of the step; also where no action was announced.
  bool is_last() const { return is_last_; }
  /// Whether none of its gradients come in another action.
  bool is_complete() const { return is_complete_; }
  /// How many forwards were announced whose backward was not.
  int64_t alive() const { return forwards_ - backwards_; }

 private:
  std::string technique_;
  bool in_step_ = false;
  std::optional<ActionKind> action_;
  bool pass_ended_ = false;  ///< in it
  int64_t forwards_ = 0, backwards_ = 0, awaited_weights_ = 0;
  bool has_last_ = false;
  bool is_last_ = true, is_complete_ = true;
};

}  // namespace tessera
