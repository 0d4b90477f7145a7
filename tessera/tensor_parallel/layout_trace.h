#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/nn/operators.h"
#include "tessera/nn/parallel_plan.h"

namespace tessera::tensor_parallel {

/// Follows the layouts of activations through one forward pass, operator by operator, and refuses what has no meaning: a layer that takes a layout that is not
/// there, a norm over a part of the features, attention over a part of the sequence, a function of a term of a sum that is not linear.
///
/// Styles tell what they give (gives) and what they take (takes); between them, operators hand layouts on. Meant for a pass on meta before anything runs: each
/// tensor that carries a layout is kept alive for as long as the trace.
class LayoutTrace final : public nn::OperatorHooks {
 public:
  explicit LayoutTrace(const torch::nn::Module& module);

  void call(nn::OperatorCall& operation) override;

  /// `path`'s style takes `tensor` as `layout`. Throws ConfigError where it is something else, naming where that came from.
  void takes(const std::string& path, const at::Tensor& tensor, TensorLayout layout) const;
  void gives(const std::string& path, const at::Tensor& tensor, TensorLayout layout);
  /// `path`'s weight is that of `features` of the last dimension of `tensor`. Throws ConfigError where the layers before it cut them in another way.
  void takes_features(const std::string& path, const at::Tensor& tensor, int64_t features) const;
  /// The plan says that `path` gives `tensor` as `layout`. Throws ConfigError where it is something else.
  void agrees(const std::string& path, const at::Tensor& tensor, TensorLayout layout) const;

  /// While alive, operators are a style's own: they are not judged and hand nothing on. Null: nothing.
  class Trusted {
   public:
    explicit Trusted(std::shared_ptr<LayoutTrace> trace);
    ~Trusted();
    Trusted(const Trusted&) = delete;
    Trusted& operator=(const Trusted&) = delete;

   private:
    std::shared_ptr<LayoutTrace> trace_;
  };

  /// While alive, a module runs whose parameters' gradients are summed over the parts of the sequence.
  class ByPosition {
   public:
    explicit ByPosition(std::shared_ptr<LayoutTrace> trace);
    ~ByPosition();
    ByPosition(const ByPosition&) = delete;
    ByPosition& operator=(const ByPosition&) = delete;

   private:
    std::shared_ptr<LayoutTrace> trace_;
  };

 private:
  /// What is known of a tensor. Parameters, and what is made of them alone, have no layout; Replicated is what else they have a part in, and nothing is known
  /// of what takes no gradient to a parameter.
  struct Known {
    at::Tensor alive;
    std::optional<TensorLayout> layout;
    std::string origin;         ///< path of the module that gave it
    bool features_last = true;  ///< Features: whether the last dimension is still the one that is cut (heads, taken apart, are not)
  };
  struct Operands {
    std::vector<const Known*> cut;   ///< those that are not simply replicated
    const Known* trained = nullptr;  ///< one that is, and hands a gradient on to parameters
    bool parameter = false, replicated = false;
    bool fit = true;        ///< what is cut and what is whole have shapes that go together, dimension by dimension
    bool parts_fit = true;  ///< so have the parts of what is cut
  };

  const Known* find(const at::Tensor& tensor) const;
  TensorLayout layout_of(const at::Tensor& tensor) const;
  Operands operands_of(at::ArrayRef<c10::IValue> arguments) const;
  std::optional<Known> result_of(const std::string& name, const Operands& operands) const;
  void refuse_along_the_cut(const nn::OperatorCall& operation) const;
  void remember(const at::Tensor& tensor, Known known);

  std::unordered_map<const c10::TensorImpl*, Known> known_;
  int trusted_ = 0, by_position_ = 0;
};

}  // namespace tessera::tensor_parallel
