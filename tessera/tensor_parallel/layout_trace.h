#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/nn/operators.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/cut.h"

namespace tessera::tensor_parallel {

struct RuleCall;

/// Follows the layouts of activations through one forward pass, operator by operator. What is whole goes through any of them; what is cut, or a term of a sum,
/// through those of which it is known how they hand it on (layout_rules.h), and every other one is refused.
///
/// Styles tell what they give (gives) and what they take (takes); between them, operators hand layouts on. Meant for a pass on meta before anything runs, below
/// autograd (so that operators come as they are written, before they are taken apart): each tensor that carries a layout is kept alive for as long as the
/// trace.
class LayoutTrace final : public nn::OperatorHooks {
 public:
  explicit LayoutTrace(const torch::nn::Module& module);

  void call(nn::OperatorCall& operation) override;

  /// `path`'s style takes `tensor` as `layout`, cut as `place` says; of Features nothing said is the last dimension. Throws ConfigError where it is something
  /// else, naming where that came from.
  void takes(const std::string& path, const at::Tensor& tensor, TensorLayout layout, const Cut& place = {}) const;
  /// Of Features and Sequence: where it is cut.
  void gives(const std::string& path, const at::Tensor& tensor, TensorLayout layout, Cut cut = {});
  /// `path`'s weight is that of `shares` of the last dimension of `tensor`. Throws ConfigError where the layers before it cut them in another way.
  void takes_features(const std::string& path, const at::Tensor& tensor, const std::vector<FeatureShare>& shares) const;
  /// The plan says that `path` gives `tensor` as `layout`, cut in `dim`. Throws ConfigError where it is something else.
  void agrees(const std::string& path, const at::Tensor& tensor, TensorLayout layout, int64_t dim) const;
  /// How the last dimension of `tensor` is cut; undefined where it is not, or by other than features.
  Cut features_of(const at::Tensor& tensor) const;
  /// The attention core `path` takes q, k and v [B, S, H, D]: where its result is cut. Undefined where they are whole. Throws ConfigError where they are not
  /// cut by heads that belong together.
  Cut takes_heads(const std::string& path, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

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

  /// While alive, within Trusted, operators are judged again: a style inside takes what is known. Null: nothing.
  class Judged {
   public:
    explicit Judged(std::shared_ptr<LayoutTrace> trace);
    ~Judged();
    Judged(const Judged&) = delete;
    Judged& operator=(const Judged&) = delete;

   private:
    std::shared_ptr<LayoutTrace> trace_;
    int trusted_ = 0;
  };

 private:
  /// What is known of a tensor. Replicated is what takes a gradient to parameters and needs the whole of it, beginning with the parameters themselves; those
  /// whose gradients are summed once a step are Copied. Of what takes no gradient to any nothing is known: it is the same on every rank.
  struct Known {
    at::Tensor alive;
    TensorLayout layout = TensorLayout::Replicated;
    std::string origin;      ///< path of the module that gave it
    Cut cut{};               ///< of Features and Sequence
    bool parameter = false;  ///< made of parameters alone
    bool followed = true;    ///< whether it may be used: parts of parameters may not, outside their layers
  };
  struct Operands {
    std::vector<const Known*> split;  ///< neither replicated nor copied
    std::vector<const Known*> copied;
    const Known* trained = nullptr;  ///< one that needs the whole of its gradient
    bool parameters_alone = true;
  };

  const Known* find(const at::Tensor& tensor) const;
  TensorLayout layout_of(const at::Tensor& tensor) const;
  std::string where(const std::string& name, const Known& known) const;
  Operands operands_of(const RuleCall& call) const;
  void refuse_mixtures(const RuleCall& call, const Known& first, const Operands& operands) const;
  void refuse_trained(const RuleCall& call, const Known& first, const Known& trained) const;
  void refuse_writes(const RuleCall& call, const Known* result) const;
  std::optional<Known> result_of(const RuleCall& call, const Known& first) const;
  void run(nn::OperatorCall& operation, const RuleCall& call, const std::optional<Known>& result);
  void remember(const at::Tensor& tensor, Known known);

  std::unordered_map<const c10::TensorImpl*, Known> known_;
  std::unordered_map<const c10::StorageImpl*, Known> written_;  ///< memory that something known was written into, whoever looks at it
  std::vector<std::string> inside_;                             ///< operators that are taken apart
  int trusted_ = 0;
};

}  // namespace tessera::tensor_parallel
