#include "tessera/nn/given_parts.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"

namespace tessera::nn {

namespace {

/// On the host; undefined where they are constant.
at::Tensor varied_values(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const NotRepeated looking;
  at::Tensor values = in_use(part).detach().to(at::kCPU).contiguous();
  return values.numel() == 0 || !values.ne(values.flatten()[0]).any().item<bool>() ? at::Tensor() : values;
}

}  // namespace

int64_t bits_of(const at::Tensor& part) {
  const at::Tensor values = varied_values(part);
  return values.defined() ? static_cast<int64_t>(hash_of_values(values)) : 0;
}

std::optional<int64_t> bits_given(const at::Tensor& part) {
  const at::Tensor values = varied_values(part);
  if (!values.defined()) return 0;
  return was_given(part) ? std::optional(static_cast<int64_t>(hash_of_values(values))) : std::nullopt;
}

int64_t beginnings_of(const std::vector<at::Tensor>& parts) {
  constexpr int64_t kValues = 16;
  const at::NoGradGuard no_grad;
  const NotRepeated looking;
  std::vector<int64_t> bits;
  for (const at::Tensor& part : parts) {
    const at::Tensor values = in_use(part).detach().reshape({-1});
    bits.push_back(bits_of(values.narrow(0, 0, std::min(values.numel(), kValues))));
  }
  return std::max<int64_t>(1, told_together(bits));
}

int64_t told_together(const std::vector<int64_t>& bits) {
  if (std::ranges::all_of(bits, [](int64_t each) { return each == 0; })) return 0;
  return static_cast<int64_t>(hash_bytes(bits.data(), bits.size() * sizeof(int64_t)) >> 1) | 1;  // below zero is nobody's
}

int64_t told_of_given(const std::vector<at::Tensor>& parts) {
  if (std::ranges::none_of(parts, [](const at::Tensor& part) { return was_given(part) && !part.is_meta(); })) return 0;
  std::vector<int64_t> bits;
  for (const at::Tensor& part : parts) {
    const std::optional<int64_t> own = bits_given(part);
    if (!own) return 0;
    bits.push_back(*own);
  }
  return told_together(bits);
}

std::vector<int64_t> tell_ranks(const comm::Group& group, const at::Tensor& parameter, int64_t own) {
  const at::Tensor mine = at::full({1}, own, at::TensorOptions(at::kLong).device(message_device(parameter, group)));
  const at::Tensor all = at::empty({group.size()}, mine.options());
  comm::all_gather(group, all, mine);
  return host_read_integers(all, /*dry_answer=*/0);
}

bool were_given_alike(const std::vector<int64_t>& told) {
  return !told.empty() && told.front() != 0 && std::ranges::all_of(told, [&](int64_t each) { return each == told.front(); });
}

std::string whose_state(at::IntArrayRef state, at::IntArrayRef whole, bool another_ranks, const std::string& wrapper) {
  constexpr const char* kPart =
      "which torch::save of its optimizer wrote (that fits the same rank of as many ranks alone: a file for each rank, or checkpoint::save and "
      "checkpoint::load, which fit any layout)";
  if (state != whole) return tessera::detail::concat("the state of ", another_ranks ? "another rank's part, " : "a part of another layout, ", kPart);
  return tessera::detail::concat("the state of an optimizer that was made, or has stepped, before ", wrapper,
                                 ", and is of whole parameters; make the optimizer behind ", wrapper,
                                 ", and bring the state over by checkpoint::save and checkpoint::load",
                                 another_ranks ? tessera::detail::concat("; or the state of another rank's part, ", kPart) : "");
}

}  // namespace tessera::nn
