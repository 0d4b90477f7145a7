#pragma once

#include <cstdint>
#include <limits>
#include <memory>
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
class CallTrigger {
 public:
  CallTrigger(UnitPlan plan, ShardedUnits& units, ShardedStep& step, bool reshard_after_forward);

  static Attachment attach(const std::shared_ptr<CallTrigger>& trigger);

 private:
  class Interceptor;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  struct Use {
    int64_t begin = kNever;  ///< of the first call in this pass
    int active = 0;          ///< calls under way
    bool visited = false;    ///< by this backward
  };

  void enter(size_t owner);
  void leave(size_t owner);
  void leave_evaluation();
  bool freed_after(size_t owner, size_t unit) const;
  void hook_outputs(size_t owner, const nn::Values& outputs, const std::shared_ptr<CallTrigger>& self);
  void before_backward(size_t owner, int64_t end);
  void retire_later_than(int64_t end);

  UnitPlan plan_;
  ShardedUnits& units_;
  ShardedStep& step_;
  bool reshard_;

  int64_t pass_ = -1;  ///< that `uses_` is of
  int64_t clock_ = 0;
  int depth_ = 0;  ///< of calls
  std::vector<Use> uses_;
  UseOrder evaluation_order_;
};

}  // namespace tessera
