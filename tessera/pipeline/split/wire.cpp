#include "tessera/pipeline/split/wire.h"

#include <algorithm>
#include <numeric>

namespace tessera::tape {

namespace {

bool is_expanded(const Form& form, int64_t dim) {
  const auto d = static_cast<size_t>(dim);
  return form.strides[d] == 0 && form.sizes[d] > 1;
}

int64_t wire_size(const Form& form, int64_t dim) { return is_expanded(form, dim) ? 1 : form.sizes[static_cast<size_t>(dim)]; }

/// Dimensions as they lie in memory, the slowest first; as they are where memory has gaps.
std::vector<int64_t> order_of(const Form& form) {
  std::vector<int64_t> order(form.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<int64_t> by_stride = order;
  std::ranges::stable_sort(by_stride, std::ranges::greater(), [&](int64_t dim) { return form.strides[static_cast<size_t>(dim)]; });
  int64_t stride = 1;
  for (size_t i = by_stride.size(); i-- > 0;) {
    const int64_t size = wire_size(form, by_stride[i]);
    if (size == 1) continue;
    if (form.strides[static_cast<size_t>(by_stride[i])] != stride) return order;
    stride *= size;
  }
  return by_stride;
}

}  // namespace

pipeline::TensorSpec wire_spec(const Form& form) {
  pipeline::TensorSpec spec{.sizes = {}, .dtype = form.dtype};
  for (const int64_t dim : order_of(form)) spec.sizes.push_back(wire_size(form, dim));
  return spec;
}

at::Tensor to_wire(const at::Tensor& tensor, const Form& form) {
  at::Tensor wire = tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (is_expanded(form, dim)) wire = wire.narrow(dim, 0, 1);
  }
  return wire.permute(order_of(form));
}

at::Tensor from_wire(const at::Tensor& wire, const Form& form) {
  const std::vector<int64_t> order = order_of(form);
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return wire.permute(back).expand(form.sizes);
}

}  // namespace tessera::tape
