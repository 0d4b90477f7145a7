#include "tessera/tensor_parallel/shared_gradients.h"

#include <functional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera::tensor_parallel {
namespace {

constexpr const char* kSite = "tensor_parallel.shared";

/// The runs of a slice's local tensor, row-major: visit(first element of the logical tensor, first of the local one, how many).
void for_each_place(const Slice& slice, const std::function<void(int64_t logical, int64_t local, int64_t count)>& visit) {
  invariant(slice.concat_dim() <= 0, "the parts of '", slice.name, "' lie side by side");
  int64_t local = 0;
  for (const Box& box : slice.boxes) {
    for_each_run(slice.shape, box, [&](int64_t first, int64_t count) {
      visit(first, local, count);
      local += count;
    });
  }
}

}  // namespace

void sum_aligned(const comm::Group& group, const SharedParameters& shared, const std::vector<nn::NamedParameter>& updated) {
  struct Place {
    at::Tensor gradient;
    int64_t offset;
  };
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::pair<int64_t, std::vector<Place>>> dtypes;  // elements, and where this rank's terms go
  for (const auto& [name, tensor, aliases] : updated) {
    const auto found = shared.find(name);
    if (found == shared.end() || !tensor.grad().defined()) continue;
    const Holders& holders = found->second;
    auto& [size, places] = dtypes[tensor.grad().scalar_type()];
    // Those who hold other elements use other places, and zeros here.
    const int64_t numel = tensor.grad().numel();
    places.push_back({tensor.grad(), size + numel * holders.set});
    size += numel * holders.sets;
  }
  const comm::CallSite site(kSite);
  for (const auto& [dtype, layout] : dtypes) {
    const auto& [size, places] = layout;
    const at::Tensor flat = at::zeros({size}, places.front().gradient.options());
    for (const Place& place : places) flat.narrow(0, place.offset, place.gradient.numel()).copy_(place.gradient.reshape({-1}));
    comm::all_reduce(group, flat);
    for (const Place& place : places) place.gradient.copy_(flat.narrow(0, place.offset, place.gradient.numel()).view(place.gradient.sizes()));
  }
}

void sum_by_place(const comm::Group& everyone, const SharedParameters& shared, const std::vector<nn::NamedParameter>& updated) {
  const at::NoGradGuard no_grad;
  // All ranks have to agree on the buffer, those included that hold nothing of a parameter.
  std::map<std::string, int64_t> begins;
  int64_t size = 0;
  for (const auto& [name, holders] : shared) {
    begins[name] = size;
    size += c10::multiply_integers(holders.shape);
  }
  if (size == 0) return;
  const auto gradients_of_shared = [&](const auto& visit) {
    for (const auto& [name, tensor, aliases] : updated) {
      const auto begin = begins.find(name);
      if (begin != begins.end() && tensor.grad().defined()) visit(tensor, begin->second);
    }
  };
  const bool wide = !updated.empty() && updated.front().tensor.scalar_type() == at::kDouble;
  const at::Device device = updated.empty() ? at::Device(at::kCPU) : updated.front().tensor.device();
  const at::Tensor all = at::zeros({size}, at::TensorOptions(device).dtype(wide ? at::kDouble : at::kFloat));
  gradients_of_shared([&](const at::Tensor& parameter, int64_t begin) {
    const at::Tensor terms = parameter.grad().reshape({-1});
    for_each_place(nn::slice_of(parameter),
                   [&](int64_t logical, int64_t local, int64_t count) { all.narrow(0, begin + logical, count).copy_(terms.narrow(0, local, count)); });
  });
  {
    const comm::CallSite site(kSite);
    comm::all_reduce(everyone, all);
  }
  gradients_of_shared([&](const at::Tensor& parameter, int64_t begin) {
    const at::Tensor sum = at::empty({parameter.grad().numel()}, parameter.grad().options());
    for_each_place(nn::slice_of(parameter),
                   [&](int64_t logical, int64_t local, int64_t count) { sum.narrow(0, local, count).copy_(all.narrow(0, begin + logical, count)); });
    parameter.mutable_grad().copy_(sum.view(parameter.grad().sizes()));
  });
}

}  // namespace tessera::tensor_parallel
