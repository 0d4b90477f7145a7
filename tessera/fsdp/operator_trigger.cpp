#include "tessera/fsdp/operator_trigger.h"

#include <algorithm>

namespace tessera {

OperatorTrigger::OperatorTrigger(ShardedUnits& units, ShardedStep& step) : units_(units), step_(step), last_(units.size()) {
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (const FlatParameters& flat : units.flats(unit)) unit_of_.emplace(flat.whole_storage(), unit);
  }
}

void OperatorTrigger::meet(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto found = unit_of_.find(tensor.storage().unsafeGetStorageImpl());
  if (found != unit_of_.end() && std::ranges::find(met_, found->second) == met_.end()) met_.push_back(found->second);
}

void OperatorTrigger::meet(const c10::IValue& value) {
  if (value.isTensor()) {
    meet(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) meet(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) meet(item);
  }
}

void OperatorTrigger::call(nn::OperatorCall& operation) {
  met_.clear();
  for (const c10::IValue& argument : operation.arguments()) meet(argument);
  if (!met_.empty()) use_met();
  operation.run();
}

bool OperatorTrigger::comes_soon(size_t unit) const {
  for (size_t ahead = 0; ahead < 2; ++ahead) {
    const size_t* next = step_.order().next(ahead);
    if (next && *next == unit) return true;
  }
  return false;
}

void OperatorTrigger::use_met() {
  if (pass_ != step_.pass()) {
    pass_ = step_.pass();
    last_ = units_.size();
  }
  const bool same = met_.size() == 1 && met_.front() == last_;
  if (same && units_.held(last_)) return;
  if (!same) {
    for (const size_t unit : met_) step_.order().saw(unit);
    last_ = met_.back();
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_.held(unit) && std::ranges::find(met_, unit) == met_.end() && !comes_soon(unit)) units_.release(unit);
    }
  }
  for (const size_t unit : met_) units_.acquire(unit);
  units_.prefetch(step_.order());
}

}  // namespace tessera
