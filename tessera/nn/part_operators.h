#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

/// By which operators a program does to parameters, or gradients, what is right with whole ones alone: for who watches those of which each rank holds a part.
/// Not part of the public surface.
namespace tessera::nn {

/// Norms of gradients as libtorch's clip_grad_norm_ takes them: of each, or the largest absolute value.
class LocalNorms {
 public:
  using Arguments = at::ArrayRef<c10::IValue>;

  /// Whether this operator takes one. It is told all operators, in their order; `is_gradient(value)` is asked where the name leaves it open.
  template <class IsGradient>
  bool is_one(const c10::FunctionSchema& schema, Arguments arguments, const IsGradient& is_gradient) {
    const bool absolute = std::exchange(absolute_, false);
    const std::string& name = schema.name();
    if (absolute && name == "aten::max" && arguments.size() == 1) return true;
    if (arguments.empty() || (name != "aten::abs" && !is_norm(name)) || !is_gradient(arguments[0])) return false;
    absolute_ = name == "aten::abs";
    return !absolute_;
  }

 private:
  static bool is_norm(const std::string& name);

  bool absolute_ = false;  ///< the operator before took absolute values of a gradient
};

[[noreturn]] void refuse_local_norm(const std::string& technique, const c10::FunctionSchema& schema);

/// What fills its first argument from libtorch's generator.
class LocalDraws {
 public:
  enum class Kind : char {
    None,
    InPlace,
    Copied,  ///< from what torch::nn::init::orthogonal_ has drawn beside
  };

  /// It is told all operators, in their order.
  Kind kind_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

  /// What an operator fills that is given as `out`: from the generator, or with an identity, which torch::nn::init::eye_ makes so; undefined of any other.
  static at::Tensor drawn_out(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

 private:
  int64_t factored_ = 0;  ///< elements of what was made orthogonal last, until something is copied
};

/// `way_out`: what to write for values of one process; `name` is the parameter's.
[[noreturn]] void refuse_local_draw(const std::string& technique, const c10::FunctionSchema& schema, LocalDraws::Kind kind, const std::string& name,
                                    const std::string& way_out);

}  // namespace tessera::nn
