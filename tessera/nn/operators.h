#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::nn {

class OperatorHooks;

/// One of this thread's scopes, and the one further out.
struct OperatorLink {
  std::shared_ptr<OperatorHooks> hooks;
  const OperatorLink* outer = nullptr;
};

/// One call of an operator of libtorch or of ours, on its way from autograd to the kernel of its device.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack, const OperatorLink* link)
      : op_(op), keys_(keys), stack_(stack), link_(link), inside_(link) {}

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  /// Whether it is made of other operators, on every device the same ones. What any other calls inside is a matter of its kernel.
  bool composite() const { return op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd); }
  const std::string& name() const { return op_.schema().name(); }  ///< such as "aten::mm", without the overload

  /// Arguments lie on top of it before run(), results after. Who does not run the operator puts results in the place of the arguments.
  torch::jit::Stack& stack() { return stack_; }
  at::ArrayRef<c10::IValue> arguments() const { return top(schema().arguments().size()); }  ///< before run()
  at::ArrayRef<c10::IValue> results() const { return top(schema().returns().size()); }      ///< after it

  /// Passes it on to the scope further out, and at last runs it. With `watch_inside`, operators that it calls itself pass the hooks, too.
  void run(bool watch_inside = true);

  const OperatorLink& link() const { return *link_; }

 private:
  at::ArrayRef<c10::IValue> top(size_t count) const { return at::ArrayRef<c10::IValue>(stack_.data() + (stack_.size() - count), count); }

  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  const OperatorLink *link_, *inside_;
};

/// Something that operators pass through, one by one.
class OperatorHooks {
 public:
  virtual ~OperatorHooks() = default;

  /// Takes the place of the call. Operators that the hook itself calls do not come here again.
  virtual void call(OperatorCall& operation) = 0;
};

/// While alive, every operator that this thread calls passes `hooks`, below autograd: what a composite is made of, forward and backward. Scopes nest: the
/// innermost comes first and hands on. (A boxed fallback on a dispatch key that only this scope switches on: about a microsecond per operator inside,
/// nothing outside.)
class OperatorScope {
 public:
  explicit OperatorScope(std::shared_ptr<OperatorHooks> hooks);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// Running statistics, which normalisations write without saying so in their schema: whether this call does, and which of its arguments they are.
/// `arguments` are those of the operator `name`.
bool updates_statistics(const std::string& name, at::ArrayRef<c10::IValue> arguments);
inline constexpr std::array<size_t, 2> kStatistics{3, 4};

/// Whether the call writes its argument `index`, by its schema or as a running statistic.
bool writes_argument(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, size_t index);

/// FLOPs of the matrix products in this call (two per multiplication with addition; attention's two products whole, causal or not), 0 for every other
/// operator. `arguments` are those of the operator `name`.
double product_flops(const std::string& name, at::ArrayRef<c10::IValue> arguments);

/// Adds up product_flops of what passes.
class FlopCounter final : public OperatorHooks {
 public:
  void call(OperatorCall& operation) override;
  double flops() const { return flops_; }
  double recomputed_flops() const { return recomputed_; }  ///< of those, what recompute ran again (nn::recomputing)
  double flops_beside() const { return beside_; }          ///< of those, what is of no pass of the model (BesidePasses, core/events.h)

 private:
  double flops_ = 0, recomputed_ = 0, beside_ = 0;
};

}  // namespace tessera::nn
