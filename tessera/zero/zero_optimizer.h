#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// How it is known that an optimizer updates each element by that element's values, gradients and state alone, so that parts may be updated one by one.
enum class ByElements {
  Known,    ///< by its class: Adam, AdamW, SGD, Adagrad, RMSprop of torch::optim, not what is derived from them; any other of libtorch's kind is refused
  Vouched,  ///< by the program's word, for a class of its own
};

namespace detail {
/// Those whose parameters an optimizer updates, in the order in which it has them.
using Synchronizers = std::vector<GradientSynchronizer*>;

/// Refuses an optimizer that computes with whole vectors, or may, where `synchronizers` leave it parts of them. Throws ConfigError.
void check_goes_by_elements(const torch::optim::Optimizer& optimizer, const Synchronizers& synchronizers, ByElements by_elements);

/// Refuses an update where gradients wait whole on this rank, of passes under no_sync() that none without it has followed. Throws ConfigError.
void refuse_gradients_that_wait(const Synchronizers& synchronizers);

/// Refuses an update by gradients of which ranks have terms that were never summed (nn::sum_terms). Throws ConfigError.
void require_terms_summed(const Synchronizers& synchronizers);

/// Refuses state that is not of the parts that this rank has of `synchronizers`: of other sizes, or, as far as `compares` lets ranks look, the same on all
/// ranks although the parts' gradients differ. Throws ConfigError, with `compares` on every rank. Traffic: with `compares` an all-gather of 3 words for each
/// synchronizer.
void check_state(const Synchronizers& synchronizers, const torch::optim::Optimizer& optimizer, bool compares);

/// Adds the owner of what `updated` is, or is a part of, unless it is there.
void add_owner(Synchronizers& synchronizers, const at::Tensor& updated);

/// All that `optimizer` updates, of libtorch's kind or of ours.
template <class Inner>
std::vector<at::Tensor> updated_by(Inner& optimizer) {
  std::vector<at::Tensor> tensors;
  if constexpr (std::is_base_of_v<torch::optim::Optimizer, Inner>) {
    for (const auto& group : optimizer.param_groups()) tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  } else if constexpr (requires { optimizer.groups().front().parameters.front().tensor; }) {
    for (const auto& group : optimizer.groups()) {
      for (const auto& updated : group.parameters) tensors.push_back(updated.tensor);
    }
  }
  return tensors;
}

/// Refuses an update of what gets no gradients, since a wrapper that was made later over the same parameters updates others in their place. Throws ConfigError.
void require_gets_gradients(const std::vector<at::Tensor>& updated);

/// Parts of `updated`, as they are before an update. When that is over, show() lets the counters of their parameters show it, as far as they had gradients and
/// the optimizer shows its writes: libtorch's SGD hides them from one process, too.
class WatchedParts {
 public:
  explicit WatchedParts(const std::vector<at::Tensor>& updated);
  void show() const;

 private:
  std::vector<std::pair<at::Tensor, int64_t>> versions_;
};

/// Wrappers that may be gone when they are needed.
class Lifetimes {
 public:
  explicit Lifetimes(const Synchronizers& synchronizers);
  void require_alive() const;  ///< throws ConfigError

 private:
  struct Wrapper {
    std::weak_ptr<const void> lifetime;
    std::string parameter;  ///< the name of one that it holds
  };
  std::vector<Wrapper> wrappers_;
};

/// While it lives a guard stands for the gradient of each part, which refuses a step of what updates the parts: nobody would bring them together. A zero_grad
/// is seen: where a parameter's gradient waits whole on this rank it is one of that, too, when this goes.
class ClearWatch {
 public:
  explicit ClearWatch(const Synchronizers& synchronizers);
  ~ClearWatch() { lift(); }
  /// As when this goes.
  void lift();
  ClearWatch(const ClearWatch&) = delete;
  ClearWatch& operator=(const ClearWatch&) = delete;

 private:
  struct Watched {
    at::Tensor part;
    at::Tensor parameter;  ///< whose gradient waits; undefined where that is in parts
    at::Tensor guard, before;
  };
  std::vector<Watched> watched_;
};
}  // namespace detail

/// An optimizer over what this rank updates of a model, of our kind or of torch::optim's: its step brings the updated parts of all ranks together. Made by
/// zero_optimizer.
template <class Inner>
class ZeroOptimizer {
 public:
  ZeroOptimizer(detail::Synchronizers synchronizers, std::unique_ptr<Inner> inner)
      : synchronizers_(std::move(synchronizers)), lifetimes_(synchronizers_), inner_(std::move(inner)) {}

  /// One update, with what the optimizer inside takes: a learning rate for ours, nothing or a closure for libtorch's. Collective. Throws ConfigError after
  /// nothing but passes under no_sync(), whose gradients have met no other rank's, where a wrapper is gone or a later one updates other parts of its
  /// parameters, and where libtorch's Adam, AdamW, SGD, Adagrad or RMSprop was given state that is not of this rank's parts: of whole parameters or, in the
  /// first step without a closure, one rank's on all ranks.
  template <class... Arguments>
  auto step(Arguments&&... arguments) {
    end_access();
    lifetimes_.require_alive();
    constexpr bool takes_closure = (std::is_invocable_v<Arguments&> || ...);
    if constexpr (!takes_closure) detail::refuse_gradients_that_wait(synchronizers_);  // a closure brings those that are missing
    const std::vector<at::Tensor> updated = detail::updated_by(*inner_);
    detail::require_gets_gradients(updated);
    detail::require_terms_summed(synchronizers_);  // updated() brings what was cleared or loaded since on the model's side to the parts
    if constexpr (std::is_base_of_v<torch::optim::Optimizer, Inner>) {
      const bool compares = !takes_closure && !was_compared_;  // by gradients, which a closure has yet to bring
      detail::check_state(synchronizers_, *inner_, compares);
      was_compared_ |= compares;
    }
    const detail::WatchedParts watched(updated);
    if constexpr (std::is_void_v<decltype(inner_->step(std::forward<Arguments>(arguments)...))>) {
      inner_->step(std::forward<Arguments>(arguments)...);
      after_update();
      watched.show();
    } else {
      auto result = inner_->step(std::forward<Arguments>(arguments)...);
      after_update();
      watched.show();
      return result;
    }
  }

  /// Clears the gradients of what it updates, and of the parameters that these are parts of. What another optimizer over the same wrappers has stays.
  void zero_grad() {
    end_access();
    if constexpr (requires { inner_->zero_grad(); }) {
      (*this)->zero_grad();
    } else {
      lifetimes_.require_alive();
      const detail::ClearWatch watch(synchronizers_);
      for (const auto& group : inner_->groups()) {
        for (const auto& updated : group.parameters) at::Tensor(updated.tensor).mutable_grad() = at::Tensor();
      }
    }
  }

  /// The optimizer itself, while an expression such as `optimizer->zero_grad()` lasts. Gradients of parts can be cleared through it, and neither read nor used:
  /// where the wrapper has parts, `optimizer->step()` throws ConfigError.
  class Access {
   public:
    explicit Access(ZeroOptimizer& optimizer) : watch_(optimizer.synchronizers_), optimizer_(optimizer), outer_(std::exchange(optimizer.access_, this)) {}
    ~Access() { optimizer_.access_ = outer_; }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    Inner* operator->() const { return optimizer_.inner_.get(); }

   private:
    friend ZeroOptimizer;
    detail::ClearWatch watch_;
    ZeroOptimizer& optimizer_;
    Access* outer_;  ///< of the same expression
  };

  /// The optimizer itself: for learning-rate schedulers, its options, its state in a checkpoint. Its own step leaves the parts apart, until after_update() of
  /// the wrapper. Its zero_grad clears what passes under no_sync() have left only where it is called by `->`.
  Inner& inner() { return *inner_; }
  Inner& operator*() { return *inner_; }
  Access operator->() {
    lifetimes_.require_alive();
    return Access(*this);
  }

 private:
  /// `optimizer.step(rate_of(optimizer->groups()))`: what was asked for by `->` is there, and its temporary lives on to the end of the line.
  void end_access() {
    for (Access* each = access_; each != nullptr; each = each->outer_) each->watch_.lift();
  }

  void after_update() {
    for (auto* synchronizer : synchronizers_) synchronizer->after_update();
  }

  detail::Synchronizers synchronizers_;
  detail::Lifetimes lifetimes_;
  std::unique_ptr<Inner> inner_;
  Access* access_ = nullptr;   ///< the newest one that lives
  bool was_compared_ = false;  ///< the state, with that of other ranks: in the first step, behind whatever was loaded
};

namespace detail {
template <class Make>
auto make_zero_optimizer(Synchronizers synchronizers, Make make, ByElements by_elements) {
  std::vector<nn::NamedParameter> updated;
  for (auto* synchronizer : synchronizers) {  // of what is in several wrappers, the newest one's
    auto theirs = synchronizers.size() == 1 ? synchronizer->updated() : nn::owned_by(*synchronizer);
    for (auto& parameter : theirs) updated.push_back(std::move(parameter));
  }
  const auto wrapped = [&](auto inner) {
    using Inner = typename decltype(inner)::element_type;
    for (const at::Tensor& tensor : updated_by(*inner)) add_owner(synchronizers, tensor);  // a program may have put what several wrappers hold into one
    if constexpr (std::is_base_of_v<torch::optim::Optimizer, Inner>) check_goes_by_elements(*inner, synchronizers, by_elements);
    return ZeroOptimizer<Inner>(std::move(synchronizers), std::move(inner));
  };
  if constexpr (std::is_invocable_v<Make, const std::vector<nn::NamedParameter>&>) {
    return wrapped(make(updated));
  } else {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : updated) tensors.push_back(parameter.tensor);
    return wrapped(make(std::move(tensors)));
  }
}

/// Who wraps `model`, in the order of its parameters. Throws ConfigError where nobody wraps some of it.
Synchronizers synchronizers_of(const torch::nn::Module& model);
}  // namespace detail

/// The optimizer that `make` builds over what `synchronizer` updates on this rank (GradientSynchronizer::updated): parts under ShardedDataParallel, slices
/// under FullyShardedDataParallel, whole parameters under DistributedDataParallel, so that a program changes its wrapper and nothing else. `make` takes the
/// tensors, or, to group them by name or shape, the named parameters, and returns a unique_ptr:
///
///   auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, options); });
///   torch::optim::StepLR schedule(*optimizer, 10, 0.5);
///
/// Where what it makes updates other wrappers' parts as well, those are brought together, too. All must be alive while it is used; it may go last.
///
/// Where this rank has parts, a norm that the optimizer takes of a tensor (LAMB's trust ratio, LARS) would be that of a part, another on each rank: so throws
/// ConfigError for LBFGS, and for a class of torch::optim's kind that is not known to go element by element, unless `by_elements` vouches for it:
///
///   auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<SignDescent>(parts); }, ByElements::Vouched);
template <class Make>
[[nodiscard]] auto zero_optimizer(GradientSynchronizer& synchronizer, Make make, ByElements by_elements = ByElements::Known) {
  return detail::make_zero_optimizer({&synchronizer}, std::move(make), by_elements);
}

/// The same for whatever wraps `model`: one wrapper, or several that share it (by `only`, or of its submodules). Throws ConfigError where nobody wraps some of
/// it.
template <class Make>
[[nodiscard]] auto zero_optimizer(const torch::nn::Module& model, Make make, ByElements by_elements = ByElements::Known) {
  return detail::make_zero_optimizer(detail::synchronizers_of(model), std::move(make), by_elements);
}

template <class Contained, class Make>
[[nodiscard]] auto zero_optimizer(const torch::nn::ModuleHolder<Contained>& model, Make make, ByElements by_elements = ByElements::Known) {
  return zero_optimizer(static_cast<const torch::nn::Module&>(*model.ptr()), std::move(make), by_elements);
}

}  // namespace tessera
