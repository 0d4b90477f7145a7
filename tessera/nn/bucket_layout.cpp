#include "tessera/nn/bucket_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/format_name.h"
#include "tessera/core/json_reason.h"

// Every collective costs a latency, and only what backward still has to compute can hide it. A bucket for each gradient pays too many latencies; one for all
// starts when nothing is left to hide under. Each dtype and key fills a bucket of its own at the same time, so buckets close in another order than they were
// opened; they are reduced in the order of their last gradients, for a bucket that waits holds up all behind it.

namespace tessera {
namespace {

/// A bucket being filled, and when its last gradient is expected.
struct OpenBucket {
  BucketLayout::Bucket bucket;
  int64_t complete_at = 0;
};

struct Filling {
  OpenBucket open;
  bool first = true;
};

at::ScalarType dtype_of(const std::string& name) {
  if (const auto dtype = format_of(name)) return *dtype;
  throw ConfigError("bucket plan: dtype = \"" + name + "\" is none of fp32, fp64, bf16, fp16, complex64, complex128");
}

void check_permutation(std::span<const int64_t> order, size_t size) {
  std::vector<bool> seen(size, false);
  bool valid = order.size() == size;
  for (const int64_t index : order) {
    valid = valid && index >= 0 && index < static_cast<int64_t>(size) && !seen[index];
    if (!valid) break;
    seen[index] = true;
  }
  invariant(valid, "the order of ", size, " gradients is no permutation of them");
}

template <class T>
T field(const nlohmann::json& json, const char* key) {
  try {
    return json.at(key).get<T>();
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("bucket plan: field \"", key, "\" is missing or of the wrong type (", json_reason(error), ")"));
  }
}

}  // namespace

int64_t BucketLayout::Bucket::numel() const { return slots.empty() ? 0 : slots.back().offset + slots.back().numel; }

int64_t BucketLayout::Bucket::bytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }

int64_t BucketLayout::bytes() const {
  return std::accumulate(buckets.begin(), buckets.end(), int64_t{0}, [](int64_t sum, const Bucket& bucket) { return sum + bucket.bytes(); });
}

BucketLayout make_bucket_layout(std::span<const GradientSpec> gradients, std::span<const int64_t> order, BucketSizes sizes, bool observed) {
  require(sizes.bucket_bytes > 0, "zero.bucket_bytes = ", sizes.bucket_bytes, ": a bucket holds at least one byte; 26214400 (25 MiB) is the default");
  require(sizes.first_bucket_bytes > 0, "first_bucket_bytes = ", sizes.first_bucket_bytes,
          ": a bucket holds at least one byte; 1048576 (1 MiB) is the default");
  check_permutation(order, gradients.size());

  std::map<std::pair<at::ScalarType, std::string>, Filling> fillings;
  std::vector<OpenBucket> closed;
  for (int64_t position = 0; const int64_t index : order) {
    const GradientSpec& gradient = gradients[index];
    Filling& filling = fillings[{gradient.dtype, gradient.key}];
    BucketLayout::Bucket& bucket = filling.open.bucket;
    const int64_t limit = filling.first ? std::min(sizes.first_bucket_bytes, sizes.bucket_bytes) : sizes.bucket_bytes;
    const int64_t bytes = gradient.numel * static_cast<int64_t>(c10::elementSize(gradient.dtype));
    if (!bucket.slots.empty() && bucket.bytes() + bytes > limit) {
      closed.push_back(std::move(filling.open));
      filling = Filling{.open = {}, .first = false};
    }
    bucket.dtype = gradient.dtype;
    bucket.slots.push_back({gradient.name, bucket.numel(), gradient.numel});
    filling.open.complete_at = position++;
  }
  for (auto& [kind, filling] : fillings) closed.push_back(std::move(filling.open));
  std::ranges::sort(closed, {}, &OpenBucket::complete_at);

  BucketLayout plan{.sizes = sizes, .observed = observed, .buckets = {}};
  for (OpenBucket& open : closed) plan.buckets.push_back(std::move(open.bucket));
  return plan;
}

BucketLayout make_bucket_layout(std::span<const GradientSpec> gradients, BucketSizes sizes) {
  std::vector<int64_t> order(gradients.size());
  std::iota(order.rbegin(), order.rend(), int64_t{0});
  return make_bucket_layout(gradients, order, sizes);
}

void check_bucket_layout(const BucketLayout& plan, std::span<const GradientSpec> gradients, std::string_view source) {
  std::unordered_map<std::string, const GradientSpec*> missing;
  for (const GradientSpec& gradient : gradients) missing.emplace(gradient.name, &gradient);
  for (const BucketLayout::Bucket& bucket : plan.buckets) {
    int64_t offset = 0;
    const GradientSpec* before = nullptr;
    for (const BucketLayout::Slot& slot : bucket.slots) {
      const auto found = missing.find(slot.name);
      require(found != missing.end(), "bucket plan (", source, "): '", slot.name,
              "' is no trainable parameter of this model, or is listed twice; leave the plan out to make a new one");
      const GradientSpec& gradient = *found->second;
      require(slot.numel == gradient.numel && bucket.dtype == gradient.dtype, "bucket plan (", source, "): '", slot.name, "' has ", slot.numel, " elements of ",
              format_name(bucket.dtype), ", the model's gradient ", gradient.numel, " of ", format_name(gradient.dtype),
              "; leave the plan out to make a new one");
      require(slot.offset == offset, "bucket plan (", source, "): '", slot.name, "' starts at element ", slot.offset, " of its bucket, expected ", offset);
      require(before == nullptr || before->key == gradient.key, "bucket plan (", source, "): '", slot.name, "' and '", before == nullptr ? "" : before->name,
              "' are held by other ranks, and lie in one bucket; leave the plan out to make a new one");
      offset += slot.numel;
      before = &gradient;
      missing.erase(found);
    }
  }
  require(missing.empty(), "bucket plan (", source, "): ", missing.size(), " gradients of this model are in no bucket, among them '",
          missing.empty() ? "" : missing.begin()->first, "'; leave the plan out to make a new one");
}

nlohmann::json to_json(const BucketLayout& plan) {
  nlohmann::json buckets = nlohmann::json::array();
  for (const BucketLayout::Bucket& bucket : plan.buckets) {
    nlohmann::json gradients = nlohmann::json::array();
    for (const BucketLayout::Slot& slot : bucket.slots) gradients.push_back({{"name", slot.name}, {"offset", slot.offset}, {"numel", slot.numel}});
    buckets.push_back({{"dtype", format_name(bucket.dtype)}, {"gradients", std::move(gradients)}});
  }
  return {{"bucket_bytes", plan.sizes.bucket_bytes},
          {"first_bucket_bytes", plan.sizes.first_bucket_bytes},
          {"observed", plan.observed},
          {"buckets", std::move(buckets)}};
}

BucketLayout bucket_layout_from_json(const nlohmann::json& json) {
  BucketLayout plan;
  plan.sizes = {field<int64_t>(json, "bucket_bytes"), field<int64_t>(json, "first_bucket_bytes")};
  plan.observed = field<bool>(json, "observed");
  for (const nlohmann::json& entry : field<std::vector<nlohmann::json>>(json, "buckets")) {
    BucketLayout::Bucket bucket;
    bucket.dtype = dtype_of(field<std::string>(entry, "dtype"));
    for (const nlohmann::json& slot : field<std::vector<nlohmann::json>>(entry, "gradients")) {
      bucket.slots.push_back({field<std::string>(slot, "name"), field<int64_t>(slot, "offset"), field<int64_t>(slot, "numel")});
    }
    plan.buckets.push_back(std::move(bucket));
  }
  return plan;
}

std::string to_string(const BucketLayout& plan) {
  std::string text =
      fmt::format("{} buckets, {}, in {} order\n", plan.buckets.size(), format_bytes(plan.bytes()), plan.observed ? "observed" : "reverse registration");
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const BucketLayout::Bucket& bucket = plan.buckets[i];
    text += fmt::format("{:>4}  {}  {:>10}  {:>4} gradients", i, format_name(bucket.dtype), format_bytes(bucket.bytes()), bucket.slots.size());
    if (!bucket.slots.empty()) text += fmt::format("  {} .. {}", bucket.slots.front().name, bucket.slots.back().name);
    text += '\n';
  }
  return text;
}

}  // namespace tessera
