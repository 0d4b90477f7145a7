#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>

#include "tessera/nn/operators.h"

namespace tessera::plan {

/// Runs operators on meta that have no meta kernel, so that a plan goes on where one of a user's does: of what it makes, shapes and dtypes are what the kernel
/// of a CPU makes of tensors of zeros that are like its arguments; what it changes in place is the argument. What its kernel takes meanwhile is not counted: it
/// would be of that kernel and of no device. Belongs outside of all other scopes of operators.
///
/// Cost: the kernel, and its arguments on this machine. Throws ConfigError, naming the operator, where there is no kernel for a CPU either, where it refuses
/// zeros, and where its arguments are larger than kMostBytes.
class StandIns final : public nn::OperatorHooks {
 public:
  static constexpr int64_t kMostBytes = int64_t{1} << 30;

  void call(nn::OperatorCall& operation) override;
  /// Those that were run so, by name.
  const std::set<std::string>& names() const { return names_; }

 private:
  void run_on_zeros(nn::OperatorCall& operation);

  std::set<std::string> names_;
  std::unordered_map<const c10::FunctionSchema*, bool> computed_;  ///< on meta, by a kernel of theirs
};

}  // namespace tessera::plan
