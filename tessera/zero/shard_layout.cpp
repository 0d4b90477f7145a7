#include "tessera/zero/shard_layout.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

int64_t rounded_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

int64_t elements_of(const ShardLayout::Bucket& bucket) {
  int64_t elements = 0;
  for (const auto& slot : bucket.slots) elements += slot.numel;
  return elements;
}

}  // namespace

ShardLayout::Run ShardLayout::owned(const Bucket& bucket, const Slot& slot, int rank) const {
  invariant(rank >= 0 && rank < ranks, "a layout for ", ranks, " ranks has no rank ", rank);
  const int64_t part_begin = rank * bucket.part;
  const int64_t begin = std::max(slot.offset, part_begin), end = std::min(slot.offset + slot.numel, part_begin + bucket.part);
  return begin < end ? Run{begin - slot.offset, end - begin} : Run{};
}

int64_t ShardLayout::padding() const {
  int64_t padding = 0;
  for (const Bucket& bucket : buckets) padding += numel(bucket) - elements_of(bucket);
  return padding;
}

ShardLayout make_shard_layout(std::span<const GradientSpec> parameters, BucketSizes sizes, int ranks) {
  invariant(ranks >= 1, "a layout for ", ranks, " ranks");
  std::unordered_map<std::string_view, size_t> index_of;
  for (size_t i = 0; i < parameters.size(); ++i) index_of.emplace(parameters[i].name, i);
  ShardLayout layout{.ranks = ranks, .buckets = {}};
  for (const BucketLayout::Bucket& planned : make_bucket_layout(parameters, sizes).buckets) {
    ShardLayout::Bucket bucket{.dtype = planned.dtype, .slots = {}, .part = 0};
    int64_t end = 0;
    for (const BucketLayout::Slot& slot : planned.slots) {
      const int64_t offset = rounded_up(end, ShardLayout::alignment);
      bucket.slots.push_back({index_of.at(slot.name), offset, slot.numel});
      end = offset + slot.numel;
    }
    bucket.part = rounded_up(rounded_up(end, ranks) / ranks, ShardLayout::alignment);
    layout.buckets.push_back(std::move(bucket));
  }
  return layout;
}

std::string to_string(const ShardLayout& layout) {
  std::string text = fmt::format("{} buckets for {} ranks, {} elements of padding\n", layout.buckets.size(), layout.ranks, layout.padding());
  for (size_t i = 0; i < layout.buckets.size(); ++i) {
    const auto& bucket = layout.buckets[i];
    text += fmt::format("{:>4}  {}  {:>12} elements in {} parameters, {:>10} a rank\n", i, c10::toString(bucket.dtype), elements_of(bucket),
                        bucket.slots.size(), bucket.part);
  }
  return text;
}

}  // namespace tessera
