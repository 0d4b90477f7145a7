#include "tessera/checkpoint/narrowing.h"

#include <algorithm>
#include <limits>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"

// A cast makes infinities of what its format cannot hold, and says nothing. The copy is looked at, for it alone is certain to be in memory; what it came from
// is read again only where there is something to say.

namespace tessera::checkpoint {
namespace {

double largest_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? static_cast<double>(std::numeric_limits<c10::Half>::max()) : static_cast<double>(std::numeric_limits<c10::BFloat16>::max());
}

bool narrows(at::ScalarType from, at::ScalarType to) {
  if (to == at::kHalf) return from != at::kHalf && at::isFloatingType(from);
  return to == at::kBFloat16 && (from == at::kFloat || from == at::kDouble);
}

}  // namespace

std::optional<double> beyond_range(const at::Tensor& target, const std::vector<at::Tensor>& sources) {
  const at::ScalarType to = target.scalar_type();
  const auto wider = [&](const at::Tensor& source) { return narrows(source.scalar_type(), to); };
  if (target.is_meta() || target.numel() == 0 || std::ranges::none_of(sources, wider) || !at::isinf(target).any().item<bool>()) return std::nullopt;
  double largest = 0;
  for (const at::Tensor& source : sources) {
    if (!wider(source) || source.numel() == 0) continue;
    const at::Tensor sizes = source.abs().to(at::kDouble);
    largest = std::max(largest, at::where(at::isfinite(sizes), sizes, at::zeros({}, sizes.options())).max().item<double>());
  }
  return largest > largest_of(to) ? std::optional(largest) : std::nullopt;  // else they were infinite before
}

void refuse_beyond_range(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor,
                         const std::string& knob, const std::string& way_out) {
  const auto largest = beyond_range(target, sources);
  require(!largest.has_value(), knob, ": ", tensor, " of ", place, " holds ", largest.value_or(0), ", and this format ends at ",
          largest_of(target.scalar_type()), ": it would become infinite; ", way_out);
}

void refuse_beyond_params(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor) {
  if (target.scalar_type() == at::kHalf) {
    refuse_beyond_range(target, sources, place, tensor, "precision.params = fp16", "set precision.params = bf16 or fp32");
  } else {
    refuse_beyond_range(target, sources, place, tensor, "precision.params, precision.master or optim.state_dtype = bf16", "set it to fp32");
  }
}

void refuse_beyond_dtype(const at::Tensor& target, const std::vector<at::Tensor>& sources, const std::string& place, const std::string& tensor) {
  if (target.scalar_type() == at::kHalf) {
    refuse_beyond_range(target, sources, place, tensor, "--dtype fp16", "convert with --dtype bf16 or fp32");
  } else {
    refuse_beyond_range(target, sources, place, tensor, "--dtype bf16", "convert with --dtype fp32");
  }
}

}  // namespace tessera::checkpoint
