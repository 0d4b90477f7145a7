#include "tessera/checkpoint/deal.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

// What data-parallel ranks hold alike only one needs to write, and if that were always the first, one disk would work and the others wait. The largest parts
// are dealt first, each to the holder with least so far: what comes later is small enough to even out. Who writes follows from what all hold, with ties by
// rank, so it is computed everywhere and sent nowhere.

namespace tessera::checkpoint {
namespace {

/// One part of one tensor and all who hold it: (rank, index in that rank's list).
struct Part {
  const HeldSlice* slice = nullptr;
  std::vector<std::pair<int, size_t>> holders;
};

void check_whole(const std::vector<Part>& parts) {
  std::map<std::string, std::vector<const HeldSlice*>> tensors;
  for (const auto& part : parts) tensors[part.slice->slice.name].push_back(part.slice);
  for (const auto& [name, slices] : tensors) {
    std::vector<Slice> sources;
    for (const HeldSlice* slice : slices) {
      invariant(slice->slice.shape == slices.front()->slice.shape && slice->dtype == slices.front()->dtype, "ranks hold '", name,
                "' in different shapes or dtypes");
      sources.push_back(slice->slice);
    }
    try {
      reshard(sources, Slice::whole(name, sources.front().shape));
    } catch (const ConfigError& error) {
      throw InternalError(detail::concat("the ranks' slices do not make up a whole tensor: ", error.what()));
    }
  }
}

}  // namespace

std::vector<std::vector<size_t>> deal(const std::vector<std::vector<HeldSlice>>& held) {
  std::map<std::pair<std::string, std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>>>, Part> by_place;
  for (int rank = 0; rank < static_cast<int>(held.size()); ++rank) {
    for (size_t i = 0; i < held[rank].size(); ++i) {
      const HeldSlice& slice = held[rank][i];
      std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> boxes;
      for (const auto& box : slice.slice.boxes) boxes.emplace_back(box.offset, box.size);
      Part& part = by_place[{slice.slice.name, std::move(boxes)}];
      invariant(part.slice == nullptr || (part.slice->slice.shape == slice.slice.shape && part.slice->dtype == slice.dtype), "ranks hold '", slice.slice.name,
                "' in different shapes or dtypes");
      invariant(part.holders.empty() || part.holders.back().first != rank, "rank ", rank, " holds the same part of '", slice.slice.name, "' twice");
      part.slice = &slice;
      part.holders.emplace_back(rank, i);
    }
  }
  std::vector<Part> parts;
  for (auto& [place, part] : by_place) parts.push_back(std::move(part));
  check_whole(parts);

  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.slice->bytes > b.slice->bytes; });
  std::vector<int64_t> load(held.size(), 0);
  std::vector<std::vector<size_t>> written(held.size());
  for (const auto& part : parts) {
    if (part.slice->slice.numel() == 0) continue;
    // Buffers may differ between ranks: dealt like parameters, a mean and its variance could come from two of them.
    const bool buffer = part.slice->slice.name.starts_with("buffer.");
    const auto [rank, index] =
        buffer ? part.holders.front()
               : *std::min_element(part.holders.begin(), part.holders.end(), [&](const auto& a, const auto& b) { return load[a.first] < load[b.first]; });
    load[rank] += part.slice->bytes;
    written[rank].push_back(index);
  }
  for (auto& indices : written) std::sort(indices.begin(), indices.end());
  return written;
}

}  // namespace tessera::checkpoint
