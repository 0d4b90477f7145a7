#include "tessera/comm/backends/carried.h"

#include <algorithm>
#include <array>

#include <ATen/ops/view_as_real.h>

namespace tessera::comm {

bool is_carried(at::ScalarType dtype) {
  constexpr std::array kKnown{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kBool, at::kInt, at::kLong};
  return std::ranges::find(kKnown, dtype) != kKnown.end();
}

at::Tensor as_carried(const at::Tensor& tensor) {
  if (is_carried(tensor.scalar_type())) return tensor;
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    case 4:
      return tensor.view(at::kInt);
    case 8:
      return tensor.view(at::kLong);
    default:
      return at::view_as_real(tensor);
  }
}

Call carried_by_nccl(const Call& call) {
  if (call.reduction && !(call.reduction == Op::Sum && call.tensor().is_complex())) return call;
  const auto carried = [&](const at::Tensor& tensor) { return call.reduction ? at::view_as_real(tensor) : as_carried(tensor); };
  Call handed = call;
  for (at::Tensor& input : handed.inputs) input = carried(input);
  for (at::Tensor& output : handed.outputs) {  // one that is its own input stays that: engines ask
    const auto own = std::ranges::find_if(call.inputs, [&](const at::Tensor& input) { return input.is_same(output); });
    output = own == call.inputs.end() ? carried(output) : handed.inputs[static_cast<size_t>(own - call.inputs.begin())];
  }
  return handed;
}

}  // namespace tessera::comm
