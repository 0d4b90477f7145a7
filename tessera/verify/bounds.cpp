#include "tessera/verify/bounds.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/error.h"
#include "tessera/precision/policy.h"

namespace tessera {

namespace {

constexpr double kLosses = 5e-6;     // design bound of fp32, relative
constexpr double kGradients = 1e-5;  // of a tensor's largest entry
constexpr double kPerOutput = 8;     // roundings of u that the products and sums of one module amount to

double roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return tessera::roundoff("bf16");
    case at::kHalf:
      return tessera::roundoff("fp16");
    default:
      return tessera::roundoff("fp32");
  }
}

}  // namespace

double roundoff(const std::string& format) {
  if (format == "fp32") return std::ldexp(1, -24);
  if (format == "fp16" || format == "tf32") return std::ldexp(1, -11);
  if (format == "bf16") return std::ldexp(1, -8);
  invariant(format == "fp8", "no roundoff is known of the number format ", format);
  return std::ldexp(1, -4);  // e4m3
}

double VerifyBounds::output(at::ScalarType dtype, int64_t depth) const {
  if (bit_for_bit) return 0;
  return kPerOutput * std::max(output_roundoff, roundoff(dtype)) * std::sqrt(1.0 + static_cast<double>(depth));
}

VerifyBounds bounds_of(const Config& layout, int world, int data_ranks, int column_ranks) {
  const auto& precision = layout.precision;
  const double fp32 = roundoff("fp32");
  const double weights = roundoff(precision.params), compute = roundoff(precision.compute);
  const bool narrow_sums = weights > fp32 && !precision::policy_from(precision).gradient_dtype();
  const auto& wire = layout.comm.compression == "none" ? precision.reduce : layout.comm.compression;
  // Of each gradient's sum: sharded experts lie on the ranks of tensor parallelism, too, each with a term of its own tokens.
  const int shared = layout.model.experts > 0 && layout.zero.stage > 0 ? layout.mesh.tp : 1, parts = layout.mesh.ep * layout.mesh.expert_tp;
  const int terms = std::max(data_ranks * column_ranks, data_ranks * column_ranks * shared / parts);
  const double crossing = terms > 1 ? roundoff(wire) : fp32;
  const bool experts = layout.mesh.ep > 1 || layout.mesh.expert_tp > 1;
  const bool tiles = layout.recompute.ffn_tile > 0 && !layout.run.deterministic;                   // which one device has only under run.deterministic
  const double split = world > data_ranks || layout.mesh.expert_tp > 1 || tiles ? compute : fp32;  // products are split inside a micro-batch
  const double joined = experts ? compute : fp32;                                                  // an expert's gradient is one product of several ranks' rows
  // One scale of a tensor, which holds rows of several ranks: with one of each row experts compute the very bits of one device.
  const bool scaled_together = experts && precision.compute == "fp8" && precision.fp8_scales == "tensor";
  const auto above = [&](double u, double bound) { return u > fp32 ? bound : 0; };

  // Of experts: their width, or what a tile has of their rows.
  const bool cut = layout.mesh.expert_tp > 1 || (experts && layout.recompute.ffn_tile > 0);

  VerifyBounds bounds;
  bounds.bit_for_bit = (world == 1 && !tiles) || (layout.run.deterministic && world == data_ranks && !cut && crossing == fp32);
  bounds.output_roundoff = compute;
  if (bounds.bit_for_bit) return bounds;
  const auto micro_batches = static_cast<double>(layout.batch.global_size / layout.batch.micro_size);
  bounds.losses = std::max({kLosses, above(split, split), scaled_together ? compute : 0});
  bounds.gradients = std::max({kGradients, above(crossing, (terms + 1) * crossing), narrow_sums ? (micro_batches + 1) * weights : 0, above(split, 8 * split),
                               above(joined, 2 * joined)});
  bounds.routing = std::min(32 * compute, 0.5);
  bounds.routing_share = compute;
  if (terms > 1 && wire == "fp16") {
    const bool each = layout.zero.stage >= 2 && layout.zero.accumulate == "sharded";  // micro-batch is reduced by itself
    const double crossings = each ? std::ceil(micro_batches / data_ranks) : 1;
    bounds.gradient_floor = std::ldexp(crossings * terms * terms, -24);
  }
  bounds.gradient_norms = kLosses;  // of the same gradients
  bounds.weights = std::max(kGradients, above(weights, 2 * weights));
  return bounds;
}

}  // namespace tessera
