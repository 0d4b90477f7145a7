#include "tessera/plan/cpu_memory.h"

#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/core/ambient.h"
#include "tessera/memory/on_host.h"

// The engine's rule is torch/csrc/autograd/input_buffer.cpp: it adds to the first term where nobody else holds it or its memory, without gradients of
// gradients, and "subclass-like" tensors, among which meta is counted, never. What it calls is a plain add, between two nodes of the graph.

namespace tessera::plan {
namespace {

/// Of the graph, on this thread: what the engine does by itself it does between them.
const Ambient<int> nodes_running;

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction&) {
  ++*nodes_running;
  return nullptr;
}
void node_ends(const at::RecordFunction&, at::ObserverContext*) { --*nodes_running; }

bool is_engines_sum(const nn::OperatorCall& operation) {
  if (operation.name() != "aten::add" || operation.arguments().size() != 3) return false;
  if (torch::autograd::get_current_graph_task_id() == -1 || *nodes_running > 0 || at::GradMode::is_enabled()) return false;
  const c10::IValue &sum = operation.arguments()[0], &term = operation.arguments()[1];
  if (!sum.isTensor() || !term.isTensor() || !sum.toTensor().is_meta() || sum.toTensor().sizes() != term.toTensor().sizes()) return false;
  const at::Tensor& held = sum.toTensor();
  constexpr size_t here = 1;  // the stack of arguments
  return held.use_count() == 1 + here && held.storage().use_count() == 1 && held.is_non_overlapping_and_dense() && held.dtype() == term.toTensor().dtype();
}

/// Of pointwise operators, the number that is cast.
at::Tensor cast_number(const nn::OperatorCall& operation) {
  const at::Tensor *tensor = nullptr, *number = nullptr;
  for (const c10::IValue& argument : operation.arguments()) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    (argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number() ? number : tensor) = &argument.toTensor();
  }
  if (tensor == nullptr || number == nullptr || !tensor->is_meta() || tensor->scalar_type() == number->scalar_type()) return {};
  if (!is_on_host(*tensor)) return {};  // devices cast as they read
  return at::empty({}, tensor->options());
}

/// Of an addition in place, the term that is cast to the sum's type.
at::Tensor cast_term(const nn::OperatorCall& operation) {
  if (operation.name() != "aten::add_") return {};
  const c10::IValue &sum = operation.arguments()[0], &term = operation.arguments()[1];
  if (!sum.isTensor() || !term.isTensor() || !sum.toTensor().is_meta() || term.toTensor().dim() == 0 || !is_on_host(sum.toTensor())) return {};
  const at::ScalarType wider = sum.toTensor().scalar_type();
  const bool is_narrower = term.toTensor().scalar_type() != wider && c10::promoteTypes(term.toTensor().scalar_type(), wider) == wider;
  return is_narrower ? at::empty(term.toTensor().sizes(), sum.toTensor().options()) : at::Tensor();
}

}  // namespace

CpuMemory::CpuMemory() : nodes_(at::addThreadLocalCallback(at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}))) {}

CpuMemory::~CpuMemory() { at::removeCallback(nodes_); }

void CpuMemory::call(nn::OperatorCall& operation) {
  if (is_engines_sum(operation)) {
    auto& stack = operation.stack();
    stack.resize(stack.size() - 2);  // what stays, the first argument, is the result
    return;
  }
  const at::Tensor number = cast_number(operation), term = cast_term(operation);
  operation.run();
}

}  // namespace tessera::plan
