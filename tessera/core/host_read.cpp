#include "tessera/core/host_read.h"

#include <ATen/ops/item.h>

#include "tessera/core/error.h"
#include "tessera/core/events.h"

namespace tessera {
namespace {

void say_that_it_is_read(const at::Tensor& tensor) {
  if (EventStream* const listener = EventStream::current()) listener->add({.what = HostReadEvent{.bytes = static_cast<int64_t>(tensor.nbytes())}});
}

}  // namespace

double host_read(const at::Tensor& scalar, double dry_answer) {
  invariant(scalar.defined() && scalar.numel() == 1, "host_read expects a tensor of one element");
  say_that_it_is_read(scalar);
  return scalar.is_meta() ? dry_answer : scalar.item().toDouble();
}

std::vector<double> host_read_all(const at::Tensor& tensor, double dry_answer) {
  invariant(tensor.defined(), "host_read_all expects a tensor");
  say_that_it_is_read(tensor);
  if (tensor.is_meta()) return std::vector<double>(static_cast<size_t>(tensor.numel()), dry_answer);
  const at::Tensor host = tensor.to(at::kCPU, at::kDouble).contiguous();
  const double* data = host.const_data_ptr<double>();
  return {data, data + host.numel()};
}

}  // namespace tessera
