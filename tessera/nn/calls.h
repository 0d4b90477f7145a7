#pragma once

#include <memory>
#include <string>

#include "tessera/core/attachment.h"
#include "tessera/nn/module.h"

/// What notices that a module was called past its interceptors: by `->forward(...)`, torch::nn::Sequential or AnyModule. Layers of ours notice it themselves in
/// their forward and go through the chain after all; of modules of users, whoever attaches something expects a call before the first gradient.
namespace tessera::nn {

namespace detail {
bool is_innermost(const Module& module) noexcept;
void count_call(const Module& module);
void arm_expected_calls();
}  // namespace detail

/// Whether the forward that runs now was called directly, although something is attached. The first line of a layer's forward, so that every kind of call
/// passes what is attached: `if (bypassed(*this)) return call(*this, x);`. One branch where nothing is.
inline bool bypassed(const Module& module) noexcept {
  if (!module.intercepted()) [[likely]]
    return false;
  return !detail::is_innermost(module);
}

/// Expects that `module` is called through its holder before a parameter in it (or below it) gets its first gradient on this thread; else that backward throws
/// ConfigError naming `who`, the module and the line to change. The first call, or detaching, ends it. Costs nothing after the first step.
[[nodiscard]] Attachment expect_call(Module& module, std::string who);

/// For good: a call of `module`, which holds parts of what other ranks have the rest of, throws ConfigError naming `who` once `handle` is gone, and with it
/// what is attached. By itself a part computes something of the right shape.
void require_handle(Module& module, std::weak_ptr<const void> handle, std::string who);

}  // namespace tessera::nn
