#include "tessera/nn/given_parts.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include "tessera/core/hash.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"

namespace tessera::nn {

int64_t bits_given(const std::vector<at::Tensor>& parts) {
  if (std::ranges::none_of(parts, [](const at::Tensor& part) { return was_given(part) && !part.is_meta(); })) return 0;
  const at::NoGradGuard no_grad;
  const NotRepeated looking;
  std::vector<int64_t> told;
  bool varies = false;
  for (const at::Tensor& part : parts) {
    const at::Tensor values = in_use(part).detach().to(at::kCPU).contiguous();
    const bool is_constant = values.numel() == 0 || !values.ne(values.flatten()[0]).any().item<bool>();
    if (!is_constant && !was_given(part)) return 0;
    varies = varies || !is_constant;
    told.push_back(is_constant ? 0 : static_cast<int64_t>(hash_of_values(values)));
  }
  return varies ? told_together(told) : 0;
}

int64_t told_together(const std::vector<int64_t>& told) {
  constexpr int exact = 11;  // bits of a hash that a double has no room for
  return static_cast<int64_t>(hash_bytes(told.data(), told.size() * sizeof(int64_t)) >> exact) | 1;
}

bool were_given_alike(const std::vector<int64_t>& told) {
  return told.front() != 0 && std::ranges::all_of(told, [&](int64_t each) { return each == told.front(); });
}

}  // namespace tessera::nn
