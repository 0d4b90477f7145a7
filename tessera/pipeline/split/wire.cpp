#include "tessera/pipeline/split/wire.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <ATen/ops/empty_strided.h>

namespace tessera::tape {

namespace {

bool is_expanded(const Form& form, int64_t dim) {
  const auto d = static_cast<size_t>(dim);
  return form.strides[d] == 0 && form.sizes[d] > 1;
}

int64_t wire_size(const Form& form, int64_t dim) { return is_expanded(form, dim) ? 1 : form.sizes[static_cast<size_t>(dim)]; }

std::vector<int64_t> dims_of(const Form& form) {
  std::vector<int64_t> dims(form.sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

/// Dimensions as they lie in memory, the slowest first; nothing where memory has gaps.
std::optional<std::vector<int64_t>> dense_order(const Form& form) {
  std::vector<int64_t> by_stride = dims_of(form);
  std::ranges::stable_sort(by_stride, std::ranges::greater(), [&](int64_t dim) { return form.strides[static_cast<size_t>(dim)]; });
  int64_t stride = 1;
  for (size_t i = by_stride.size(); i-- > 0;) {
    const int64_t size = wire_size(form, by_stride[i]);
    if (size == 1) continue;
    if (form.strides[static_cast<size_t>(by_stride[i])] != stride) return std::nullopt;
    stride *= size;
  }
  return by_stride;
}

std::vector<int64_t> order_of(const Form& form) { return dense_order(form).value_or(dims_of(form)); }

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

at::Tensor from_wire(const at::Tensor& wire, const Form& form, bool with_gaps) {
  const auto dense = dense_order(form);
  const std::vector<int64_t> order = dense.value_or(dims_of(form));
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  at::Tensor tensor = wire.permute(back);
  if (with_gaps && !dense && tensor.strides() != at::IntArrayRef(form.strides)) {
    tensor = at::empty_strided(tensor.sizes(), form.strides, tensor.options().requires_grad(false)).copy_(tensor);
  }
  return tensor.expand(form.sizes);
}

bool fits_wire(const at::Tensor& tensor, const Form& form) {
  bool fits = true;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) fits &= !is_expanded(form, dim) || tensor.stride(dim) == 0;
  return fits;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const Form form = form_of(tensor);
  return tensor.is_non_overlapping_and_dense() ? tensor.clone() : from_wire(to_wire(tensor, form).clone(at::MemoryFormat::Contiguous), form);
}

}  // namespace tessera::tape
