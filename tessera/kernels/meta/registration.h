#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

/// Meta kernels that libtorch has in Python only. A dry run needs them in C++, with the memory of the CPU's: shapes, strides, and what the operator allocates
/// inside itself, declared by allocating and dropping the same. Later versions of libtorch may bring their own, which then stay.
namespace tessera::kernels::meta {

/// Whether this libtorch has the operator (`name` or `name.overload`) and nothing for meta tensors.
inline bool is_missing(const std::string& name) {
  const auto dot = name.find('.');
  const auto schema = c10::Dispatcher::singleton().findOp({"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
  return schema && !schema->hasKernelForDispatchKey(c10::DispatchKey::Meta);
}

template <class Kernel>
void implement(torch::Library& library, const char* name, Kernel&& kernel) {
  if (is_missing(name)) library.impl(name, std::forward<Kernel>(kernel));
}

}  // namespace tessera::kernels::meta
