#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/core/error.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/cut.h"

namespace tessera::tensor_parallel {

/// One call of an operator on tensors of which some are cut, as a rule sees it. Those that are not cut are the same on every rank; whether parameters have a
/// part in them is for the trace to judge.
struct RuleCall {
  const c10::FunctionSchema& schema;
  at::ArrayRef<c10::IValue> arguments;
  std::function<const Cut*(const at::Tensor&)> cut_of;      ///< null: not cut
  std::function<std::string(const at::Tensor&)> origin_of;  ///< path of the module that gave it
  TensorLayout layout;                                      ///< of what is cut
  std::string where;                                        ///< beginning of a refusal

  template <class... What>
  [[noreturn]] void refuse(What&&... what) const {
    throw ConfigError(detail::concat(where, std::forward<What>(what)...));
  }
  /// It goes along what is cut.
  [[noreturn]] void refuse_along() const;

  /// Nothing where the schema has no argument of this name, or none was given.
  const c10::IValue* find(const char* name) const;
  bool writes(size_t argument) const;               ///< into a tensor that is given
  const at::Tensor& tensor(size_t argument) const;  ///< undefined where it is none
  std::vector<at::Tensor> tensors() const;          ///< all that are given, alone or in lists
};

/// Where the results are cut, which all are alike; one that is not is the same on every rank.
using Rule = std::optional<Cut> (*)(const RuleCall&);

/// How an operator hands on what is cut: of the few operators of which it is known. Null: refuse, or look at what it is made of.
Rule rule_of(const std::string& name);

/// Whether f(a) + f(b) = f(a + b) for this call on terms of a sum: `terms` says which of its tensors are such, the others being the same on every rank. False
/// for every operator of which it is not known.
bool keeps_sums(const RuleCall& call, const std::vector<bool>& terms);
bool adds(const std::string& name);

}  // namespace tessera::tensor_parallel
