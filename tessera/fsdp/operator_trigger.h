#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/fsdp/sharded_step.h"
#include "tessera/nn/operators.h"

namespace tessera {

/// Tells a step which unit is needed by looking at the arguments of every operator, forward and backward, for any torch::nn::Module: a parameter, and every
/// view of it that autograd keeps, has the storage of its unit's whole buffer. A unit is acquired when an operator first meets that storage. It is released
/// when an operator meets another unit, unless the order of the pass before says that it comes again within the next two uses; and where a released unit is met
/// again, it is gathered again. So an unforeseen order costs traffic, never correctness. Cost: about a microsecond an operator.
class OperatorTrigger final : public nn::OperatorHooks {
 public:
  OperatorTrigger(ShardedUnits& units, ShardedStep& step);

  void call(nn::OperatorCall& operation) override;

 private:
  void meet(const c10::IValue& value);
  void meet(const at::Tensor& tensor);
  void use_met();
  bool comes_soon(size_t unit) const;

  ShardedUnits& units_;
  ShardedStep& step_;
  std::unordered_map<const c10::StorageImpl*, size_t> unit_of_;
  std::vector<size_t> met_;  ///< units among the arguments of the operator at hand
  size_t last_;              ///< unit met last; size() before the first
  int64_t pass_ = -1;
};

}  // namespace tessera
