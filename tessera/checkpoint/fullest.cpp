#include "tessera/checkpoint/fullest.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {

bool is_stored_as(const Manifest& manifest, const std::string& name, at::ScalarType dtype) {
  const auto stored = manifest.tensors.find(name);
  return stored != manifest.tensors.end() && stored->second.dtype == dtype_name(dtype);
}

std::string weight_of_master(const Manifest& manifest, std::string_view parameter) {
  std::string ahead = detail::concat("optimizer.", optim::kNextState, ".", parameter);
  return manifest.tensors.contains(ahead) ? ahead : detail::concat("model.", parameter);
}

std::string fullest(const Manifest& manifest, const std::string& weight, at::ScalarType dtype) {
  const std::string master = detail::concat("optimizer.master.", parameter_of(weight));
  const bool has_other = weight == weight_of_master(manifest, parameter_of(weight)) && manifest.tensors.contains(master);
  return has_other && !is_stored_as(manifest, weight, dtype) ? master : weight;
}

void fill_fullest(StoredSlices& stored, const Manifest& manifest, at::Tensor target, const Slice& slice, at::ScalarType dtype,
                  const StoredSlices::Narrowed& narrowed, const std::string& place) {
  Slice of_master = slice;
  of_master.name = fullest(manifest, slice.name, dtype);
  const auto weight_entry = manifest.tensors.find(slice.name);
  if (of_master.name == slice.name || weight_entry == manifest.tensors.end()) return stored.fill(std::move(target), of_master);
  require(manifest.tensors.at(of_master.name).shape == slice.shape, place, ": ", of_master.name, " has another shape than ", slice.name,
          "; the checkpoint is damaged, use another");
  const c10::NoGradGuard no_grad;
  const at::Tensor master = at::empty(target.sizes(), at::device(at::kCPU).dtype(at::kFloat));
  const at::Tensor weight = at::empty(target.sizes(), at::device(at::kCPU).dtype(dtype_from_name(weight_entry->second.dtype)));
  stored.fill(master, of_master);
  stored.fill(weight, slice);
  const at::Tensor values = at::where(master.to(weight.scalar_type()).eq(weight), master, weight.to(at::kFloat));
  copy_once(values, target, slice.name);
  narrowed(target, {values}, place, std::string(parameter_of(slice.name)));
}

}  // namespace tessera::checkpoint
