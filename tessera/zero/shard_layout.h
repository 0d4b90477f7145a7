#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/nn/bucket_layout.h"

namespace tessera {

/// Where each parameter lies in flat buckets that are cut into one equal part per rank, and which elements of it a rank owns: a plain value.
///
/// Parameters of a bucket lie one after the other, each row-major, beginning at a multiple of `alignment` elements; parts are multiples of it, too. So whatever
/// the number of ranks, a cut falls between the vectors in which an elementwise loop over the whole parameter goes: an optimizer over the parts gives the bits
/// of one over the whole. A rank's part of a parameter is a run of its elements, of any length: all, some, or none. Padding: below `alignment` elements a
/// parameter, below `alignment` x ranks a bucket.
struct ShardLayout {
  static constexpr int64_t alignment = 32;  ///< elements: one of the widest vectors of the narrowest dtype (64 bytes of bf16), two of fp32

  struct Slot {
    size_t parameter = 0;  ///< index in the list that the layout was made for
    int64_t offset = 0;    ///< in elements from the start of the bucket
    int64_t numel = 0;
    bool operator==(const Slot&) const = default;
  };
  struct Bucket {
    at::ScalarType dtype = at::kFloat;  ///< of the parameters
    std::vector<Slot> slots;            ///< in the order in which gradients are expected
    int64_t part = 0;                   ///< elements of each rank's part, padding included
    bool operator==(const Bucket&) const = default;
  };
  /// A run of a parameter's elements, row-major.
  struct Run {
    int64_t begin = 0, size = 0;
    bool operator==(const Run&) const = default;
  };

  int ranks = 1;
  std::vector<Bucket> buckets;  ///< in the order in which they are reduced, on every rank

  int64_t numel(const Bucket& bucket) const { return bucket.part * ranks; }
  /// What `rank` owns of a slot's parameter; {0, 0} where it owns nothing.
  Run owned(const Bucket& bucket, const Slot& slot, int rank) const;
  int64_t padding() const;  ///< elements that belong to no parameter
  bool operator==(const ShardLayout&) const = default;
};

/// Deals parameters into buckets as make_bucket_layout does, in the reverse order of registration, and cuts each bucket for `ranks` ranks. The order is not
/// made anew from what a step shows, as DDP's is: optimizer state lies along it.
ShardLayout make_shard_layout(std::span<const GradientSpec> parameters, BucketSizes sizes, int ranks);

/// One line per bucket: number, dtype, elements, padding, elements of a part.
std::string to_string(const ShardLayout& layout);

}  // namespace tessera
