#include "tessera/zero/zero_optimizer.h"

#include <algorithm>
#include <array>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/given_parts.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/sharing.h"

// The optimizer knows the parts and zero_grad() reaches only their gradients; but what no_sync() left lies with the whole parameters, and has to be cleared
// with them. Its zero_grad is not virtual, so it cannot be overridden: while an expression through `->` lasts, guards stand in as the parts' gradients, and
// what became of the guard (gone, or zeroed) is then done to the gradient that it stood for. Nor can its step be made ours: by the same guards it is refused.

namespace tessera::detail {
namespace {

std::string waiting_message(const std::string& name) {
  return concat(
      "zero_optimizer: the gradient of '", name,
      "' waits whole on this rank, where no_sync() left it or the program put it (mutable_grad(), of torch::autograd::grad), and has met no other rank's; "
      "call backward once without no_sync() before the optimizer steps, or give it up by zero_grad(). A gradient that no backward pass brings has to be "
      "summed over the ranks, and put on the parts (updated())");
}

/// Of the parameter of which this is updated, as its wrapper names it.
std::string name_of(const GradientSynchronizer& owner, const at::Tensor& tensor) {
  const at::Tensor parameter = nn::updated_for(tensor);
  for (const nn::NamedParameter& theirs : owner.updated()) {
    if (nn::updated_for(theirs.tensor).is_same(parameter)) return theirs.name;
  }
  return nn::slice_of(tensor).name;
}

std::string inner_step_message(const std::string& name) {
  return concat("zero_optimizer: the gradient of this rank's part of '", name,
                "' was used while an expression with `optimizer->` lasts. If that is optimizer->step(), which updates this rank's parts and leaves ranks with "
                "different parameters, write optimizer.step(); what it has begun (decay, averages, counts of updates) is not taken back, so load state before "
                "going on. If it is an argument of another call, put it into a variable before. Parts and their gradients are in wrapper.updated()");
}

/// What is updated in place of a parameter that has a gradient of this rank alone; undefined for everything else.
at::Tensor waiting_parameter(const nn::NamedParameter& updated) {
  const at::Tensor parameter = nn::updated_for(updated.tensor);
  if (!parameter.defined() || parameter.is_same(updated.tensor) || !parameter.requires_grad()) return {};
  return parameter.grad().defined() && !nn::is_gradient_guard(parameter.grad()) ? parameter : at::Tensor();
}

/// One whose gradient a step that has begun has set aside, to add to: its guard stands in grad(), and the part has none yet.
at::Tensor parameter_set_aside(const nn::NamedParameter& updated) {
  const at::Tensor parameter = nn::updated_for(updated.tensor);
  if (!parameter.defined() || parameter.is_same(updated.tensor) || updated.tensor.grad().defined()) return {};
  return parameter.grad().defined() && nn::is_gradient_guard(parameter.grad()) ? parameter : at::Tensor();
}

/// By their very classes: what a program derives from one may do anything in its step.
bool is_known_to_go_by_elements(const torch::optim::Optimizer& optimizer) {
  const std::array<std::type_index, 5> known{typeid(torch::optim::Adam), typeid(torch::optim::AdamW), typeid(torch::optim::SGD), typeid(torch::optim::Adagrad),
                                             typeid(torch::optim::RMSprop)};
  return std::ranges::find(known, std::type_index(typeid(optimizer))) != known.end();
}

template <class State>
const State* as(const torch::optim::OptimizerParamState* state) {
  return dynamic_cast<const State*>(state);
}

/// What one of the known classes keeps of each element; undefined where there is nothing so far.
at::Tensor state_of(const torch::optim::Optimizer& optimizer, const at::Tensor& updated) {
  const auto found = optimizer.state().find(updated.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return {};
  const torch::optim::OptimizerParamState* const state = found->second.get();
  if (const auto* const adam = as<torch::optim::AdamParamState>(state)) return adam->exp_avg();
  if (const auto* const adam = as<torch::optim::AdamWParamState>(state)) return adam->exp_avg();
  if (const auto* const sgd = as<torch::optim::SGDParamState>(state)) return sgd->momentum_buffer();
  if (const auto* const adagrad = as<torch::optim::AdagradParamState>(state)) return adagrad->sum();
  if (const auto* const rmsprop = as<torch::optim::RMSpropParamState>(state)) return rmsprop->square_avg();
  return {};
}

/// What to say of state of other sizes than the part has, which is `part`.
std::string misfit(const GradientSynchronizer& synchronizer, const nn::NamedParameter& updated, at::IntArrayRef part, const at::Tensor& state) {
  const at::Tensor parameter = nn::updated_for(updated.tensor);
  const std::vector<int64_t> whole = parameter.defined() && !parameter.is_same(updated.tensor) ? parameter.sizes().vec() : nn::slice_of(updated.tensor).shape;
  bool another_ranks = false;
  for (int rank = 0; rank < synchronizer.norm_group().size(); ++rank) {
    another_ranks |= at::IntArrayRef(synchronizer.slice_on(rank, updated.tensor).local_shape()) == state.sizes();
  }
  return concat("zero_optimizer: the optimizer's state of '", updated.name, "' has shape ", state.sizes(), ", where this rank updates ", part, " of ",
                at::IntArrayRef(whole), ": ", nn::whose_state(state.sizes(), whole, another_ranks, "the wrapper"));
}

/// What a rank says of the state of its parts.
struct ToldState {
  int64_t state = 0, gradients = 0;  ///< nn::told_together
  std::string misfit{};              ///< of the first one of other sizes

  static constexpr int64_t kWords = 3;
};

ToldState look_at_state(const GradientSynchronizer& synchronizer, const std::vector<nn::NamedParameter>& all, const torch::optim::Optimizer& optimizer,
                        bool compares) {
  ToldState told;
  std::vector<int64_t> state_bits, gradient_bits;
  for (const nn::NamedParameter& updated : all) {
    const at::Tensor state = state_of(optimizer, updated.tensor);
    if (!state.defined() || state.is_meta()) continue;
    // Not the sizes that the tensor shows: behind a forward that no backward has followed, as a line for a log begins one, parameters of fully_shard are whole
    // until the update's own operators end it.
    const std::vector<int64_t> part = nn::slice_of(updated.tensor).local_shape();
    if (state.sizes() != at::IntArrayRef(part) && told.misfit.empty()) told.misfit = misfit(synchronizer, updated, part, state);
    if (!compares) continue;
    state_bits.push_back(nn::bits_of(state));
    gradient_bits.push_back(updated.tensor.grad().defined() ? nn::bits_of(updated.tensor.grad()) : 0);
  }
  told.state = nn::told_together(state_bits);
  told.gradients = nn::told_together(gradient_bits);
  return told;
}

/// torch::save on one rank keeps that rank's moments; torch::load of that file on all fits wherever parts are as large, and nothing but their bits tells. Where
/// the gradients are alike, too, the parts may be copies of one another.
void refuse_one_ranks_state(const ToldState& own, const comm::Group& group, const at::Tensor& updated) {
  const comm::CallSite site("zero.state");
  const at::Tensor mine = at::tensor({own.state, own.gradients, static_cast<int64_t>(!own.misfit.empty())}, at::kLong).to(message_device(updated, group));
  at::Tensor all = at::zeros({group.size(), ToldState::kWords}, mine.options());
  comm::all_gather(group, all, mine);
  if (updated.is_meta()) return;  // a dry run, whose messages mean nothing
  all = all.cpu();
  std::vector<int64_t> states, gradients, misfits;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const int64_t* const row = all.const_data_ptr<int64_t>() + rank * ToldState::kWords;
    states.push_back(row[0]);
    gradients.push_back(row[1]);
    misfits.push_back(row[2]);
  }
  require(own.misfit.empty(), own.misfit);
  const auto unfit = std::ranges::find_if(misfits, [](int64_t any) { return any != 0; });
  if (unfit != misfits.end()) {
    throw ConfigError(concat("zero_optimizer: on rank ", group.world_rank(static_cast<int>(unfit - misfits.begin())),
                             " the optimizer's state has other sizes than the parts that it updates there; its own refusal says which, and what to load"));
  }
  const bool same_gradients = std::ranges::all_of(gradients, [&](int64_t each) { return each == gradients.front(); });
  require(!nn::were_given_alike(states) || same_gradients, "zero_optimizer: the optimizer's state is the same on all ", group.size(), " ranks of ",
          group.name(),
          ", which update other parts each: a file that torch::save made of one rank's optimizer holds that rank's state, and was loaded on all of them; bring "
          "the state over by checkpoint::save and checkpoint::load, which fit any layout, or save and load a file of its own on each rank");
}

}  // namespace

void check_state(const Synchronizers& synchronizers, const torch::optim::Optimizer& optimizer, bool compares) {
  for (const auto* synchronizer : synchronizers) {
    const std::vector<nn::NamedParameter> all = synchronizer->updated();
    if (all.empty()) continue;
    const comm::Group group = compares ? synchronizer->norm_group() : comm::Group::self();
    const ToldState told = look_at_state(*synchronizer, all, optimizer, group.size() > 1);
    if (group.size() > 1) refuse_one_ranks_state(told, group, all.front().tensor);
    require(told.misfit.empty(), told.misfit);
  }
}

void check_goes_by_elements(const torch::optim::Optimizer& optimizer, const Synchronizers& synchronizers, ByElements by_elements) {
  if (is_known_to_go_by_elements(optimizer)) return;
  const bool multiplies_all = dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
  for (const auto* synchronizer : synchronizers) {
    int parts = synchronizer->norm_group().size();
    for (const nn::NamedParameter& updated : synchronizer->updated()) {  // layers and experts that are cut
      for (const nn::Dealt& dealt : nn::dealt_of(updated.tensor)) parts = std::max(parts, dealt.group.size() / dealt.holders);
    }
    if (parts == 1) continue;
    require(
        !multiplies_all, "zero_optimizer: torch::optim::LBFGS takes dot products over all parameters, and what it updates on this rank is one of ", parts,
        " parts of them, so ranks would go in directions and by steps of their own (and its closure, which it calls several times a step, would see parameters "
        "that were not brought together); use an optimizer that goes element by element (Adam, AdamW, SGD, Adagrad, RMSprop), or DistributedDataParallel with "
        "a closure that returns the loss of all ranks");
    require(
        by_elements == ByElements::Vouched, "zero_optimizer: '", c10::demangle(typeid(optimizer).name()),
        "' is no class of which it is known that it goes element by element (Adam, AdamW, SGD, Adagrad, RMSprop of torch::optim), and what it updates on this "
        "rank is one of ",
        parts,
        " parts of the parameters: a norm or a mean that it takes of a tensor (LAMB, LARS) would be that of a part, another on each rank; use one of those, or "
        "DistributedDataParallel, which leaves parameters whole; where an element's update depends on no other element, say so: zero_optimizer(wrapper, make, "
        "ByElements::Vouched)");
  }
}

void refuse_gradients_that_wait(const Synchronizers& synchronizers) {
  for (const auto* synchronizer : synchronizers) synchronizer->refuse_gradients_that_wait("zero_optimizer");
}

void require_terms_summed(const Synchronizers& synchronizers) {
  for (auto* synchronizer : synchronizers) nn::require_terms_summed("zero_optimizer", synchronizer->updated());
}

void require_gets_gradients(const std::vector<at::Tensor>& updated) {
  std::unordered_map<const GradientSynchronizer*, std::unordered_set<const c10::TensorImpl*>> current;
  for (const at::Tensor& tensor : updated) {
    const GradientSynchronizer* const owner = nn::owner_of(tensor);
    if (owner == nullptr) continue;
    const auto [found, is_new] = current.try_emplace(owner);
    if (is_new) {
      for (const nn::NamedParameter& theirs : owner->updated()) found->second.insert(theirs.tensor.unsafeGetTensorImpl());
    }
    require(found->second.contains(tensor.unsafeGetTensorImpl()), "zero_optimizer: '", name_of(*owner, tensor),
            "' was wrapped again since this optimizer's wrapper was made, and the last wrapper that was made over it takes its gradients: this optimizer would "
            "update nothing of it. Make the optimizer over the last one, zero_optimizer(wrapper, make), or wrap the model once");
  }
}

WatchedParts::WatchedParts(const std::vector<at::Tensor>& updated) {
  for (const at::Tensor& part : updated) {
    if (!nn::updated_for(part).is_same(part)) versions_.emplace_back(part, part._version());
  }
}

void WatchedParts::show() const {
  for (const auto& [part, version] : versions_) {
    if (part.grad().defined() && int64_t{part._version()} != version) nn::show_update(part);  // a closure brings gradients
  }
}

Lifetimes::Lifetimes(const Synchronizers& synchronizers) {
  for (const auto* synchronizer : synchronizers) {
    const auto updated = synchronizer->updated();
    wrappers_.push_back({synchronizer->lifetime(), updated.empty() ? "" : updated.front().name});
  }
}

void Lifetimes::require_alive() const {
  for (const auto& [lifetime, parameter] : wrappers_) {
    require(!lifetime.expired(), "zero_optimizer: the wrapper that holds '", parameter,
            "' is gone (a function that made it has returned, a unique_ptr was reset), and with it what brings gradients and updated parts together; keep the "
            "wrapper as long as its optimizer is used, or wrap the model anew and make the optimizer over that");
  }
}

void add_owner(Synchronizers& synchronizers, const at::Tensor& updated) {
  GradientSynchronizer* const owner = nn::owner_of(updated);
  if (owner != nullptr && std::ranges::find(synchronizers, owner) == synchronizers.end()) synchronizers.push_back(owner);
}

Synchronizers synchronizers_of(const torch::nn::Module& model) {
  Synchronizers found;
  for (const auto& [name, tensor, aliases] : nn::unique_parameters(model)) {
    GradientSynchronizer* const owner = nn::owner_of(tensor);
    require(owner != nullptr || !(tensor.is_floating_point() || tensor.is_complex()), "zero_optimizer: '", name,
            "' is in no wrapper; wrap all of the model before (ShardedDataParallel), or give the wrapper in place of the model");
    add_owner(found, tensor);
  }
  require(!found.empty(), "zero_optimizer: the module has no parameters");
  return found;
}

ClearWatch::ClearWatch(const Synchronizers& synchronizers) {
  for (const auto* synchronizer : synchronizers) {
    for (const auto& updated : synchronizer->updated()) {
      const at::Tensor waiting = waiting_parameter(updated), parameter = waiting.defined() ? waiting : parameter_set_aside(updated);
      const bool is_part = !nn::updated_for(updated.tensor).is_same(updated.tensor);
      if (!parameter.defined() && !(is_part && updated.tensor.grad().defined())) continue;
      const std::string message = parameter.defined() ? waiting_message(updated.name) : inner_step_message(updated.name);
      Watched& watched = watched_.emplace_back(Watched{updated.tensor, parameter, nn::make_gradient_guard(updated.tensor, message), updated.tensor.grad()});
      watched.part.mutable_grad() = watched.guard;
    }
  }
}

void ClearWatch::lift() {
  const c10::NoGradGuard no_grad;
  for (const auto& [part, parameter, guard, before] : std::exchange(watched_, {})) {
    const bool shown = part.grad().is_same(guard), cleared = !shown || nn::is_cleared(guard);
    if (shown) part.mutable_grad() = cleared && parameter.defined() ? at::Tensor() : before;
    if (!cleared) continue;
    if (shown) {
      (parameter.defined() ? parameter : part).mutable_grad().zero_();  // zero_grad(set_to_none = false)
    } else if (parameter.defined()) {
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace tessera::detail
