#include "tessera/fsdp/call_trigger.h"

#include <algorithm>

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/module.h"

namespace tessera {
namespace {

template <class F>
void for_each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) for_each_tensor(item, visit);
  }
}

}  // namespace

class CallTrigger::Interceptor : public nn::Interceptor {
 public:
  Interceptor(std::shared_ptr<CallTrigger> trigger, size_t owner) : trigger_(std::move(trigger)), owner_(owner) {}

  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    CallTrigger& trigger = *trigger_;
    trigger.enter(owner_);
    nn::Values outputs;
    try {
      outputs = next(std::move(inputs));
    } catch (...) {
      trigger.leave(owner_);
      throw;
    }
    trigger.hook_outputs(owner_, outputs, trigger_);
    trigger.leave(owner_);
    return outputs;
  }

 private:
  std::shared_ptr<CallTrigger> trigger_;
  size_t owner_;
};

CallTrigger::CallTrigger(UnitPlan plan, ShardedUnits& units, ShardedStep& step, bool reshard_after_forward)
    : plan_(std::move(plan)), units_(units), step_(step), reshard_(reshard_after_forward), uses_(units.size()) {}

Attachment CallTrigger::attach(const std::shared_ptr<CallTrigger>& trigger) {
  Attachment attached;
  trigger->step_.before_backward_ends([alive = std::weak_ptr(trigger)] {
    if (const auto trigger = alive.lock()) trigger->retire_later_than(-1);
  });
  for (size_t owner = 0; owner < trigger->plan_.owners.size(); ++owner) {
    if (auto* ours = dynamic_cast<nn::Module*>(trigger->plan_.owners[owner].module.get())) {
      attached.add(nn::attach(*ours, std::make_shared<Interceptor>(trigger, owner)));
    }
  }
  return attached;
}

void CallTrigger::enter(size_t owner) {
  if (!step_.running() && depth_ == 0) evaluation_order_.restart();
  if (!step_.in_backward() && pass_ != step_.pass()) {
    pass_ = step_.pass();
    for (Use& use : uses_) {
      use.begin = kNever;
      use.visited = false;
    }
    clock_ = 0;
  }
  ++depth_;
  const int64_t begin = clock_++;
  for (const size_t unit : plan_.owners[owner].units) {
    ++uses_[unit].active;
    if (!step_.in_backward()) uses_[unit].begin = std::min(uses_[unit].begin, begin);
    step_.use(unit, step_.running() ? step_.order() : evaluation_order_);
  }
}

/// In the first pass nobody knows what is called next but by the order of registration.
bool CallTrigger::freed_after(size_t owner, size_t unit) const {
  if (uses_[unit].active > 0) return false;
  if (step_.running() && !reshard_ && at::GradMode::is_enabled()) return false;
  const UseOrder& order = step_.running() ? step_.order() : evaluation_order_;
  return order.is_known() ? !order.comes_again_in_forward(unit) : owner == plan_.units[unit].last_owner;
}

void CallTrigger::leave(size_t owner) {
  --depth_;
  ++clock_;
  for (const size_t unit : plan_.owners[owner].units) {
    --uses_[unit].active;
    // In backward a call is a recomputation, and what it used is what backward needs next, unless that is done.
    if (step_.in_backward() ? step_.retired(unit) : freed_after(owner, unit)) units_.release(unit);
  }
  if (depth_ == 0 && !step_.running()) leave_evaluation();
}

/// Outside of a step parameters are slices whenever no call is under way.
void CallTrigger::leave_evaluation() {
  units_.release_all();
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_slices(unit);
}

void CallTrigger::hook_outputs(size_t owner, const nn::Values& outputs, const std::shared_ptr<CallTrigger>& self) {
  if (!step_.running() || step_.in_backward() || !at::GradMode::is_enabled() || plan_.owners[owner].units.empty()) return;
  for (const c10::IValue& output : outputs) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.requires_grad() || tensor.is_leaf()) return;
      tensor.register_hook([trigger = std::weak_ptr(self), owner, end = clock_](const at::Tensor&) {
        if (const auto alive = trigger.lock()) alive->before_backward(owner, end);
      });
    });
  }
}

void CallTrigger::before_backward(size_t owner, int64_t end) {
  require(step_.running(), "fully_shard: backward reached '", plan_.owners[owner].path,
          "' outside a step; call begin_step before forward, and finish after backward");
  if (!step_.in_backward()) {
    for (Use& use : uses_) use.visited = false;
    step_.begin_backward();
  }
  retire_later_than(end);
  for (const size_t unit : plan_.owners[owner].units) {
    uses_[unit].visited = true;
    step_.use(unit, step_.order());
  }
}

void CallTrigger::retire_later_than(int64_t end) {
  std::vector<size_t> left;
  for (size_t unit = 0; unit < uses_.size(); ++unit) {
    if (uses_[unit].begin != kNever && uses_[unit].begin > end && !step_.retired(unit)) left.push_back(unit);
  }
  std::ranges::sort(left, [&](size_t a, size_t b) { return uses_[a].begin > uses_[b].begin; });
  for (const size_t unit : left) {
    if (!uses_[unit].visited) step_.use(unit, step_.order());
    step_.retire(unit);
  }
}

}  // namespace tessera
