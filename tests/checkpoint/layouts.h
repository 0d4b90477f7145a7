#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/testing.h"

/// A model of tensors alone, in several layouts.
namespace tessera::checkpoint {

/// A whole model's tensors: every element differs from every other.
inline const std::map<std::string, at::Tensor>& logical_tensors() {
  static const auto tensors = [] {
    std::map<std::string, at::Tensor> all;
    float first = 1;
    for (const auto& [name, shape] : std::map<std::string, std::vector<int64_t>>{
             {"big", {17, 6}}, {"bias", {5}}, {"scalar", {}}, {"empty", {0, 3}}, {"one", {1}}, {"cube", {4, 3, 2}}, {"long row", {1, 40}}}) {
      const auto numel = Box::whole(shape).numel();
      all[name] = at::arange(numel, at::kFloat).add(first).view(shape);
      first += static_cast<float>(numel);
    }
    all["half"] = at::arange(9).to(at::kBFloat16).view({3, 3});
    return all;
  }();
  return tensors;
}

enum class Layout { Replicated, Rows, Columns, ZigZag };

/// What `rank` of `ranks` holds of one tensor.
inline Slice slice_in(Layout layout, const std::string& name, const std::vector<int64_t>& shape, int ranks, int rank) {
  if (layout == Layout::Replicated || shape.empty()) return Slice::whole(name, shape);
  if (layout == Layout::ZigZag) {  // the rank's chunk from the front and its mirror image from the back
    Slice slice{name, shape, {}};
    for (const int part : {rank, 2 * ranks - 1 - rank}) {
      const auto [begin, size] = chunk(shape[0], 2 * ranks, part);
      if (size > 0) slice.boxes.push_back(Slice::along(name, shape, 0, begin, size).boxes.at(0));
    }
    return slice;
  }
  const int64_t dim = layout == Layout::Rows ? 0 : static_cast<int64_t>(shape.size()) - 1;
  const auto [begin, size] = chunk(shape[dim], ranks, rank);
  return Slice::along(name, shape, dim, begin, size);
}

inline std::vector<SlicedTensor> local_tensors(Layout layout, int ranks, int rank, bool fill) {
  std::vector<SlicedTensor> local;
  for (const auto& [name, whole] : logical_tensors()) {
    const auto slice = slice_in(layout, name, whole.sizes().vec(), ranks, rank);
    const auto values = take(whole, slice).reshape(slice.local_shape()).clone();
    local.push_back({fill ? values : at::full_like(values, -1), slice});
  }
  return local;
}

inline CheckpointState state_of(Layout layout, int ranks, int rank, int64_t step = 10) {
  return {.step = step,
          .tensors = local_tensors(layout, ranks, rank, true),
          .optimizer = {{"kind", "adamw"}},
          .progress = {{"cursor", 42}, {"lr", 0.1}},
          .agreement = {{"model.dim", 8}}};
}

inline std::filesystem::path save_with(Layout layout, int ranks, const std::filesystem::path& dir, int64_t step = 10) {
  std::filesystem::path folder;
  comm::run_ranks(ranks, [&](comm::World& world) {
    const auto made = save(dir, state_of(layout, ranks, world.rank(), step), world.group());
    if (world.rank() == 0) folder = made;
  });
  return folder;
}

inline void expect_loads(const std::filesystem::path& folder, Layout layout, int ranks) {
  const Manifest manifest = read_manifest(folder);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto targets = local_tensors(layout, ranks, rank, false), expected = local_tensors(layout, ranks, rank, true);
    load(folder, manifest, targets);
    for (size_t i = 0; i < targets.size(); ++i) EXPECT_TRUE(at::equal(targets[i].tensor, expected[i].tensor)) << targets[i].slice.name << " on rank " << rank;
  }
}

}  // namespace tessera::checkpoint
