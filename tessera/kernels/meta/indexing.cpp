#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  const at::Tensor contiguous = index.contiguous();
  std::vector<int64_t> shape = self.sizes().vec();
  if (!shape.empty()) shape[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  return at::empty(shape, self.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& indices, c10::SymInt num_weights, c10::SymInt, bool) {
  const at::Tensor contiguous_indices = indices.contiguous(), contiguous_grad = grad.contiguous();
  return at::empty({num_weights.expect_int(), grad.size(-1)}, grad.options());
}

at::Tensor flip(const at::Tensor& self, at::IntArrayRef) { return at::empty_like(self); }

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const at::ScalarType type = at::result_type(self, other);
  const at::Tensor yes = self.to(type), no = other.to(type);
  auto iterator = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .declare_static_dtype(type)
                      .add_owned_output(at::Tensor())
                      .add_owned_const_input(condition)
                      .add_owned_const_input(yes)
                      .add_owned_const_input(no)
                      .build();
  return iterator.output();
}

at::Tensor multinomial(const at::Tensor& self, int64_t num_samples, bool, std::optional<at::Generator>) {
  std::vector<int64_t> shape = self.sizes().vec();
  shape.back() = num_samples;
  return at::empty(shape, self.options().dtype(at::kLong));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  implement(m, "index_select", index_select);
  implement(m, "embedding_dense_backward", embedding_dense_backward);
  implement(m, "flip", flip);
  implement(m, "where.self", where);
  implement(m, "multinomial", multinomial);
}

}  // namespace tessera::kernels::meta
