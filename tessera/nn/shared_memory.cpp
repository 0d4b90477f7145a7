#include "tessera/nn/shared_memory.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

/// A tensor in its storage.
struct Place {
  std::string name;
  at::Tensor tensor;
  bool is_buffer;
  const void* storage;
  int64_t begin, end;  ///< bytes, with the gaps between its elements
};

void add_place(std::vector<Place>& places, const std::string& name, const at::Tensor& tensor, bool is_buffer) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto width = static_cast<int64_t>(tensor.element_size());
  places.push_back({.name = name,
                    .tensor = tensor,
                    .is_buffer = is_buffer,
                    .storage = tensor.storage().unsafeGetStorageImpl(),
                    .begin = tensor.storage_offset() * width,
                    .end = (tensor.storage_offset() + last + 1) * width});
}

/// Of two whose extents overlap: one may lie in the gaps of the other, as columns of a table do.
bool share_elements(const Place& one, const Place& other) {
  if (one.tensor.element_size() != other.tensor.element_size()) return true;
  const auto width = static_cast<int64_t>(one.tensor.element_size());
  const int64_t first = std::min(one.begin, other.begin) / width;
  const at::Tensor marks = at::zeros({std::max(one.end, other.end) / width - first}, at::device(at::kCPU).dtype(at::kBool));
  const auto of = [&](const at::Tensor& tensor) { return marks.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() - first); };
  of(one.tensor).fill_(true);
  return of(other.tensor).any().item<bool>();
}

[[noreturn]] void refuse(const std::string& technique, const Place& one, const Place& other) {
  if (one.is_buffer) refuse(technique, other, one);
  throw ConfigError(tessera::detail::concat(
      technique, other.is_buffer ? ": parameter '" : ": parameters '", one.name, other.is_buffer ? "' and buffer '" : "' and '", other.name,
      "' share memory, and would not any more once parameters lie in memory that is sharded; ",
      other.is_buffer ? "give the buffer its own (clone), or use the parameter in its place" : "give each its own (clone), or register one tensor twice"));
}

}  // namespace

void refuse_shared_memory(const std::string& technique, const torch::nn::Module& module, const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<Place> places;
  for (const auto& [name, tensor, aliases] : parameters) add_place(places, name, tensor, /*is_buffer=*/false);
  for (const auto& buffer : module.named_buffers()) add_place(places, buffer.key(), buffer.value(), /*is_buffer=*/true);
  std::ranges::stable_sort(places, {}, [](const Place& place) { return std::tuple(place.storage, place.begin); });
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = i + 1; j < places.size() && places[j].storage == places[i].storage && places[j].begin < places[i].end; ++j) {
      const bool moves = !places[i].is_buffer || !places[j].is_buffer;
      if (moves && share_elements(places[i], places[j])) refuse(technique, places[i], places[j]);
    }
  }
}

}  // namespace tessera::nn
