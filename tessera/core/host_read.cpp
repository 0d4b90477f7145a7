#include "tessera/core/host_read.h"

#include <ATen/ops/item.h>

#include "tessera/core/error.h"

namespace tessera {

namespace {

constinit thread_local int64_t reads = 0;

}  // namespace

double host_read(const at::Tensor& scalar, double dry_answer) {
  invariant(scalar.defined() && scalar.numel() == 1, "host_read expects a tensor of one element");
  ++reads;
  return scalar.is_meta() ? dry_answer : scalar.item().toDouble();
}

std::vector<double> host_read_all(const at::Tensor& tensor, double dry_answer) {
  invariant(tensor.defined(), "host_read_all expects a tensor");
  ++reads;
  if (tensor.is_meta()) return std::vector<double>(static_cast<size_t>(tensor.numel()), dry_answer);
  const at::Tensor host = tensor.to(at::kCPU, at::kDouble).contiguous();
  const double* data = host.const_data_ptr<double>();
  return {data, data + host.numel()};
}

int64_t num_host_reads() { return reads; }

}  // namespace tessera
