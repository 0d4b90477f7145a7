#include "tessera/nn/part_operators.h"

#include <unordered_set>

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

/// Each fills what it is given from libtorch's generator.
bool draws_in_place(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::normal_",     "aten::uniform_", "aten::bernoulli_", "aten::random_",
                                                     "aten::log_normal_", "aten::cauchy_",  "aten::geometric_", "aten::exponential_"};
  return names.contains(name);
}

constexpr const char* kEye = "aten::eye";

/// Each fills its `out`.
bool draws_out(const std::string& name) {
  static const std::unordered_set<std::string> names{
      kEye,           "aten::normal",    "aten::randn",        "aten::rand",        "aten::randn_like",  "aten::rand_like",      "aten::randint",
      "aten::random", "aten::randperm",  "aten::randint_like", "aten::uniform",     "aten::bernoulli",   "aten::binomial",       "aten::poisson",
      "aten::cauchy", "aten::geometric", "aten::log_normal",   "aten::exponential", "aten::multinomial", "aten::_standard_gamma"};
  return names.contains(name);
}

}  // namespace

bool LocalNorms::is_norm(const std::string& name) { return name == "aten::norm" || name == "aten::linalg_vector_norm" || name == "aten::_foreach_norm"; }

void refuse_local_norm(const std::string& technique, const c10::FunctionSchema& schema) {
  throw ConfigError(tessera::detail::concat(
      technique, ": ", schema.name(),
      " was given a gradient, of which this rank has a slice: a norm of slices, such as torch::nn::utils::clip_grad_norm_ takes, is another on each rank; call "
      "tessera::clip_grad_norm(model, max_norm), which sums over the ranks and returns the norm"));
}

LocalDraws::Kind LocalDraws::kind_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const std::string& name = schema.name();
  if (name == "aten::linalg_qr" && !at::GradMode::is_enabled()) factored_ = arguments[0].toTensor().numel();
  if (name == "aten::copy_" && factored_ != 0) {
    return std::exchange(factored_, 0) == arguments[0].toTensor().numel() ? Kind::Copied : Kind::None;
  }
  return draws_in_place(name) ? Kind::InPlace : Kind::None;
}

at::Tensor LocalDraws::drawn_out(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  if (schema.arguments().empty() || !schema.arguments().back().is_out() || !draws_out(schema.name())) return {};
  return arguments.back().toTensor();
}

/// Every rank would draw its own part from the start of one sequence: not the values of one process, and the same again where ranks are seeded alike.
void refuse_local_draw(const std::string& technique, const c10::FunctionSchema& schema, LocalDraws::Kind kind, const std::string& name,
                       const std::string& way_out) {
  const bool copied = kind == LocalDraws::Kind::Copied;
  throw ConfigError(tessera::detail::concat(
      technique, ": ", copied ? "an orthogonal matrix of this rank's own (torch::nn::init::orthogonal_)" : schema.name(),
      copied ? " was copied into '" : " was given '", name, "', of which each rank has a slice, and would ",
      schema.name() == kEye ? "begin an identity of its own on each" : "draw other values than one process does, the same ones on ranks that are seeded alike",
      "; initialize in on_meta (its second argument, nn::set_init) and materialize, or ", way_out,
      copied ? "" : ". For this rank's slice alone draw into parameter.detach()"));
}

}  // namespace tessera::nn
