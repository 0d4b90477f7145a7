#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/core/attachment.h"
#include "tessera/nn/interceptor.h"

namespace tessera::nn {

/// Base of every module whose calls can be intercepted. Write it as any libtorch module, with two words changed: this base, and
/// TESSERA_MODULE in place of TORCH_MODULE. Called through its holder, or by `nn::call`, it passes the chain of what is attached;
/// `->forward(...)` bypasses the chain, as do torch::nn::Sequential and AnyModule (see check_no_bypass).
///
/// A module has one `forward`, not overloaded and not a template. What should be intercepted goes through it: a module with two uses
/// takes an optional argument (the language-model head returns the loss where labels are given, else logits).
/// One rank, one thread: not to be called from several threads at once.
class Module : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// Path in the whole model, such as "layers.3.attention.wq"; empty for the root and before assign_paths.
  const std::string& path() const noexcept { return path_; }
  void set_path(std::string path) { path_ = std::move(path); }

  /// What matrix products and attention compute in, and norms give out; without one, the dtype of the parameters.
  std::optional<at::ScalarType> compute_dtype() const noexcept { return compute_dtype_; }
  void set_compute_dtype(std::optional<at::ScalarType> dtype) noexcept { compute_dtype_ = dtype; }

  /// Writes the values of this module's own buffers (not its children's) after memory has been given to them, and returns true. `materialize`
  /// calls it where there are buffers, and refuses a module that does not override it.
  virtual bool reset_buffers() { return false; }

  bool intercepted() const noexcept { return chain_ != nullptr; }
  const std::shared_ptr<const Chain>& chain() const noexcept { return chain_; }

 private:
  friend Attachment attach(Module& module, std::shared_ptr<Interceptor> interceptor);

  std::shared_ptr<const Chain> chain_;  ///< null where nothing is attached: the one branch of an idle call
  std::string path_;
  std::optional<at::ScalarType> compute_dtype_;
};

/// Where the output of `module` lives: what the outermost interceptor that has an opinion states; nothing where none has.
std::optional<OutputLayout> output_layout(const Module& module, const at::Tensor& output);

namespace detail {

template <class>
struct ForwardOf;
template <class C, class R, class... P>
struct ForwardOf<R (C::*)(P...)> {
  using Result = R;
  using Parameters = std::tuple<std::remove_cvref_t<P>...>;
};
template <class C, class R, class... P>
struct ForwardOf<R (C::*)(P...) const> : ForwardOf<R (C::*)(P...)> {};

/// The innermost link: values back to C++, then forward. `Given` arguments were written at the call; the rest are forward's own defaults.
template <class Impl, size_t Given>
Values run_forward(Module& module, const Values& inputs) {
  using Signature = ForwardOf<decltype(&Impl::forward)>;
  invariant(inputs.size() == Given, "an interceptor of '", module.path(), "' handed on ", inputs.size(), " values where the call has ", Given);
  auto& impl = static_cast<Impl&>(module);
  return [&]<size_t... I>(std::index_sequence<I...>) -> Values {
    if constexpr (std::is_void_v<typename Signature::Result>) {
      impl.forward(from_value<std::tuple_element_t<I, typename Signature::Parameters>>(inputs[I])...);
      return {};
    } else {
      return to_outputs(impl.forward(from_value<std::tuple_element_t<I, typename Signature::Parameters>>(inputs[I])...));
    }
  }(std::make_index_sequence<Given>());
}

template <class Impl, class... Args>
auto call_intercepted(Impl& impl, Args&&... args) {
  using Signature = ForwardOf<decltype(&Impl::forward)>;
  using Result = std::remove_cvref_t<typename Signature::Result>;
  constexpr size_t given = sizeof...(Args);
  static_assert(given <= std::tuple_size_v<typename Signature::Parameters>, "more arguments than forward has parameters");
  Values inputs = [&]<size_t... I>(std::index_sequence<I...>) {
    Values values;
    values.reserve(given);
    (values.push_back(to_value<std::tuple_element_t<I, typename Signature::Parameters>>(std::forward<Args>(args))), ...);
    return values;
  }(std::make_index_sequence<given>());
  const Next next(impl.chain(), impl.chain()->size(), &impl, &run_forward<Impl, given>);
  return from_outputs<Result>(next(std::move(inputs)));
}

}  // namespace detail

/// Calls `impl.forward(args...)` through the chain of what is attached to it. Costs one branch where nothing is.
template <class Impl, class... Args>
auto call(Impl& impl, Args&&... args) {
  static_assert(std::is_base_of_v<Module, Impl>, "only modules derived from tessera::nn::Module can be intercepted");
  if (!impl.intercepted()) [[likely]]
    return impl.forward(std::forward<Args>(args)...);
  return detail::call_intercepted(impl, std::forward<Args>(args)...);
}

/// Shared handle of a module, as torch::nn::ModuleHolder is, whose calls pass the chain. Made by TESSERA_MODULE.
template <class Contained>
class ModuleHolder : public torch::nn::ModuleHolder<Contained> {
 public:
  using torch::nn::ModuleHolder<Contained>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    return call(*this->impl_, std::forward<Args>(args)...);
  }
};

}  // namespace tessera::nn

/// Declares the holder `Name` of the module class `NameImpl`, which derives from tessera::nn::Module.
#define TESSERA_MODULE(Name)                                     \
  class Name : public ::tessera::nn::ModuleHolder<Name##Impl> {  \
   public:                                                       \
    using ::tessera::nn::ModuleHolder<Name##Impl>::ModuleHolder; \
    using Impl = Name##Impl;                                     \
  }
