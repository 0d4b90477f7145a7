#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>
#include <nlohmann/json_fwd.hpp>

namespace tessera {

/// One gradient as a plan sees it: a parameter's name, its element count, the dtype in which its gradient is held and reduced, and what may lie beside it
/// (nn::flat_key).
struct GradientSpec {
  std::string name;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  std::string key{};
};

/// Sizes at which buckets close. The first bucket is small so that the first all-reduce starts early in the backward pass.
struct BucketSizes {
  int64_t bucket_bytes = 25 << 20;
  int64_t first_bucket_bytes = 1 << 20;
  bool operator==(const BucketSizes&) const = default;
};

/// Which gradients share which flat buffer, and in which order the buffers are reduced: a plain value (PyTorch DDP, arXiv:2006.15704, section 3.2).
/// The order of sums inside a collective may depend on the bucket an element lies in, so a plan is part of a checkpoint: with the same plan a
/// resumed run repeats the same bits.
struct BucketLayout {
  struct Slot {
    std::string name;
    int64_t offset = 0;  ///< in elements from the start of the bucket
    int64_t numel = 0;
    bool operator==(const Slot&) const = default;
  };
  struct Bucket {
    at::ScalarType dtype = at::kFloat;
    std::vector<Slot> slots;  ///< in the order in which their gradients are expected, without gaps
    int64_t numel() const;
    int64_t bytes() const;
    bool operator==(const Bucket&) const = default;
  };

  BucketSizes sizes;
  bool observed = false;        ///< made from the order seen in a step; otherwise from the reverse order of registration
  std::vector<Bucket> buckets;  ///< in the order in which they are reduced, on every rank

  bool empty() const { return buckets.empty(); }
  int64_t bytes() const;
  bool operator==(const BucketLayout&) const = default;
};

/// Deals `gradients`, taken in `order` (a permutation of their indices), into buckets of one dtype and key each. A bucket closes when the next gradient would
/// carry it over its size; a gradient larger than that has a bucket of its own. Buckets come out in the order in which they are complete. Throws ConfigError
/// for a size below one, InternalError where `order` is not a permutation.
BucketLayout make_bucket_layout(std::span<const GradientSpec> gradients, std::span<const int64_t> order, BucketSizes sizes = {}, bool observed = false);

/// The plan before any step has been seen: gradients are expected in the reverse order of registration.
BucketLayout make_bucket_layout(std::span<const GradientSpec> gradients, BucketSizes sizes = {});

/// Throws ConfigError unless `plan` holds each of `gradients` exactly once, with its size and dtype, without gaps, and beside none of another key. `source`
/// says where the plan came from.
void check_bucket_layout(const BucketLayout& plan, std::span<const GradientSpec> gradients, std::string_view source);

/// For a checkpoint's manifest. Reading throws ConfigError naming the field that is missing or wrong.
nlohmann::json to_json(const BucketLayout& plan);
BucketLayout bucket_layout_from_json(const nlohmann::json& json);

/// One line per bucket: number, dtype, bytes, gradients.
std::string to_string(const BucketLayout& plan);

}  // namespace tessera
