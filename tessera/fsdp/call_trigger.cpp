#include "tessera/fsdp/call_trigger.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/module.h"
#include "tessera/nn/saved_tensors.h"

// The gradient of a call's output arrives before anything of the call runs backward: the last moment to gather its unit, and the proof that all that was called
// later is done. A hook on parameters would come too late for the one, and on each rank at another time for the other. In backward a call is a recomputation,
// which begins no pass, and leaves to backward what that needs next.

namespace tessera {
namespace {

/// Visits the tensors in a value; false where it holds something that cannot be looked into.
template <class F>
bool for_each_tensor(const c10::IValue& value, F&& visit) {
  bool seen = true;
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) seen &= for_each_tensor(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) seen &= for_each_tensor(item, visit);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) seen &= for_each_tensor(item.value(), visit);
  } else if (value.isObject()) {
    for (const c10::IValue& slot : value.toObjectRef().slots()) seen &= for_each_tensor(slot, visit);
  } else {
    return !value.isCapsule();
  }
  return seen;
}

bool differs(const at::Tensor& tensor, at::ScalarType dtype) { return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype; }

c10::IValue cast(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) return differs(value.toTensor(), dtype) ? value.toTensor().to(dtype) : value.toTensor();
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(differs(tensor, dtype) ? tensor.to(dtype) : tensor);
  return list;
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
      trigger.need(owner_);  // may refuse, of what was loaded, or find no memory: the call has begun then, and ends
      if (trigger.options_.inputs) {
        for (c10::IValue& input : inputs) input = cast(input, *trigger.options_.inputs);
      }
      outputs = next(std::move(inputs));
      trigger.hook_outputs(owner_, outputs, trigger_);
    } catch (...) {
      trigger.leave(owner_);
      throw;
    }
    trigger.leave(owner_);
    return outputs;
  }

  void before_use(nn::Module&) override {
    if (*trigger_->depth_ > 0) trigger_->need(owner_);  // a call from outside begins with what it needs itself
  }

 private:
  std::shared_ptr<CallTrigger> trigger_;
  size_t owner_;
};

CallTrigger::CallTrigger(UnitPlan plan, ShardedUnits& units, ShardedStep& step, Options options)
    : plan_(std::move(plan)), units_(units), step_(step), options_(std::move(options)), uses_(units.size()) {}

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

void CallTrigger::begin_pass() {
  const int64_t before = std::exchange(pass_, step_.pass());
  // What was recorded before and may still be reached needs its numbers; an engine says which backward is of which forward.
  std::erase_if(all_recorded_, [](const auto& recorded) { return recorded.expired() || recorded.lock()->reached; });
  Begins begins(uses_.size(), kNever);
  if (const auto found = begins_.find(before); found != begins_.end() && !all_recorded_.empty() && !step_.driven()) begins = std::move(found->second);
  std::erase_if(begins_, [this](const auto& item) { return item.first < step_.backward_of(); });
  begins_[pass_] = std::move(begins);
  for (Use& use : uses_) use.visited = false;
}

void CallTrigger::enter(size_t owner) {
  if (*depth_ == 0) {
    require(!step_.aborted() || !step_.driven(), "fully_shard: a backward pass of this step ended by an exception; call begin_step before the next forward");
    step_.recover();
  }
  // What a recomputed module ends with may owe nothing to any unit (dropout behind a cut layer): it is computed again before a hook of ours has run. What such
  // a module only looks at, without gradients, is no part of that pass.
  if (*depth_ == 0 && at::GradMode::is_enabled() && nn::recomputing() && nn::backward_pass() >= 0) {
    step_.begin_backward();
    begin_backward();
  }
  const bool outermost = *depth_ == 0 && !step_.in_backward();
  if (outermost) {
    if (step_.running()) {
      if (owner == 0) step_.restart_order();
    } else if (at::GradMode::is_enabled()) {
      step_.begin(Drive::Loop);
    } else {
      evaluation_order_.begin_forward();
    }
    if (at::GradMode::is_enabled()) step_.resume();
  }
  if (!step_.in_backward() && pass_ != step_.pass()) begin_pass();
  if (outermost || !recorded_) {
    recorded_ = std::make_shared<Recorded>(Recorded{.pass = pass_});
    if (step_.running() && !step_.driven()) all_recorded_.push_back(recorded_);
  }
  ++*depth_;
  for (const size_t unit : plan_.owners[owner].units) ++uses_[unit].active;
}

void CallTrigger::need(size_t owner) {
  const int64_t begin = clock_++;
  for (const size_t unit : plan_.owners[owner].units) {
    if (!step_.in_backward()) {
      int64_t& first = begins_.at(pass_)[unit];
      first = std::min(first, begin);
    }
    step_.use(unit, step_.running() ? step_.order() : evaluation_order_);
  }
}

/// In the first pass nobody knows what is called next but by the order of registration.
bool CallTrigger::freed_after(size_t owner, size_t unit) const {
  if (uses_[unit].active > 0) return false;
  if (step_.running() && !options_.reshard_after_forward && at::GradMode::is_enabled()) return false;
  const UseOrder& order = step_.running() ? step_.order() : evaluation_order_;
  return order.is_known() ? !order.comes_again_in_forward(unit) : owner == plan_.units[unit].last_owner;
}

void CallTrigger::leave(size_t owner) {
  --*depth_;
  ++clock_;
  for (const size_t unit : plan_.owners[owner].units) {
    --uses_[unit].active;
    // In backward a call is a recomputation, and what it used is what backward needs next, unless that is done.
    if ((step_.in_backward() ? step_.retired(unit) : freed_after(owner, unit)) && !step_.leaves_gathered(unit)) units_.release_for_now(unit);
  }
  if (*depth_ == 0) leave_outermost();
}

/// Parameters are slices whenever no call is under way, but for an engine's step.
void CallTrigger::leave_outermost() {
  if (step_.running()) return step_.pause(/*stays=*/!options_.reshard_after_forward && at::GradMode::is_enabled());
  units_.release_all();
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_slices(unit);
}

void CallTrigger::hook_outputs(size_t owner, const nn::Values& outputs, const std::shared_ptr<CallTrigger>& self) {
  if (!step_.running() || step_.in_backward() || !at::GradMode::is_enabled() || plan_.owners[owner].units.empty()) return;
  const auto hook = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad() || tensor.is_leaf()) return;
    tensor.register_hook([trigger = std::weak_ptr(self), owner, end = clock_, recorded = recorded_](const at::Tensor&) {
      if (const auto alive = trigger.lock()) alive->before_backward(owner, end, *recorded);
    });
  };
  bool seen = true;
  for (const c10::IValue& output : outputs) {
    seen &= for_each_tensor(output, [&](const at::Tensor& tensor) {
      hook(tensor);
      // Whoever writes to a view gives it, and what it is a view of, another history, in which the view as it is now is no more.
      if (tensor.defined() && tensor.is_view()) hook(at::Tensor(tensor._base()));
    });
  }
  if (!seen && options_.unseen) options_.unseen();
}

void CallTrigger::before_backward(size_t owner, int64_t end, Recorded& recorded) {
  step_.begin_backward();
  begin_backward();
  recorded.reached = true;
  if (recorded.pass != backward_of()) retires_early_ = false;
  if (retires_early_) retire_later_than(end);
  for (const size_t unit : plan_.owners[owner].units) {
    if (step_.retired(unit)) continue;
    uses_[unit].visited = true;
    step_.use(unit, step_.order());
  }
}

void CallTrigger::begin_backward() {
  if (std::exchange(task_, nn::backward_pass()) == nn::backward_pass()) return;
  for (Use& use : uses_) use.visited = false;
  retires_early_ = true;
}

void CallTrigger::retire_later_than(int64_t end) {
  begin_backward();
  const auto found = begins_.find(backward_of());
  if (found == begins_.end()) return;
  const Begins& begins = found->second;
  std::vector<size_t> left;
  for (size_t unit = 0; unit < uses_.size(); ++unit) {
    if (begins[unit] != kNever && begins[unit] > end && !step_.retired(unit)) left.push_back(unit);
  }
  std::ranges::sort(left, [&](size_t a, size_t b) { return begins[a] > begins[b]; });
  for (const size_t unit : left) {
    if (!uses_[unit].visited) step_.use(unit, step_.order());
    step_.retire(unit);
  }
}

}  // namespace tessera
