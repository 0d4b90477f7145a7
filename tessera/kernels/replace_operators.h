#pragma once

#include <c10/util/Exception.h>
#include <torch/library.h>

namespace tessera::kernels {

/// Gives operators of libtorch other kernels on a CPU, for as long as what it returns lives, without libtorch's warning that they are replaced: they are meant
/// to be. `add` gets the library whose impl() takes them.
template <class Add>
torch::Library replace_operators(const char* file, uint32_t line, const Add& add) {
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, file, line);
  add(library);
  return library;
}

}  // namespace tessera::kernels
