#include "tessera/nn/contrastive_loss.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/differentiable.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {

namespace {

at::Tensor normalized(const at::Tensor& x) {
  constexpr double kShortest = 1e-12;  // a row of zeros has no direction, and stays
  const at::Tensor wide = x.to(wide_type(x));
  return wide / at::linalg_vector_norm(wide, 2, at::IntArrayRef{-1}, /*keepdim=*/true).clamp_min(kShortest);
}

int64_t pairs_of_all(const comm::Group& group, const at::Tensor& a) {
  if (group.size() == 1) return a.size(0);
  const at::Tensor pairs = at::full({1}, a.size(0), a.options().dtype(at::kLong).requires_grad(false));
  comm::all_reduce(group, pairs);
  return static_cast<int64_t>(host_read(pairs, static_cast<double>(a.size(0) * group.size())));
}

}  // namespace

at::Tensor contrastive_loss_sum(const comm::Group& group, const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale, int64_t total) {
  require(a.dim() == 2 && a.sizes() == b.sizes(), "contrastive loss: a ", a.sizes(), " and b ", b.sizes(), " must be [pairs, features] of one shape");
  require(scale.numel() == 1, "contrastive loss: scale must be one number, not a tensor of shape ", scale.sizes());
  if (total < 0) total = pairs_of_all(group, a);
  const auto [first, pairs] = chunk(total, group.size(), group.rank());
  require(a.size(0) == pairs, "contrastive loss: rank ", group.rank(), " of ", group.name(), " holds ", a.size(0), " of ", total, " pairs, and is dealt ",
          pairs, "; deal them by tessera::chunk");

  const at::Tensor own = at::cat({normalized(a), normalized(b)}, /*dim=*/1);
  const at::Tensor all = comm::differentiable::all_gather(group, own, /*dim=*/0, total);
  const auto halves = all.chunk(2, 1), mine = own.chunk(2, 1);
  const at::Tensor partner = at::arange(first, first + pairs, a.options().dtype(at::kLong).requires_grad(false));
  const auto entropy = [&](const at::Tensor& from, const at::Tensor& among) {
    return at::cross_entropy_loss(at::matmul(from, among.t()) * scale, partner, /*weight=*/{}, at::Reduction::Sum);
  };
  return (entropy(mine[0], halves[1]) + entropy(mine[1], halves[0])) * 0.5;
}

}  // namespace tessera::nn
