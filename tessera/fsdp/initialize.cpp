#include "tessera/fsdp/initialize.h"

#include <ATen/ops/eq.h>
#include <ATen/ops/sum.h>

#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/module.h"

// The program's own initialization wants whole parameters, and the whole model need not fit: one unit at a time is whole, is filled, and is cut again. Whether
// `init` wrote everything cannot be seen from the module; so the memory begins as a pattern that no computation makes, and what still has it was not written.
// Memory that happened to hold zeros would pass for an initialization.

namespace tessera {
namespace {

/// An integer of the element's size whose bits no initialization writes by itself: a NaN with a payload of its own in every floating-point type. Nothing for
/// types of one byte, where every pattern is a value.
struct Unwritten {
  at::ScalarType as;
  int64_t bits;
};

std::optional<Unwritten> unwritten_pattern(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 2:
      return Unwritten{at::kShort, 0x7fa5};
    case 4:
      return Unwritten{at::kInt, 0x7fa5a5a5};
    case 8:
      return Unwritten{at::kLong, 0x7ffa5a5a5a5a5a5a};
    default:
      return std::nullopt;
  }
}

int64_t unwritten_elements(const at::Tensor& tensor) {
  const auto pattern = unwritten_pattern(tensor.scalar_type());
  return pattern ? tensor.view(pattern->as).eq(pattern->bits).sum().item<int64_t>() : 0;
}

void check_written(const FlatParameters& flat, const std::vector<at::Tensor>& before) {
  for (size_t i = 0; i < before.size(); ++i) {
    const auto& [name, tensor, aliases] = flat.parameters()[i];
    require(tensor.sizes() == before[i].sizes(), "fully_shard: init changed the shape of '", name, "' from ", before[i].sizes(), " to ", tensor.sizes(),
            "; it has to fill the parameter that is there (fill_, copy_, normal_)");
    require(tensor.storage().data() == before[i].storage().data() && tensor.storage_offset() == before[i].storage_offset(),
            "fully_shard: init put another tensor in place of '", name, "'; it has to fill the parameter that is there (fill_, copy_, normal_)");
    const int64_t left = unwritten_elements(tensor.detach());
    require(
        left == 0, "fully_shard: init left ", left, " of ", tensor.numel(), " elements of '", name,
        "' untouched; it has to write every parameter that the module it is called for owns, or give the parameter a rule (nn::set_init) and call materialize");
  }
}

}  // namespace

void give_memory(torch::nn::Module& root, at::Device device) {
  for (const auto& parameter : nn::unique_parameters(root)) {
    if (parameter.tensor.is_meta() && !nn::keeps_memory(parameter.tensor)) nn::materialize_storage(parameter.tensor, device);
  }
  nn::materialize_buffers(root, /*seed=*/0, device);
}

void initialize_units(torch::nn::Module& root, const UnitPlan& plan, ShardedUnits& units, const FullyShardOptions& options) {
  const at::NoGradGuard no_grad;
  give_memory(root, options.device);
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (units.flats(unit).front().parameters().front().tensor.is_meta()) continue;
    units.show_whole(unit);
    std::vector<std::vector<at::Tensor>> before;
    for (auto& flat : units.flats(unit)) {
      flat.allocate();
      before.emplace_back();
      for (const auto& parameter : flat.parameters()) {
        before.back().push_back(parameter.tensor.detach());
        if (const auto pattern = unwritten_pattern(parameter.tensor.scalar_type())) before.back().back().view(pattern->as).fill_(pattern->bits);
      }
    }
    for (const auto& holder : plan.holders) {
      if (holder.unit == unit) options.init(*holder.module, holder.path);
    }
    for (size_t i = 0; i < before.size(); ++i) {
      FlatParameters& flat = units.flats(unit)[i];
      check_written(flat, before[i]);
      flat.keep_slices();
      flat.release();
    }
    units.show_slices(unit);
  }
}

}  // namespace tessera
