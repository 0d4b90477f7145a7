#pragma once

#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera::nn {

/// Sees operators as a program calls them, before autograd, autocast, or a composite's own code has looked at the arguments. (OperatorHooks sees what they
/// are made of, below autograd.)
class OperatorWatcher {
 public:
  virtual ~OperatorWatcher() = default;

  /// The arguments lie on top of `stack`, and may be replaced. Operators called from here, and those that the operator is made of, are not seen; those of
  /// backward are, one by one.
  virtual void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;

  /// After everybody's before(): who runs the operator, or does something in its place, puts the results where the arguments were and returns true. The first
  /// who does is the only one.
  virtual bool instead(const c10::OperatorHandle& op, torch::jit::Stack& stack) { return false; }

  /// The results lie on top of `stack`, where the operator has not thrown.
  virtual void after(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {}

  /// Whether it has nothing to see any more; asked by watch_until_done.
  virtual bool done() const { return false; }
};

/// While awake, every operator that the thread of wake() calls passes the watcher. Watches of a thread live side by side and end in any order, on any thread.
/// (A boxed fallback on a dispatch key that is on while somebody is awake: under a microsecond per operator then, nothing otherwise.)
class OperatorWatch {
 public:
  explicit OperatorWatch(std::shared_ptr<OperatorWatcher> watcher);
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

  void wake();
  void sleep();

  struct Entry;

 private:
  std::shared_ptr<Entry> entry_;
};

/// Lets every operator that this thread calls pass the watcher, which the thread keeps, until it is done or the thread ends.
void watch_until_done(std::shared_ptr<OperatorWatcher> watcher);

/// `parameter` for a forward that looks at it before an operator does: shapes that are checked, a torch::autograd::Function, which takes its inputs down
/// first. Where a watcher is awake, an operator tells it of the use; without gradients it is what the watcher gave that operator.
at::Tensor in_use(const at::Tensor& parameter);

/// While alive, no operator of this thread is watched: for who does by operators what watchers wait for.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched() = default;
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard off_;
};

}  // namespace tessera::nn
