#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/core/attachment.h"
#include "tessera/fsdp/sharded_step.h"
#include "tessera/fsdp/unit_plan.h"
#include "tessera/nn/interceptor.h"

namespace tessera {

/// Tells a step by interceptors, and by hooks on what the intercepted modules return, which unit is needed.
///
/// Calls are numbered by a clock that ticks at their begin and end. When the gradient of a call's output arrives, every operator that was recorded
/// after that call has run backward (libtorch's engine runs the latest first), so what was only used by calls that began later is final. That
/// follows from the order of calls alone, not from which parameters got gradients, hence it is the same on all ranks. A unit that was called and that
/// backward does not reach on this rank is gathered all the same, for it may be reached on others.
///
/// A loop's step begins with the first call from outside, and parameters are whole while calls are under way and in backward, slices in between.
class CallTrigger {
 public:
  struct Options {
    bool reshard_after_forward = true;
    std::optional<at::ScalarType> inputs = {};  ///< what floating-point inputs of units, and of the root, are cast to
    std::function<void()> unseen = {};          ///< called where a call gives out what no hook can be put on
  };

  CallTrigger(UnitPlan plan, ShardedUnits& units, ShardedStep& step, Options options);

  static Attachment attach(const std::shared_ptr<CallTrigger>& trigger);

  /// How many calls are under way.
  std::shared_ptr<const int> depth() const { return depth_; }

 private:
  class Interceptor;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  struct Use {
    int active = 0;        ///< calls under way
    bool visited = false;  ///< by this backward
  };
  /// By unit: when its first call began in a forward, or, in a loop, in those whose backward may still come. Calls are numbered on from those before.
  using Begins = std::vector<int64_t>;
  /// What a call from outside has recorded; alive as long as a backward may come.
  struct Recorded {
    int64_t pass;
    bool reached = false;
  };

  void enter(size_t owner);  ///< where it returns, leave has to follow
  void need(size_t owner);
  void leave(size_t owner);
  void begin_pass();
  void begin_backward();
  void leave_outermost();
  int64_t backward_of() const { return step_.driven() ? step_.backward_of() : pass_; }
  bool freed_after(size_t owner, size_t unit) const;
  void hook_outputs(size_t owner, const nn::Values& outputs, const std::shared_ptr<CallTrigger>& self);
  void before_backward(size_t owner, int64_t end, Recorded& recorded);
  void retire_later_than(int64_t end);

  UnitPlan plan_;
  ShardedUnits& units_;
  ShardedStep& step_;
  Options options_;

  int64_t pass_ = -1;                 ///< the last that began
  std::map<int64_t, Begins> begins_;  ///< by pass: of an engine's forwards those whose backward has not come; in a loop one
  int64_t clock_ = 0;
  std::shared_ptr<int> depth_ = std::make_shared<int>(0);  ///< of calls
  std::vector<Use> uses_;
  std::shared_ptr<Recorded> recorded_;  ///< of the call from outside at hand
  std::vector<std::weak_ptr<Recorded>> all_recorded_;
  int task_ = -1;              ///< the backward pass at hand
  bool retires_early_ = true;  ///< the backward at hand is of the pass that it is taken to be of
  UseOrder evaluation_order_;
};

}  // namespace tessera
