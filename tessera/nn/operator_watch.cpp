#include "tessera/nn/operator_watch.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include <ATen/ops/transpose.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"

namespace tessera::nn {

struct OperatorWatch::Entry {
  std::shared_ptr<OperatorWatcher> watcher;
  std::atomic<bool> awake = false;
  bool until_done = false;
};

namespace {

// Above autograd and autocast. libtorch registers nothing there: it is kept for tests of the dispatcher.
constexpr auto kWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

using Entries = std::vector<std::shared_ptr<OperatorWatch::Entry>>;

/// Who was woken on this thread, in that order. One that sleeps, or whose watch is gone, is forgotten when the next operator comes.
const Ambient<Entries> woken;

Entries& entries() { return *woken; }

void forget_sleepers() {
  std::erase_if(entries(), [](const auto& entry) { return !entry->awake; });
  if (entries().empty()) c10::impl::tls_set_dispatch_key_included(kWatchKey, false);
}

void watch_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inside(kWatchKey);
  bool sleepers = false;
  const size_t count = entries().size();  // a watcher may wake others
  for (size_t i = 0; i < count; ++i) {
    const std::shared_ptr<OperatorWatch::Entry> entry = entries()[i];
    if (entry->awake) {
      entry->watcher->before(op, *stack);
      if (entry->until_done && entry->watcher->done()) entry->awake = false;
    } else {
      sleepers = true;
    }
  }
  if (sleepers || count == 0) forget_sleepers();
  bool is_done = false;
  for (size_t i = 0; i < entries().size() && !is_done; ++i) {
    const std::shared_ptr<OperatorWatch::Entry> entry = entries()[i];
    is_done = entry->awake && entry->watcher->instead(op, *stack);
  }
  if (!is_done) op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWatchKey), stack);
  for (size_t i = 0; i < entries().size(); ++i) {
    const std::shared_ptr<OperatorWatch::Entry> entry = entries()[i];
    if (entry->awake) entry->watcher->after(op, *stack);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&watch_operator>()); }

}  // namespace

OperatorWatch::OperatorWatch(std::shared_ptr<OperatorWatcher> watcher) : entry_(std::make_shared<Entry>()) {
  invariant(watcher != nullptr, "OperatorWatch: no watcher given");
  entry_->watcher = std::move(watcher);
}

OperatorWatch::~OperatorWatch() {
  sleep();
  if (!ambient_is_gone()) std::erase(entries(), entry_);
}

void OperatorWatch::wake() {
  entry_->awake = true;
  if (std::ranges::find(entries(), entry_) == entries().end()) entries().push_back(entry_);
  c10::impl::tls_set_dispatch_key_included(kWatchKey, true);
}

void watch_until_done(std::shared_ptr<OperatorWatcher> watcher) {
  const auto entry = std::make_shared<OperatorWatch::Entry>();
  entry->watcher = std::move(watcher);
  entry->until_done = entry->awake = true;
  entries().push_back(entry);
  c10::impl::tls_set_dispatch_key_included(kWatchKey, true);
}

at::Tensor in_use(const at::Tensor& parameter) {
  const bool watched = c10::impl::tls_is_dispatch_key_included(kWatchKey) && !c10::impl::tls_is_dispatch_key_excluded(kWatchKey);
  if (!watched || !parameter.defined() || parameter.dim() == 0) return parameter;
  at::Tensor seen = at::transpose(parameter, 0, 0);
  return at::GradMode::is_enabled() ? parameter : seen;
}

Unwatched::Unwatched() : off_(kWatchKey) {}

void OperatorWatch::sleep() { entry_->awake = false; }

}  // namespace tessera::nn
