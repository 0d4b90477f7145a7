#include "tessera/zero/zero_optimizer.h"

#include <algorithm>
#include <array>
#include <string>
#include <typeindex>

#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/sharing.h"

// The optimizer knows the parts and zero_grad() reaches only their gradients; but what no_sync() left lies with the whole parameters, and has to be cleared
// with them. Its zero_grad is not virtual, so it cannot be overridden: while an expression through `->` lasts, guards stand in as the parts' gradients, and
// what became of the guard (gone, or zeroed) is then done to the gradient that it stood for.

namespace tessera::detail {
namespace {

std::string waiting_message(const std::string& name) {
  return concat(
      "zero_optimizer: the gradient of '", name,
      "' waits whole on this rank, where no_sync() left it or the program put it (mutable_grad(), of torch::autograd::grad), and has met no other rank's; "
      "call backward once without no_sync() before the optimizer steps, or give it up by zero_grad(). A gradient that no backward pass brings has to be "
      "summed over the ranks, and put on the parts (updated())");
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

}  // namespace

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
  for (const auto* synchronizer : synchronizers) {
    for (const auto& updated : synchronizer->updated()) require(!waiting_parameter(updated).defined(), waiting_message(updated.name));
  }
}

void require_terms_summed(const Synchronizers& synchronizers) {
  for (auto* synchronizer : synchronizers) nn::require_terms_summed("zero_optimizer", synchronizer->updated());
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
      if (!parameter.defined()) continue;
      Watched& watched = watched_.emplace_back(
          Watched{updated.tensor, parameter, nn::make_gradient_guard(updated.tensor, waiting_message(updated.name)), updated.tensor.grad()});
      watched.part.mutable_grad() = watched.guard;
    }
  }
}

ClearWatch::~ClearWatch() {
  const c10::NoGradGuard no_grad;
  for (const auto& [part, parameter, guard, before] : watched_) {
    const bool shown = part.grad().is_same(guard), cleared = !shown || nn::is_cleared(guard);
    if (shown) part.mutable_grad() = cleared ? at::Tensor() : before;
    if (!cleared) continue;
    if (shown) {
      parameter.mutable_grad().zero_();  // zero_grad(set_to_none = false)
    } else {
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace tessera::detail
