#pragma once

#include <functional>
#include <string>

#include "tessera/nn/backward_pass.h"
#include "tessera/nn/explicit_calls.h"
#include "tessera/nn/gradient_synchronizer.h"

/// What the synchronizers' steps have in common. Not part of the public surface.
namespace tessera {

/// When the steps of a GradientSynchronizer begin and end, in the plain loop and by explicit calls.
///
/// In the plain loop a step opens with the first gradient that arrives after the step before was complete. Which backward pass a gradient is of, libtorch's
/// engine tells (nn/backward_pass.h); the end of a pass that runs while nobody holds no_sync() completes the step. A pass that ended by an exception never ends
/// for us: what the engine would have called is gone with it. In the plain loop the step is abandoned as that goes, before the program sees the exception, so
/// that an optimizer's step after it finds what was there before; by explicit calls the next begin_step does, and so after an action that an exception broke
/// off before it brought anything. A backward pass inside of another (a checkpoint that calls backward itself) belongs to that one; where it brings the first
/// gradient, its end cannot be told from that of the whole, and it is refused.
///
/// An engine's calls are checked by ExplicitCalls.
class StepProtocol {
 public:
  /// What the technique does then.
  struct Actions {
    std::function<void(bool plain)> open;                     ///< a step begins
    std::function<void(bool last)> begin_pass = [](bool) {};  ///< a backward pass that completes the step's gradients, or not, has the first of its own
    /// It is over, or an engine's action that brought gradients; `complete`: none of its micro-batch come later.
    std::function<void(bool last, bool complete)> end_pass = [](bool, bool) {};
    std::function<void()> complete;         ///< the last one was
    std::function<void()> abandon = [] {};  ///< a pass ended by an exception; must not throw
    std::string plain_loop_refusal = {};    ///< why the plain loop does not work; empty where it does
  };

  /// `holds`: of no_sync(). `turn`: among wrappers whose steps the same pass completes.
  StepProtocol(std::string technique, nn::Holds holds, nn::Turn turn, Actions actions)
      : technique_(technique), holds_(std::move(holds)), turn_(std::move(turn)), actions_(std::move(actions)), calls_(std::move(technique)) {}

  void begin_step();
  void before(ActionKind action, const MicroBatchPosition& position) { calls_.before(action, position); }
  void after(ActionKind action);
  void finish();
  void after_update() const { calls_.after_update(); }

  const ExplicitCalls& calls() const { return calls_; }

  /// Before each gradient is accumulated. Throws ConfigError where none may come.
  void arriving(const std::string& parameter);
  /// Where nothing is summed, and gradients are relayed alone: a step has begun, or refuses as `arriving` does.
  void require_stated_step(const std::string& parameter) const;

 private:
  void begin_pass();
  void end_of_backward();
  void pass_failed();
  bool leave_step();  ///< whether a pass ended by an exception

  std::string technique_;
  nn::Holds holds_;
  nn::Turn turn_;
  Actions actions_;

  ExplicitCalls calls_;
  bool plain_ = false;    ///< a step of the plain loop is open
  bool in_pass_ = false;  ///< begun, and not ended as passes end
  bool last_pass_ = true;
  nn::PassWatch pass_;  // goes before the others, which what it calls uses
};

}  // namespace tessera
