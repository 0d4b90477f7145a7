#include "tessera/verify/difference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// Rounding in a sum is of the size of its largest terms, not of the result, so entries near zero have no relative error worth the name: a tensor is measured by
// its largest entry. Equal bits are looked for first: they are the usual case, and the only one in which infinities are equal.

namespace tessera {

namespace {

using checkpoint::SlicedTensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kShareOfModule = 0.1;
constexpr double kOtherOrder = 8, kLargestShare = 0.125;

at::Tensor defined(const SlicedTensor& held) { return held.tensor.defined() ? held.tensor.detach() : at::zeros(held.slice.local_shape()); }

std::string module_of(const std::string& parameter) { return parameter.substr(0, parameter.find_last_of('.') + 1); }

/// The slices of one logical tensor, one a rank that holds any of it.
struct Held {
  std::vector<Slice> slices;
  std::vector<at::Tensor> tensors;
  std::vector<int> ranks;
};

Held held_by(const std::vector<std::vector<SlicedTensor>>& ranks, const std::string& name) {
  Held held;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& tensor : ranks[rank]) {
      if (tensor.slice.name != name) continue;
      held.slices.push_back(tensor.slice);
      held.tensors.push_back(defined(tensor));
      held.ranks.push_back(static_cast<int>(rank));
    }
  }
  return held;
}

/// How far off what is exact a rank may be by rounding, going by how far one device is (`own`). In fp32 another order of additions is not off by as much: a
/// row's output that was merged of two tiles is off as a whole, and so are the products of all of its keys, which one device rounds one by one (measured where
/// scores are nearly even: up to 5.7 times one device's). Where that would be no small part of the gradient, or products round more coarsely, it is what one
/// device is off by.
double by_rounding(double own, const at::Tensor& exact) {
  if (exact.scalar_type() != at::kDouble) return own;
  return std::max(own, std::min(kOtherOrder * own, kLargestShare * largest_entry(exact)));
}

/// By how much more than rounding a rank is off what is exact; infinity where one device (`whole`) says nothing.
double farther(const at::Tensor& held, const Slice& slice, const at::Tensor& whole, const at::Tensor& exact) {
  const double own = largest_difference(whole, exact);
  return std::isfinite(own) ? largest_difference(held, take(exact, slice)) - by_rounding(own, exact) : kInfinity;
}

/// Why the slices do not make up the whole tensor, or nothing.
std::string gap(const Held& held, const Slice& whole) {
  try {
    reshard(held.slices, whole);
    return {};
  } catch (const ConfigError& error) {
    return error.what();
  }
}

}  // namespace

std::string measure_of_zeros(const std::string& parameter, int64_t keys) {
  const std::string module = module_of(parameter);
  const bool query = module.ends_with(".wq."), key = module.ends_with(".wk.");
  if (keys == 1 && (query || key)) return module_of(module.substr(0, module.size() - 1));
  return key && parameter.ends_with(".bias") ? module : "";
}

double largest_entry(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  return tensor.detach().abs().max().to(at::kDouble).item<double>();
}

double largest_difference(const at::Tensor& given, const at::Tensor& want) {
  const c10::NoGradGuard no_grad;
  if (want.numel() == 0) return 0;
  const at::Tensor got = given.to(want.device());
  if (got.scalar_type() == want.scalar_type() && at::equal(got, want)) return 0;
  const at::Tensor a = got.to(at::kDouble), b = want.to(at::kDouble);
  const at::Tensor apart = at::where(a.eq(b), at::zeros({}, a.options()), (a - b).abs());
  const double worst = apart.max().item<double>();  // a NaN wins
  return std::isnan(worst) ? kInfinity : worst;
}

double relative(double difference, double scale) {
  if (difference == 0) return 0;
  const double value = scale > 0 && std::isfinite(scale) ? difference / scale : kInfinity;
  return std::isnan(value) ? kInfinity : value;
}

Scales own_scales(const std::vector<SlicedTensor>& reference) {
  Scales scales;
  for (const auto& [tensor, slice] : reference) scales[slice.name] = largest_entry(tensor);
  return scales;
}

Scales gradient_scales(const std::vector<SlicedTensor>& reference, int64_t keys) {
  Scales scales = own_scales(reference);
  const Scales own = scales;
  std::map<std::string, double> modules;
  for (const auto& [name, scale] : scales) modules[module_of(name)] = std::max(modules[module_of(name)], scale);
  for (auto& [name, scale] : scales) {
    scale = std::max(scale, kShareOfModule * modules[module_of(name)]);
    const std::string measure = measure_of_zeros(name, keys);
    if (measure.empty()) continue;
    for (const auto& [other, largest] : own) {
      if (other.starts_with(measure)) scale = std::max(scale, largest);
    }
  }
  return scales;
}

Difference& TensorComparer::entry(const std::string& name) {
  const auto found = std::find_if(list_.each.begin(), list_.each.end(), [&](const Difference& each) { return each.name == name; });
  return found != list_.each.end() ? *found : list_.each.emplace_back(Difference{.name = name});
}

void TensorComparer::compare(int64_t step, const std::vector<SlicedTensor>& reference, const std::vector<std::vector<SlicedTensor>>& ranks,
                             const Scales& scales, double floor, const Exact& exact) {
  for (const auto& one : reference) {
    const std::string& name = one.slice.name;
    const at::Tensor whole = defined(one);
    const Held held = held_by(ranks, name);
    Difference& worst = entry(name);
    const auto note = [&](double value, int rank, std::string text) {
      if (value > worst.value) worst = {.name = name, .value = value, .step = step, .rank = rank, .note = std::move(text)};
    };
    if (auto missing = gap(held, one.slice); !missing.empty()) note(kInfinity, 0, std::move(missing));
    for (size_t i = 0; i < held.slices.size(); ++i) {
      if (held.slices[i].boxes.empty()) continue;
      if (held.slices[i].shape != one.slice.shape || held.tensors[i].sizes() != at::IntArrayRef(held.slices[i].local_shape())) {
        note(kInfinity, held.ranks[i], detail::concat("has the shape ", held.tensors[i].sizes()));
        continue;
      }
      const auto measured = [&](double apart) { return relative(std::max(0.0, apart - floor), scales.at(name)); };
      double value = measured(largest_difference(held.tensors[i], take(whole, held.slices[i])));
      if (value > list_.bound && exact) value = std::min(value, measured(farther(held.tensors[i], held.slices[i], whole, exact(name))));
      note(value, held.ranks[i], {});
    }
  }
}

void follow(const SlicedTensor& target, const std::vector<std::vector<SlicedTensor>>& ranks) {
  const c10::NoGradGuard no_grad;
  const Held held = held_by(ranks, target.slice.name);
  if (!target.tensor.defined() || !gap(held, target.slice).empty()) return;
  at::Tensor whole = target.tensor.detach();
  copy_slices(held.slices, held.tensors, target.slice, whole);
}

}  // namespace tessera
