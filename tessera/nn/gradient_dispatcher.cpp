#include "tessera/nn/gradient_dispatcher.h"

#include <utility>
#include <vector>

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"

namespace tessera::nn {

namespace {

/// Listeners in the order in which they came. A call under way is served from the list it began with.
class Listeners {
 public:
  using Listener = GradientDispatcher::Listener;

  std::shared_ptr<const Listener> add(Listener listener) {
    auto added = std::make_shared<const Listener>(std::move(listener));
    list_.push_back(added);
    return added;
  }
  void remove(const std::shared_ptr<const Listener>& listener) { std::erase(list_, listener); }
  void call(const at::Tensor& parameter) const {
    const auto list = list_;
    for (const auto& listener : list) (*listener)(parameter);
  }

 private:
  std::vector<std::shared_ptr<const Listener>> list_;
};

}  // namespace

struct GradientDispatcher::State {
  Listeners accumulated, final;
  std::shared_ptr<const StepPhase> phase;
  int outstanding = 0;          ///< deliveries promised and not made
  int64_t announced_step = -1;  ///< of the phase; the last step whose gradient was called final
  PlaceMaker place;             ///< on offer
  bool is_place_taken = false;
  bool arrived = false;  ///< without a phase: something accumulated since the last announcement
};

/// What sits in libtorch's slot. A hook that was there before ours goes on being called, first.
class GradientDispatcher::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(const at::Tensor& parameter, std::unique_ptr<PostAccumulateGradHook> former) : dispatcher(parameter.unsafeGetTensorImpl()), former_(std::move(former)) {}

  void operator()(const at::Tensor& parameter) override {
    if (former_) (*former_)(parameter);
    dispatcher.accumulated(parameter);
  }

  GradientDispatcher dispatcher;

 private:
  std::unique_ptr<PostAccumulateGradHook> former_;
};

GradientDispatcher::GradientDispatcher(c10::TensorImpl* parameter) : parameter_(parameter), state_(std::make_shared<State>()) {}

GradientDispatcher& GradientDispatcher::of(const at::Tensor& parameter) {
  invariant(parameter.defined() && parameter.is_leaf() && parameter.requires_grad(), "GradientDispatcher: only a leaf that requires a gradient has one");
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* ours = dynamic_cast<Hook*>(slot.get())) return ours->dispatcher;
  auto hook = std::make_unique<Hook>(parameter, std::move(slot));
  auto& dispatcher = hook->dispatcher;
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  return dispatcher;
}

Attachment GradientDispatcher::listen(Listener on_accumulated) {
  auto added = state_->accumulated.add(std::move(on_accumulated));
  return Attachment([state = std::weak_ptr(state_), added] {
    if (auto alive = state.lock()) alive->accumulated.remove(added);
  });
}

Attachment GradientDispatcher::listen_final(Listener on_final) {
  auto added = state_->final.add(std::move(on_final));
  return Attachment([state = std::weak_ptr(state_), added] {
    if (auto alive = state.lock()) alive->final.remove(added);
  });
}

void GradientDispatcher::follow(std::shared_ptr<const StepPhase> phase) {
  state_->phase = std::move(phase);
  state_->announced_step = -1;
}

void GradientDispatcher::expect(int count) { state_->outstanding += count; }

at::Tensor GradientDispatcher::parameter() const { return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(parameter_)); }

void GradientDispatcher::deliver(const at::Tensor& gradient) {
  const at::Tensor parameter = this->parameter();
  invariant(gradient.sizes() == parameter.sizes(), "a gradient of shape ", gradient.sizes(), " was delivered to a parameter of shape ", parameter.sizes());
  {
    at::NoGradGuard no_grad;
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined()) {
      grad.add_(gradient);  // in place: the gradient may be a view into a bucket
    } else {
      grad = gradient.scalar_type() == parameter.scalar_type() ? gradient : gradient.to(parameter.scalar_type());
    }
  }
  if (state_->outstanding > 0) --state_->outstanding;
  accumulated(parameter);
}

void GradientDispatcher::offer_place(at::Tensor place) {
  offer_place([place = std::move(place)] { return place; });
}

void GradientDispatcher::offer_place(PlaceMaker make) {
  state_->place = std::move(make);
  state_->is_place_taken = false;
}

void GradientDispatcher::withdraw_place() { offer_place(PlaceMaker()); }

at::Tensor GradientDispatcher::take_place(const at::Tensor& parameter) {
  if (!parameter.is_leaf() || !parameter.requires_grad() || parameter.grad().defined()) return {};
  const auto* const hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  if (hook == nullptr || !hook->dispatcher.state_->place) return {};
  hook->dispatcher.state_->is_place_taken = true;
  return std::exchange(hook->dispatcher.state_->place, {})().alias();
}

bool GradientDispatcher::is_place_taken() const { return state_->is_place_taken; }

void GradientDispatcher::accumulated(const at::Tensor& parameter) {
  const auto state = state_;  // a listener may let the tensor die
  state->arrived = true;
  state->accumulated.call(parameter);
  if (state->outstanding == 0 && (!state->phase || state->phase->last_micro_batch)) announce_final();
}

void GradientDispatcher::announce_final() {
  const auto state = state_;
  if (state->phase) {
    if (std::exchange(state->announced_step, state->phase->step) == state->phase->step) return;
  } else if (!state->arrived) {
    return;
  }
  state->arrived = false;
  state->final.call(parameter());
}

}  // namespace tessera::nn
