#include "tessera/precision/gradient_dtype.h"

#include <optional>

// What a leaf says of its grad_dtype the engine brings every contribution into, before it adds contributions up; without a type each is left as it came. A sum
// of two types would be made in memory of its own, which differs between devices: so what is summed in grad() has one.

namespace tessera::precision {

void take_gradients_in(at::ScalarType dtype, const std::vector<nn::NamedParameter>& parameters, AddedUp added_up) {
  for (const auto& [name, tensor, aliases] : parameters) {
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype) continue;
    const bool as_it_comes = added_up == AddedUp::Elsewhere && aliases.empty();
    tensor.set_grad_dtype(as_it_comes ? std::nullopt : std::optional(dtype));
  }
}

}  // namespace tessera::precision
