#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/nn/operators.h"
#include "tessera/nn/saved_tensors.h"

namespace tessera {

/// The operators that `names` mean ("aten::mm", or "mm" for one of libtorch's own). Throws ConfigError for a name that is none (nearest) and for operators
/// whose outputs cannot be kept: views and changes in place, whose outputs are not their own; composites, which do not run as such; and random ones, for what
/// is not drawn again shifts all later draws.
std::set<std::string> keepable_operators(const std::vector<std::string>& names);

/// Outputs of some operators in one forward pass, in the order of the calls; they stand in for the calls when the pass is repeated. Operators that a kernel
/// calls inside another operator do not count: they differ from device to device. Nor do those that would not be called again (nn::NotRepeated), nor copies
/// between the host and a device, of which it depends on the device whether there are any: a run on the CPU, and a plan of it, keep the same.
class KeptOutputs {
 public:
  /// `path` of the module, for messages.
  KeptOutputs(std::shared_ptr<const std::set<std::string>> operators, std::string path) : operators_(std::move(operators)), path_(std::move(path)) {}

  /// Notes what passes. Lives shorter than this.
  std::shared_ptr<nn::OperatorHooks> recorder();

  /// After the pass: from now on the outputs are kept as saved tensors are, through nn::save. Throws ConfigError where one has been changed in place since.
  void forward_done();

  /// Gives the outputs back in their order, without running the operators. Throws ConfigError where the pass calls another operator than the first one did, or
  /// gives it tensors of other shapes or types.
  std::shared_ptr<nn::OperatorHooks> replayer() const;

 private:
  class Recorder;
  class Replayer;
  bool keeps(const nn::OperatorCall& operation) const;

  struct Output {
    at::Tensor tensor;  ///< until forward_done; undefined where the operator returned none
    int64_t version = 0;
    std::unique_ptr<nn::SavedTensor> saved;
  };
  /// A tensor that an operator was given.
  struct Argument {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool operator==(const Argument&) const = default;
  };
  struct Call {
    std::string name;
    std::vector<Argument> arguments;
    std::vector<Output> outputs;

    std::string text() const;  ///< "aten::mm of [2, 3] float, [3, 4] float"
  };
  static std::vector<Argument> arguments_of(const nn::OperatorCall& operation);

  std::shared_ptr<const std::set<std::string>> operators_;
  std::string path_;
  std::vector<Call> calls_;
};

}  // namespace tessera
