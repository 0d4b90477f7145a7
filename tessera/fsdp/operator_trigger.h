#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/fsdp/operator_use.h"
#include "tessera/fsdp/sharded_step.h"
#include "tessera/fsdp/slice_guards.h"
#include "tessera/fsdp/unit_tensors.h"
#include "tessera/nn/operator_watch.h"

namespace tessera {

/// Tells a step which unit is needed by looking at the arguments of every operator, forward and backward, for any torch::nn::Module.
///
/// In a step: a parameter, and every view of it that autograd keeps, has the storage of its unit's whole buffer. A unit is acquired when an operator first
/// meets that storage. It is released when an operator meets another unit, unless the order of the pass before says that it comes again within the next two
/// uses; and where a released unit is met again, it is gathered again. So an unforeseen order costs traffic, never correctness; that it is the same on every
/// rank, ShardedStep::agree_on sees to.
///
/// Between steps parameters are slices, and an operator that is given one either wants that (optimizers and checkpoints write and copy) or is the first of a
/// forward (operator_use.h). With gradients a step begins with it, and all parameters become whole before the operator looks at them. Without, the operator is
/// given the whole in the parameter's place, so that nothing has to be undone when evaluation is over, which nobody tells. What may be a forward, an optimizer
/// or a line for a log is refused by name, with the line to change, for nothing may be computed with slices unawares, and no line on one rank may start a
/// collective.
///
/// Beside a tensor of the slice's shape, without gradients, a parameter may be meant either way. What goes by elements is this rank's rows, but where a forward
/// is under way and the two shapes broadcast, which then is of the whole. What does not (cdist, inner) no optimizer does.
///
/// What was made of slices (an update, an average, an anchor) is known by that, on every rank alike, and not by its shape: beside it a parameter is this rank's
/// rows where an optimizer may be, and is refused where it is whole, as is what autograd has computed of one.
///
/// What is meant for the whole and given a slice all the same is refused (slice_guards.h).
///
/// Beside calls that trigger (Role::Fallback) it does the same for what calls do not show: a module that is called by ->forward(), a weight that another module
/// reads, a graph whose outputs carry no hook. Cost: under a microsecond an operator.
class OperatorTrigger final : public nn::OperatorWatcher {
 public:
  enum class Role { Trigger, Fallback };

  OperatorTrigger(torch::nn::Module& module, ShardedUnits& units, ShardedStep& step, Role role, std::optional<at::ScalarType> one_dtype);

  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void after(const c10::OperatorHandle& op, const torch::jit::Stack& stack) override;

  /// Beside calls: how many are under way.
  void follow_calls(std::shared_ptr<const int> depth) { depth_ = std::move(depth); }

 private:
  /// What is known of a number minus, or over, a parameter. Tensors are compared only.
  struct ScalarOperator {
    const c10::TensorImpl* parameter = nullptr;
    const c10::TensorImpl* filled = nullptr;
    at::Scalar value = 0;
    bool is_applied = false;  ///< by the operator at hand
  };
  using Arguments = at::ArrayRef<c10::IValue>;

  void meet(const at::Tensor& tensor, const OperandPlace& place);
  void note(size_t unit);
  OperatorUse use_of(const c10::FunctionSchema& schema, Arguments arguments) const;
  void scan(Arguments arguments);
  bool in_evaluation() const;
  bool forward_goes_on() const { return in_evaluation() || step_.is_open(); }
  bool begins_state(const c10::FunctionSchema& schema, Arguments arguments, const at::Tensor& parameter) const;
  bool shapes_forward(const c10::FunctionSchema& schema, Arguments arguments) const;
  bool follow_scalar(const c10::FunctionSchema& schema, Arguments arguments);
  void fill_whole(const at::Tensor& filled);
  bool scalar_wants_whole(const c10::FunctionSchema& schema) const;
  bool wants_whole(const c10::OperatorHandle& op, Arguments arguments, OperatorUse use) const;
  bool begins_forward(const c10::OperatorHandle& op, Arguments arguments, OperatorUse use) const;
  bool begins_between_calls(const c10::FunctionSchema& schema, Arguments arguments, OperatorUse use) const;
  bool takes_parameters_alone(Arguments arguments) const;
  bool slices_fit(const SeenSlice& seen, bool on_any_rank) const;
  bool is_stored(const UnitPlace& parameter, const at::Tensor& other) const;
  bool forward_beside_alike(const c10::OperatorHandle& op, Arguments arguments) const;
  bool is_beside_rows_of_another(Arguments arguments) const;
  bool means_whole_on_one_rank(const c10::FunctionSchema& schema) const;
  bool looks_alike_elsewhere(Arguments arguments) const;
  bool agrees_on_whole(const c10::OperatorHandle& op, Arguments arguments) const;
  [[noreturn]] void refuse_unclear(const c10::FunctionSchema& schema) const { refuse_unclear(schema, seen_.front().place); }
  [[noreturn]] void refuse_unclear(const c10::FunctionSchema& schema, const UnitPlace& place) const;
  [[noreturn]] void refuse_made_by_slices(const c10::FunctionSchema& schema) const;
  bool means_slices(const c10::OperatorHandle& op, Arguments arguments) const;
  bool writes_slices(const c10::FunctionSchema& schema) const;
  void note_update(const at::Tensor& given, bool hides_writes);
  void note_updates(const c10::FunctionSchema& schema, Arguments arguments);
  bool was_updated(const at::Tensor& parameter) const;
  bool means_slices_between_steps(OperatorUse use) const;
  void leave_forward(torch::jit::Stack& stack, size_t first);
  bool takes_stored(const c10::FunctionSchema& schema, Arguments arguments) const;
  std::vector<std::pair<OperandPlace, UnitPlace>> wholes_among(Arguments arguments, bool parameters) const;
  void give_slices(torch::jit::Stack& stack, size_t first, const std::vector<std::pair<OperandPlace, UnitPlace>>& places) const;
  void expect_slices(const c10::OperatorHandle& op, Arguments arguments);
  void check_dtypes(const c10::FunctionSchema& schema, Arguments arguments) const;
  void begin_forward(torch::jit::Stack& stack, size_t first);
  c10::IValue with_wholes(const c10::IValue& value) const;
  void use_met();
  void use_in_step();
  void acquire_for_operator(size_t unit);
  bool comes_soon(size_t unit) const;
  bool in_call() const { return depth_ && *depth_ > 0; }
  /// A step runs that the program's loop began, by itself and not by a call: so an operator of the loop may end its forward.
  bool in_own_loop() const { return step_.running() && !step_.driven() && !in_call(); }

  torch::nn::Module& module_;
  ShardedUnits& units_;
  ShardedStep& step_;
  Role role_;
  std::optional<at::ScalarType> one_dtype_;
  std::shared_ptr<const int> depth_;
  UnitTensors tensors_;
  SliceGuards guards_;

  /// Of parameters that were written, or may have been by a handle, while they had a gradient: a version from before that.
  std::unordered_map<const c10::TensorImpl*, uint32_t> updated_;

  std::vector<size_t> met_;                ///< units among the arguments of the operator at hand
  std::vector<SeenSlice> seen_;            ///< and parameters that show slices
  std::vector<at::Tensor> touched_;        ///< and memory of slices by another name
  bool noted_ = false;                     ///< and what was made of slices
  bool rows_ = false;                      ///< and that, or the same of another wrapper's
  std::vector<std::optional<size_t>> of_;  ///< what it makes is of slices: of a list, what is made of these items
  std::vector<at::Tensor> written_;        ///< and these stay so
  SliceNotes::Note of_what_;               ///< of that
  ScalarOperator scalar_;
  bool replaced_ = false;               ///< and a parameter in whose place the program has put another tensor
  bool evaluating_ = false;             ///< units may be held that no step knows of
  bool evaluates_in_training_ = false;  ///< the module's mode when that began
  size_t last_;                         ///< unit met last; size() before the first
  int64_t pass_ = -1;
  int backward_pass_ = -1;     ///< of which an operator was seen last
  int64_t gradients_of_ = -1;  ///< the pass behind which gradients were looked for last
};

}  // namespace tessera
