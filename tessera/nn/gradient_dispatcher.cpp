#include "tessera/nn/gradient_dispatcher.h"

#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"

// The slot belongs to the tensor, the hook in it to the slot, the dispatcher to the hook: all go together, so nobody needs a table of parameters. Hence no
// reference back, which would keep the tensor alive for ever, and attachments that know the state only weakly, since they may outlive it. A hook before
// accumulation also runs where torch::autograd::grad captures the gradient and accumulates nothing; what the engine plans for the node tells the two apart.

namespace tessera::nn {

namespace {

/// Listeners in the order in which they came. A call under way is served from the list it began with.
class Listeners {
 public:
  using Listener = GradientDispatcher::Listener;

  std::shared_ptr<const Listener> add(Listener listener) { return *list_.insert(list_.end(), std::make_shared<const Listener>(std::move(listener))); }
  std::shared_ptr<const Listener> add_first(Listener listener) { return *list_.insert(list_.begin(), std::make_shared<const Listener>(std::move(listener))); }
  void remove(const std::shared_ptr<const Listener>& listener) { std::erase(list_, listener); }
  void call(const at::Tensor& parameter) const {
    const auto list = list_;
    for (const auto& listener : list) (*listener)(parameter);
  }

 private:
  std::vector<std::shared_ptr<const Listener>> list_;
};

/// Whether the pass at hand only reads the gradient (torch::autograd::grad) and accumulates none.
bool is_only_captured() {
  const auto* const passes_through = torch::autograd::get_current_graph_task_exec_info();
  if (passes_through == nullptr || passes_through->empty()) return false;
  const auto found = passes_through->find(torch::autograd::get_current_node().get());
  return found != passes_through->end() && !found->second.needed_;
}

bool has_autograd_meta(const at::Tensor& tensor) { return tensor.defined() && torch::autograd::impl::get_autograd_meta(tensor) != nullptr; }

}  // namespace

struct GradientDispatcher::State {
  Listeners arriving, accumulated, final;
  bool hears_arrivals = false;  ///< the hook for them is there
  struct Claim {
    GradientSynchronizer* owner;
    std::optional<TakenUp> taken_up;  ///< gradients, by autograd; none: in the parameter's own type
  };
  std::vector<Claim> claims;                     ///< the last one holds
  std::optional<at::ScalarType> own_grad_dtype;  ///< before anybody claimed it
  bool takes_up_otherwise = false;               ///< somebody has said in what

  /// Whoever comes or goes, it is the claim that holds which says in what gradients are taken up.
  void settle_grad_dtype(const at::Tensor& parameter) {
    if (!takes_up_otherwise) return;
    const auto said = claims.empty() ? std::nullopt : claims.back().taken_up;
    parameter.set_grad_dtype(said ? said->in : own_grad_dtype);
  }

  std::shared_ptr<const StepPhase> phase;
  int outstanding = 0;          ///< deliveries promised and not made
  int64_t announced_step = -1;  ///< of the phase; the last step whose gradient was called final
  PlaceMaker place;             ///< on offer
  bool is_place_taken = false;
  bool adds_in_place = false;
  bool arrived = false;  ///< without a phase: something accumulated since the last announcement
  bool takes_up = true;  ///< what the hook for arrivals saw last is accumulated; true where there is no such hook
  c10::intrusive_ptr<c10::BackendMeta> known;
};

/// What sits in libtorch's slot, and is called as well where nothing was accumulated: of a function that has no gradient for the parameter, and where that was
/// frozen since its forward. A hook that was there before ours goes on being called, first.
class GradientDispatcher::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(const at::Tensor& parameter, std::unique_ptr<PostAccumulateGradHook> former) : dispatcher(parameter.unsafeGetTensorImpl()), former_(std::move(former)) {}

  void operator()(const at::Tensor& parameter) override {
    if (former_) (*former_)(parameter);
    if (dispatcher.state_->takes_up && parameter.requires_grad() && parameter.grad().defined()) dispatcher.accumulated(parameter);
  }

  GradientDispatcher dispatcher;

 private:
  std::unique_ptr<PostAccumulateGradHook> former_;
};

/// Runs before autograd's accumulation, and changes nothing of what it accumulates. It cannot be taken back: without listeners it does nothing.
class GradientDispatcher::ArrivalHook : public torch::autograd::FunctionPreHook {
 public:
  ArrivalHook(c10::TensorImpl* parameter, std::shared_ptr<State> state) : parameter_(parameter), state_(std::move(state)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (is_only_captured()) return gradients;
    const at::Tensor parameter(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(parameter_));
    state_->takes_up = gradients.at(0).defined() && parameter.requires_grad();
    if (state_->takes_up) state_->arriving.call(parameter);
    return gradients;
  }

 private:
  c10::TensorImpl* parameter_;  ///< owner of this hook
  std::shared_ptr<State> state_;
};

GradientDispatcher::GradientDispatcher(c10::TensorImpl* parameter) : parameter_(parameter), state_(std::make_shared<State>()) {}

GradientDispatcher* GradientDispatcher::find(const at::Tensor& parameter) {
  if (!has_autograd_meta(parameter)) return nullptr;
  auto* const ours = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  return ours == nullptr ? nullptr : &ours->dispatcher;
}

GradientDispatcher& GradientDispatcher::of(const at::Tensor& parameter) {
  if (auto* const found = find(parameter)) return *found;
  invariant(parameter.defined() && parameter.is_leaf() && (parameter.is_floating_point() || parameter.is_complex()),
            "GradientDispatcher: only a leaf that can have a gradient has one");
  torch::autograd::impl::materialize_autograd_meta(parameter);  // of a frozen parameter, which may get its first gradient later
  auto hook = std::make_unique<Hook>(parameter, std::move(torch::autograd::impl::post_acc_grad_hooks(parameter)));
  auto& dispatcher = hook->dispatcher;
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  return dispatcher;
}

c10::intrusive_ptr<c10::BackendMeta> GradientDispatcher::known_of(const at::Tensor& parameter) {
  const auto* const dispatcher = find(parameter);
  return dispatcher == nullptr ? nullptr : dispatcher->state_->known;
}

void GradientDispatcher::know(const at::Tensor& parameter, c10::intrusive_ptr<c10::BackendMeta> known) { of(parameter).state_->known = std::move(known); }

Attachment GradientDispatcher::listen_arriving(Listener before_accumulation) {
  hear_arrivals();
  return while_alive(state_->arriving.add(std::move(before_accumulation)));
}

Attachment GradientDispatcher::watch_arriving(Listener before_anybody) {
  hear_arrivals();
  return while_alive(state_->arriving.add_first(std::move(before_anybody)));
}

Attachment GradientDispatcher::while_alive(std::shared_ptr<const Listener> arriving) const {
  return Attachment([state = std::weak_ptr(state_), arriving] {
    if (auto alive = state.lock()) alive->arriving.remove(arriving);
  });
}

void GradientDispatcher::hear_arrivals() {
  if (!std::exchange(state_->hears_arrivals, true)) {
    // libtorch's add_hook would have it be the only one, and a program's first register_hook comes by it: so that has been, and ours stands beside it.
    const at::Tensor parameter = this->parameter();
    const bool frozen = !parameter.requires_grad();
    if (frozen) parameter.set_requires_grad(true);
    if (torch::autograd::impl::hooks(parameter).empty()) parameter.register_hook([](const at::Tensor&) {});
    if (frozen) parameter.set_requires_grad(false);
    torch::autograd::impl::hooks(parameter).push_back(std::make_unique<ArrivalHook>(parameter_, state_));
  }
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

void GradientDispatcher::unfollow(const std::shared_ptr<const StepPhase>& phase) {
  if (state_->phase == phase) follow(nullptr);
}

Attachment GradientDispatcher::claim(GradientSynchronizer* owner, std::optional<TakenUp> taken_up) {
  State& now = *state_;
  if (taken_up && !std::exchange(now.takes_up_otherwise, true)) now.own_grad_dtype = parameter().grad_dtype();
  now.claims.push_back({owner, taken_up});
  now.settle_grad_dtype(parameter());
  return Attachment([state = std::weak_ptr(state_), owner, parameter = parameter_] {
    const auto alive = state.lock();
    if (!alive) return;
    std::erase_if(alive->claims, [&](const State::Claim& claim) { return claim.owner == owner; });
    alive->settle_grad_dtype(at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(parameter)));
  });
}

GradientSynchronizer* GradientDispatcher::owner() const { return state_->claims.empty() ? nullptr : state_->claims.back().owner; }

void GradientDispatcher::expect(int count) { state_->outstanding += count; }

at::Tensor GradientDispatcher::parameter() const { return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(parameter_)); }

void GradientDispatcher::deliver(const at::Tensor& gradient) {
  if (state_->outstanding > 0) --state_->outstanding;  // whatever becomes of it
  const at::Tensor parameter = this->parameter();
  invariant(gradient.sizes() == parameter.sizes(), "a gradient of shape ", gradient.sizes(), " was delivered to a parameter of shape ", parameter.sizes());
  {
    const at::NoGradGuard no_grad;
    // What stands between autograd and the accumulation: the type in which gradients are taken up, then hooks, ours for arrivals among them.
    torch::autograd::variable_list arriving{gradient.to(parameter.grad_dtype().value_or(gradient.scalar_type()))};
    for (const auto& hook : torch::autograd::impl::hooks(parameter)) arriving = (*hook)(arriving);
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined()) {
      grad.add_(arriving[0]);  // in place: the gradient may be a view into a bucket
    } else {
      grad = arriving[0];
    }
  }
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

void GradientDispatcher::add_in_place(bool adds) { state_->adds_in_place = adds; }

bool GradientDispatcher::adds_in_place(const at::Tensor& parameter) {
  const auto* const dispatcher = find(parameter);
  return dispatcher != nullptr && dispatcher->state_->adds_in_place && parameter.is_leaf() && parameter.requires_grad() && parameter.is_contiguous() &&
         is_on_host(parameter) && torch::autograd::impl::hooks(parameter).empty();
}

kernels::GradientPlace GradientDispatcher::take_place(const at::Tensor& parameter) {
  if (!parameter.is_leaf() || !parameter.requires_grad()) return {};
  const auto* const dispatcher = find(parameter);
  at::Tensor& grad = parameter.mutable_grad();
  if (dispatcher != nullptr && dispatcher->state_->place && !grad.defined()) {
    dispatcher->state_->is_place_taken = true;
    return {.memory = std::exchange(dispatcher->state_->place, {})().detach()};  // no view to autograd, which refuses to detach one in place
  }
  if (!adds_in_place(parameter)) return {};
  const at::ScalarType dtype = parameter.grad_dtype().value_or(parameter.scalar_type());
  if (!grad.defined()) {
    const MemoryScope scope(MemoryCategory::Gradients);
    return {.memory = at::empty(parameter.sizes(), parameter.options().dtype(dtype).requires_grad(false))};
  }
  if (grad.scalar_type() != dtype || !grad.is_contiguous() || grad.requires_grad()) return {};
  return {.memory = std::exchange(grad, {}).detach(), .holds_sum = true};
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

std::vector<bool> met_several_times(const std::vector<at::Tensor>& leaves) {
  std::vector<bool> several(leaves.size(), false);
  std::unordered_map<const torch::autograd::Node*, std::pair<size_t, int>> edges;  // into the accumulation of a leaf; the engine keeps this count to itself
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaves[i])) edges[accumulator.get()] = {i, 0};
  }
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (edges.empty() || nodes == nullptr) return several;
  const auto count = [&](const torch::autograd::Node& node) {
    for (const auto& edge : node.next_edges()) {
      const auto found = edges.find(edge.function.get());
      if (found != edges.end() && ++found->second.second > 1) several[found->second.first] = true;
    }
  };
  for (const torch::autograd::Node* const node : *nodes) count(*node);
  // The one that the pass began with is not among them; a hook on what a module returned may run in it.
  if (const auto at_hand = torch::autograd::get_current_node(); at_hand && !nodes->contains(at_hand.get())) count(*at_hand);
  return several;
}

GradientSynchronizer* owner_of(const at::Tensor& updated) {
  const at::Tensor parameter = updated_for(updated);
  const auto* const dispatcher = parameter.defined() ? GradientDispatcher::find(parameter) : nullptr;
  GradientSynchronizer* const owner = dispatcher == nullptr ? nullptr : dispatcher->owner();
  return owner == nullptr ? nullptr : &owner->outermost();
}

std::vector<NamedParameter> owned_by(const GradientSynchronizer& synchronizer) {
  std::vector<NamedParameter> parameters = synchronizer.updated();
  std::erase_if(parameters, [&](const NamedParameter& updated) {
    const GradientSynchronizer* const owner = owner_of(updated.tensor);
    return owner != nullptr && owner != &synchronizer;
  });
  return parameters;
}

}  // namespace tessera::nn
