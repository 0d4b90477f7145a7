#include "tessera/nn/meanwhile.h"

#include <utility>

#include "tessera/core/ambient.h"
#include "tessera/nn/saved_tensors.h"

namespace tessera::nn {
namespace {

const Ambient<Meanwhile*> innermost;

}  // namespace

Meanwhile::Meanwhile(std::function<at::Tensor()> compute)
    : compute_(std::move(compute)), books_(innermost_saved_tensor_scope()), outer_(std::exchange(*innermost, this)) {}

Meanwhile::~Meanwhile() { *innermost = outer_; }

at::Tensor Meanwhile::value() {
  if (!value_.defined()) value_ = compute_();
  return value_;
}

bool Meanwhile::any() {
  const Meanwhile* const scope = *innermost;
  return scope != nullptr && !scope->value_.defined() && scope->books_ == innermost_saved_tensor_scope();
}

void Meanwhile::run() {
  if (any()) (*innermost)->value();
}

}  // namespace tessera::nn
