#include "tessera/precision/policy.h"

#include <exception>
#include <map>
#include <set>
#include <string>

#include <ATen/Context.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/format_name.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

namespace tessera::precision {

namespace {

at::ScalarType dtype_of(const std::string& key, const std::string& name) {
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  require(name == "fp16", key, " = ", name, ": expected fp32, bf16 or fp16");
  return at::kHalf;
}

/// What the modules hand to each other: fp8 holds operands of one product, and bf16 all else.
at::ScalarType compute_dtype_of(const std::string& name) {
  require(name != "auto", "precision.compute = auto: what it becomes follows from the machine, and nobody has asked; call precision::settle_compute() before");
  if (name == "fp8") return at::kBFloat16;
  require(name == "tf32" || name == "fp32" || name == "bf16" || name == "fp16", "precision.compute = ", name, ": expected fp32, tf32, bf16, fp16, fp8 or auto");
  return name == "tf32" ? at::kFloat : dtype_of("precision.compute", name);
}

/// The value of precision.compute that `policy` is of.
std::string compute_name(const Policy& policy) { return policy.fp8 ? "fp8" : policy.tf32 ? "tf32" : format_name(policy.compute); }

void convert(const at::Tensor& parameter, at::ScalarType dtype) {
  if (!at::isFloatingType(parameter.scalar_type()) || parameter.scalar_type() == dtype) return;
  nn::set_data_of_same(parameter, parameter.detach().to(dtype));
}

/// Those whose products follow the policy, and round their weights at each use.
bool casts_its_weight(const torch::nn::Module& module) {
  return dynamic_cast<const nn::LinearImpl*>(&module) != nullptr || dynamic_cast<const nn::GroupedExpertsImpl*>(&module) != nullptr;
}

/// A setting that would do nothing.
void refuse_unheard(const torch::nn::Module& root, const Policy& policy) {
  if (!policy.fp8 && policy.compute == policy.params) return;
  bool has_parameters = false, heard = false;
  root.apply([&](const torch::nn::Module& module) {
    if (module.parameters(/*recurse=*/false).empty()) return;
    has_parameters = true;
    heard |= policy.fp8 ? casts_its_weight(module) : dynamic_cast<const nn::Module*>(&module) != nullptr;
  });
  require(heard || !has_parameters, "precision.compute = ", compute_name(policy), " beside precision.params = ", format_name(policy.params), ": module '",
          root.name(), "' has no ",
          policy.fp8 ? "linear layer or experts of tessera::nn, which multiply in it" : "tessera::nn::Module with parameters, which would compute in it",
          ", and plain torch::nn modules compute in the dtype of their parameters. Set params and compute to one format (bf16 both, with fp32 masters), let "
          "fully_shard gather a plain module in 16 bits (param_dtype, without cast), or build the model of tessera's layers");
}

}  // namespace

std::optional<at::ScalarType> Policy::gradient_dtype() const {
  if (params == at::kFloat || params == at::kDouble || (params == at::kBFloat16 && reduce == at::kBFloat16)) return std::nullopt;
  return at::kFloat;
}

void require_support(const Policy& policy, at::Device device) {
  if (device.is_meta()) return;
  constexpr int64_t kSize = 16;  // what tensor cores want, at least
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions(device);
  try {
    if (policy.fp8) {
      const at::Tensor x = at::ones({kSize, kSize}, options);
      kernels::fp8_linear(x, x, std::nullopt, policy.compute, *policy.fp8);
    } else {
      const at::Tensor x = at::ones({kSize, kSize}, options).to(policy.compute);
      at::mm(x, x);
    }
  } catch (const c10::OutOfMemoryError&) {
    throw;  // run.memory_limit_bytes is to be named, not a format
  } catch (const ConfigError&) {
    throw;  // another setting is, by itself
  } catch (const std::exception& error) {
    const std::string reason = error.what();
    throw ConfigError(
        detail::concat("precision.compute = ", compute_name(policy), ": ", device, " has no such products (", reason.substr(0, reason.find('\n')),
                       "); set precision.compute = ", policy.compute == at::kFloat ? "a format that it has" : "fp32, or another format that it has"));
  }
}

Policy policy_from(const PrecisionConfig& config) {
  if (config.compute == "fp64") return {.params = at::kDouble, .compute = at::kDouble};  // what verify measures rounding by: no file may ask for it
  Policy policy{.params = dtype_of("precision.params", config.params),
                .compute = compute_dtype_of(config.compute),
                .reduce = dtype_of("precision.reduce", config.reduce),
                .master = dtype_of("precision.master", config.master),
                .tf32 = config.compute == "tf32"};
  if (config.compute == "fp8") policy.fp8 = config.fp8_scales == "row" ? kernels::Fp8Scaling::Row : kernels::Fp8Scaling::Tensor;
  return policy;
}

void apply(torch::nn::Module& root, const Policy& policy) {
  refuse_unheard(root, policy);
  root.apply([&](torch::nn::Module& module) {
    if (auto* ours = dynamic_cast<nn::Module*>(&module)) ours->set_compute_dtype(policy.compute);
    if (auto* linear = dynamic_cast<nn::LinearImpl*>(&module)) linear->set_fp8(policy.fp8);
    if (auto* experts = dynamic_cast<nn::GroupedExpertsImpl*>(&module)) experts->set_fp8(policy.fp8);
  });
  for (const auto& parameter : nn::unique_parameters(root)) convert(parameter.tensor, policy.params);
}

std::function<bool(const nn::NamedParameter&)> cast_at_use(const torch::nn::Module& root, const Policy& policy) {
  const bool narrows = !policy.fp8 && c10::elementSize(policy.compute) < c10::elementSize(policy.params);
  std::map<const c10::TensorImpl*, int> users;
  std::set<const c10::TensorImpl*> cast;
  root.apply([&](const torch::nn::Module& module) {
    const bool casts = narrows && casts_its_weight(module);
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      ++users[parameter.unsafeGetTensorImpl()];
      if (casts) cast.insert(parameter.unsafeGetTensorImpl());
    }
  });
  std::erase_if(cast, [&](const c10::TensorImpl* parameter) { return users.at(parameter) > 1; });
  return [cast = std::move(cast)](const nn::NamedParameter& parameter) { return cast.contains(parameter.tensor.unsafeGetTensorImpl()); };
}

bool use_tf32(bool allowed, at::Device device) {
  at::globalContext().setAllowTF32CuBLAS(allowed);
  at::globalContext().setAllowTF32CuDNN(allowed);
  return allowed && device.is_cuda();
}

}  // namespace tessera::precision
