#pragma once

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"

namespace tessera {

namespace detail {
/// Refuses an optimizer that computes with whole vectors where `synchronizer` leaves it parts of them. Throws ConfigError.
void check_goes_by_elements(const torch::optim::Optimizer& optimizer, const GradientSynchronizer& synchronizer);

/// Refuses an update where gradients wait whole on this rank, of passes under no_sync() that none without it has followed. Throws ConfigError.
void refuse_gradients_that_wait(const GradientSynchronizer& synchronizer);

/// While it lives a guard stands for the gradient of each part whose parameter's waits whole on this rank: so a zero_grad of what updates the parts is seen,
/// and is one of the parameters, too, when this goes.
class ClearWatch {
 public:
  explicit ClearWatch(GradientSynchronizer& synchronizer);
  ~ClearWatch();
  ClearWatch(const ClearWatch&) = delete;
  ClearWatch& operator=(const ClearWatch&) = delete;

 private:
  struct Watched {
    at::Tensor part, parameter, guard, before;
  };
  std::vector<Watched> watched_;
};
}  // namespace detail

/// An optimizer over what this rank updates of a model, of our kind or any of torch::optim's: its step brings the updated parts of all ranks together. Made by
/// zero_optimizer.
template <class Inner>
class ZeroOptimizer {
 public:
  ZeroOptimizer(GradientSynchronizer& synchronizer, std::unique_ptr<Inner> inner) : synchronizer_(&synchronizer), inner_(std::move(inner)) {}

  /// One update, with what the optimizer inside takes: a learning rate for ours, nothing or a closure for libtorch's. Collective. Throws ConfigError after
  /// nothing but passes under no_sync(), whose gradients have met no other rank's.
  template <class... Arguments>
  auto step(Arguments&&... arguments) {
    (void)synchronizer_->updated();  // brings what was cleared or loaded since on the model's side to the parts
    if constexpr (!(std::is_invocable_v<Arguments&> || ...)) detail::refuse_gradients_that_wait(*synchronizer_);  // a closure brings those that are missing
    if constexpr (std::is_void_v<decltype(inner_->step(std::forward<Arguments>(arguments)...))>) {
      inner_->step(std::forward<Arguments>(arguments)...);
      synchronizer_->after_update();
    } else {
      auto result = inner_->step(std::forward<Arguments>(arguments)...);
      synchronizer_->after_update();
      return result;
    }
  }

  /// Clears the gradients of the parameters and of this rank's parts of them.
  void zero_grad() { synchronizer_->clear_gradients(); }

  /// The optimizer itself, while an expression such as `optimizer->zero_grad()` lasts.
  class Access {
   public:
    Access(GradientSynchronizer& synchronizer, Inner* inner) : watch_(synchronizer), inner_(inner) {}
    Inner* operator->() const { return inner_; }

   private:
    detail::ClearWatch watch_;
    Inner* inner_;
  };

  /// The optimizer itself: for learning-rate schedulers, its options, its state in a checkpoint. Its own step leaves the parts apart. Its zero_grad clears what
  /// passes under no_sync() have left only where it is called by `->`.
  Inner& inner() { return *inner_; }
  Inner& operator*() { return *inner_; }
  Access operator->() { return Access(*synchronizer_, inner_.get()); }

 private:
  GradientSynchronizer* synchronizer_;
  std::unique_ptr<Inner> inner_;
};

/// The optimizer that `make` builds over what `synchronizer` updates on this rank (GradientSynchronizer::updated): parts under ShardedDataParallel, slices
/// under FullyShardedDataParallel, whole parameters under DistributedDataParallel, so that a program changes its wrapper and nothing else. `make` takes the
/// tensors, or, to group them by name or shape, the named parameters, and returns a unique_ptr:
///
///   auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, options); });
///   torch::optim::StepLR schedule(*optimizer, 10, 0.5);
///
/// Both must outlive it. Throws ConfigError for an optimizer whose update of one element depends on others (LBFGS), where this rank has parts.
template <class Make>
auto zero_optimizer(GradientSynchronizer& synchronizer, Make make) {
  const std::vector<nn::NamedParameter> updated = synchronizer.updated();
  const auto wrapped = [&](auto inner) {
    if constexpr (std::is_base_of_v<torch::optim::Optimizer, typename decltype(inner)::element_type>) detail::check_goes_by_elements(*inner, synchronizer);
    return ZeroOptimizer<typename decltype(inner)::element_type>(synchronizer, std::move(inner));
  };
  if constexpr (std::is_invocable_v<Make, const std::vector<nn::NamedParameter>&>) {
    return wrapped(make(updated));
  } else {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : updated) tensors.push_back(parameter.tensor);
    return wrapped(make(std::move(tensors)));
  }
}

/// The same for whatever wraps `model`. Throws ConfigError where nothing does, or not all of it.
template <class Make>
auto zero_optimizer(const torch::nn::Module& model, Make make) {
  GradientSynchronizer* found = nullptr;
  for (const auto& [name, tensor, aliases] : nn::unique_parameters(model)) {
    const auto* const dispatcher = nn::GradientDispatcher::find(tensor);
    GradientSynchronizer* const owner = dispatcher == nullptr ? nullptr : dispatcher->owner();
    require(owner != nullptr && (found == nullptr || found == owner), "zero_optimizer: '", name,
            "' is not in one wrapper with the model's other parameters; wrap the whole model before (ShardedDataParallel), or give the wrapper in place of the "
            "model");
    found = owner;
  }
  require(found != nullptr, "zero_optimizer: the module has no parameters");
  return zero_optimizer(*found, std::move(make));
}

template <class Contained, class Make>
auto zero_optimizer(const torch::nn::ModuleHolder<Contained>& model, Make make) {
  return zero_optimizer(static_cast<const torch::nn::Module&>(*model.ptr()), std::move(make));
}

}  // namespace tessera
