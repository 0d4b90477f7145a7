#include "tessera/precision/loss_scale.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/json_reason.h"
#include "tessera/memory/memory.h"

// Which scale is right nobody knows, and it changes while training: a dynamic one is raised until gradients overflow, so that a skipped step now and then is
// the sign that it is where it should be.

namespace tessera::precision {

namespace {

constexpr double kFirst = 65536;
constexpr double kLargest = 1 << 24;
constexpr double kFactor = 2;  // a power of two: scaling and unscaling leave every bit of fp32 as it was

}  // namespace

LossScale::LossScale(const PrecisionConfig& config) : growth_steps_(config.growth_steps), max_skips_(config.max_skips) {
  if (config.loss_scale == "none") return;
  mode_ = config.loss_scale == "dynamic" ? Mode::Dynamic : Mode::Static;
  value_ = mode_ == Mode::Dynamic ? kFirst : std::strtod(config.loss_scale.c_str(), nullptr);
  require(value_ > 0 && std::isfinite(value_), "precision.loss_scale = ", config.loss_scale, ": expected none, dynamic, or a positive number");
}

void LossScale::unscale(const std::vector<nn::NamedParameter>& parameters) const {
  if (value_ == 1) return;
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Gradients);
  for (const auto& parameter : parameters) {
    const at::Tensor tensor = parameter.tensor;
    at::Tensor& gradient = tensor.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.scalar_type() == at::kHalf) gradient = gradient.to(at::kFloat);
    gradient.mul_(1 / value_);
  }
}

LossScale::Decision LossScale::after_backward(bool finite, bool lost) {
  lost_ = !finite && lost ? lost_ + 1 : 0;
  if (finite) {
    in_a_row_ = 0;
    if (mode_ == Mode::Dynamic && ++finite_in_a_row_ >= growth_steps_) {
      value_ = std::min(kLargest, value_ * kFactor);
      finite_in_a_row_ = 0;
    }
    return Decision::Update;
  }
  if (mode_ == Mode::None) return Decision::Stop;
  ++skipped_;
  finite_in_a_row_ = 0;
  if (++in_a_row_ >= max_skips_) return Decision::Stop;
  if (mode_ == Mode::Dynamic) value_ /= kFactor;
  return Decision::Skip;
}

nlohmann::json LossScale::state() const {
  return {{"dynamic", mode_ == Mode::Dynamic},
          {"value", value_},
          {"finite_in_a_row", finite_in_a_row_},
          {"skipped", skipped_},
          {"in_a_row", in_a_row_},
          {"lost_in_a_row", lost_}};
}

void LossScale::restore(const nlohmann::json& saved, const std::string& source) {
  if (saved.is_null()) return;
  const auto refuse = [&](const std::string& what) {
    throw ConfigError(detail::concat(source, ": progress.loss_scale in manifest.json cannot be read (", what, "); the checkpoint is damaged, use another"));
  };
  const auto count = [&](const char* name) {
    const auto& number = saved.at(name);
    if (!number.is_number_integer() || number < 0) refuse(detail::concat("'", name, "' is no count"));
    return number.get<int64_t>();
  };
  try {
    skipped_ = count("skipped");
    const double value = saved.at("value").get<double>();
    if (!(value > 0) || !std::isfinite(value)) refuse("'value' is no scale");
    const bool dynamic = saved.at("dynamic").get<bool>();
    if (!enabled() || dynamic != (mode_ == Mode::Dynamic) || (!dynamic && value != value_)) return;
    value_ = value;
    finite_in_a_row_ = count("finite_in_a_row");
    in_a_row_ = count("in_a_row");
    if (saved.contains("lost_in_a_row")) lost_ = count("lost_in_a_row");  // older checkpoints have none
  } catch (const nlohmann::json::exception& error) {
    refuse(json_reason(error));
  }
}

}  // namespace tessera::precision
