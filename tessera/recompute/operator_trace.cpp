#include "tessera/recompute/operator_trace.h"

#include <utility>

#include "tessera/core/ambient.h"

namespace tessera {

namespace {
const Ambient<OperatorTrace*> innermost;
}

OperatorTrace::OperatorTrace()
    : outer_(std::exchange(*innermost, this)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&OperatorTrace::begin, &OperatorTrace::end).scopes({at::RecordScope::FUNCTION}))) {}

OperatorTrace::~OperatorTrace() {
  at::removeCallback(handle_);
  *innermost = outer_;
}

std::string OperatorTrace::current() const {
  if (!open_.empty()) return open_.back();
  return last_.empty() ? "no operator" : last_;
}

// libtorch carries a thread's callbacks to threads that work for it (ThreadLocalState: Gloo's, for one), where there is no trace of ours.
std::unique_ptr<at::ObserverContext> OperatorTrace::begin(const at::RecordFunction& operation) {
  if (OperatorTrace* const trace = *innermost) trace->open_.emplace_back(operation.name());
  return nullptr;
}

void OperatorTrace::end(const at::RecordFunction&, at::ObserverContext*) {
  if (*innermost == nullptr) return;
  auto& trace = **innermost;
  if (trace.open_.empty()) return;  // began before we looked
  trace.last_ = std::move(trace.open_.back());
  trace.open_.pop_back();
}

}  // namespace tessera
