#include <cmath>
#include <set>
#include <tuple>

#include "tessera/config/detail.h"
#include "tessera/config/optim_groups.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

void stored_as(const std::string& key, const std::string& dtype, const std::string& what) {
  require(dtype != "tf32" && dtype != "fp8", key, " = ", dtype, ": ", dtype, " is a format of matrix products, and ", what, " one of fp32, bf16, fp16; set ",
          key, " to one of them, and precision.compute = ", dtype);
}

/// The copy that the optimizer updates.
void validate_master(const PrecisionConfig& precision) {
  const auto& [params, master] = std::tie(precision.params, precision.master);
  stored_as("precision.master", master, "masters are kept in");
  require(master == "fp32" || params != "fp32", "precision.master = ", master,
          ": a copy narrower than the parameters (precision.params = fp32) would lose what they hold; set precision.master = fp32");
  require(master == "fp32" || master == "bf16", "precision.master = ", master,
          ": updates are rounded stochastically in bf16 only; set precision.master = fp32, or precision.params and precision.master = bf16");
  require(master == "fp32" || params == master, "precision.master = ", master, ": precision.params = ", params,
          "; without an fp32 copy both are the same tensor; set precision.master = fp32 or ", params);
}

void validate_reduce(const Config& config) {
  const auto& precision = config.precision;
  const auto& reduce = precision.reduce;
  stored_as("precision.reduce", reduce, "gradients cross the network in");
  if (reduce == "fp32") return;
  require(precision.params == "fp32" || precision.params == reduce, "precision.reduce = ", reduce, ": precision.params = ", precision.params,
          " have gradients of another 16-bit format; set precision.reduce = fp32 or ", precision.params);
  require(config.comm.compression == "none" || config.comm.compression == reduce, "comm.compression = ", config.comm.compression,
          ": precision.reduce = ", reduce, " says otherwise how gradients cross the network; set one of them alone");
  require(!config.run.deterministic, "precision.reduce = ", reduce,
          ": run.deterministic adds whole gradients in a tree that is the same for every number of ranks; set precision.reduce = fp32, or run.deterministic = "
          "false");
}

void validate_loss_scale(const Config& config) {
  const auto& precision = config.precision;
  const auto& scale = precision.loss_scale;
  require(precision.growth_steps >= 1, "precision.growth_steps = ", precision.growth_steps, ": expected at least 1; set precision.growth_steps");
  require(precision.max_skips >= 1, "precision.max_skips = ", precision.max_skips, ": expected at least 1; set precision.max_skips");
  if (scale == "none") return;
  if (scale != "dynamic") {
    const double factor = std::stod(scale);
    // Beyond these the scaled loss, or what is left of a gradient by the factor's reciprocal, leaves fp32.
    require(factor >= std::ldexp(1.0, -24) && factor <= std::ldexp(1.0, 100), "precision.loss_scale = ", scale,
            ": expected a positive number from 2^-24 to 2^100, such as 65536, dynamic or none");
  }
  const std::set<std::string> dtypes{precision.params, precision.compute, precision.reduce, config.comm.compression};
  require(dtypes.contains("fp16"), "precision.loss_scale = ", scale,
          ": gradients are scaled against the underflow of fp16, and neither precision.params = ", precision.params,
          " nor precision.compute = ", precision.compute, " nor precision.reduce = ", precision.reduce,
          " needs that: fp32, tf32 and bf16 have the range, fp8 products find their scales themselves; set precision.loss_scale = none");
  require(config.comm.compression != "powersgd" || scale != "dynamic", "precision.loss_scale = dynamic: comm.compression = powersgd carries what it did not ",
          "send into later steps, in the unit of a scale that moves; set a number, such as 1024, or comm.compression = none");
}

}  // namespace

void validate_formats(const PrecisionConfig& precision) {
  const auto& [params, compute] = std::tie(precision.params, precision.compute);
  stored_as("precision.params", params, "parameters are kept in");
  require(params != "fp16" || compute != "auto", "precision.compute = auto: becomes bf16 or fp32 by the machine, and precision.params = fp16 would be rounded ",
          "twice in bf16; set precision.compute = fp16, or precision.params = fp32 or bf16");
  const bool other_half = (params == "bf16" && compute == "fp16") || (params == "fp16" && (compute == "bf16" || compute == "fp8"));
  require(!other_half, "precision.compute = ", compute, ": precision.params = ", params,
          " would be rounded twice, to formats that do not hold each other; set ", "precision.params = fp32, or one 16-bit format for both");
}

void validate_precision(const Config& config) {
  validate_formats(config.precision);
  validate_master(config.precision);
  require(config.precision.master != "bf16" || !uses_optimizer(config.optim, {"adafactor", "adam8bit", "muon"}),
          "precision.master = bf16: optim.name = ", config.optim.name, config.optim.groups.empty() ? "" : ", or that of one of optim.groups,",
          " has no update with stochastic rounding; set precision.master = fp32, or optim.name = adamw, lion or sgd");
  validate_reduce(config);
  validate_loss_scale(config);
}

}  // namespace tessera::detail
