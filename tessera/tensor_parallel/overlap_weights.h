#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/group.h"
#include "tessera/kernels/products.h"
#include "tessera/layout/slice.h"
#include "tessera/tensor_parallel/overlap_ring.h"

/// Weights' gradients of overlapped products, made in backward or later. Not part of the public surface.
namespace tessera::tensor_parallel {

/// [..., F] as [rows, F].
inline at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

/// The gradient of a weight as it grows by parts: sums are made in fp32 where the parts are narrower.
class WeightGradient {
 public:
  void add(const at::Tensor& dy, const at::Tensor& x) {
    const bool widened = kernels::is_widened(x);
    const at::Tensor left = rows_of(widened ? dy.to(at::kFloat) : dy).t(), right = rows_of(widened ? x.to(at::kFloat) : x);
    if (!sum_.defined()) {
      sum_ = wide(at::mm(left, right));
    } else if (left.scalar_type() == sum_.scalar_type()) {
      at::addmm_out(sum_, sum_, left, right);
    } else {
      sum_.add_(at::mm(left, right));
    }
  }
  at::Tensor take(at::ScalarType dtype) { return std::exchange(sum_, at::Tensor()).to(dtype); }

 private:
  static at::Tensor wide(const at::Tensor& tensor) { return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor; }

  at::Tensor sum_;
};

/// What the gradients of one node's weights are made of, where they are left for later: made together, when the first is asked for, and each taken once.
class LeftWeights {
 public:
  using Compute = std::function<void(std::vector<WeightGradient>& sums)>;

  LeftWeights(size_t count, Compute compute) : sums_(count), compute_(std::move(compute)) {}

  at::Tensor take(size_t i, at::ScalarType dtype) {
    if (compute_) std::exchange(compute_, nullptr)(sums_);
    return sums_[i].take(dtype);
  }

 private:
  std::vector<WeightGradient> sums_;
  Compute compute_;
};

/// The whole x as a column-wise layer multiplied it, part by part in the order of a backward pass that computes the weights' gradients itself.
struct GatheredParts {
  comm::Group group;
  bool sequence, whole_kept;
  int64_t positions;
  std::string site;

  template <class Visit>
  void visit(const at::Tensor& x, const Visit& visit) const {
    if (!sequence) return visit(0, x);
    const comm::CallSite here(site);
    if (!whole_kept) {
      for (GatherRing ring(group, x.contiguous(), positions); !ring.done(); ring.advance()) visit(ring.begin(), ring.part());
      return;
    }
    for (int step = 0; step < group.size(); ++step) {
      const auto [first, size] = chunk(positions, group.size(), step);
      visit(first, x.narrow(1, first, size));
    }
  }
};

}  // namespace tessera::tensor_parallel
