#include "tessera/data_parallel/communication_hook.h"

#include <ATen/ATen.h>

#include "tessera/nn/narrow_sum.h"

namespace tessera {
namespace {

class InPlace final : public BucketReduction {
 public:
  explicit InPlace(comm::Pending pending) : pending_(std::move(pending)) {}

  bool advance() override {
    pending_.wait();
    return true;
  }

 private:
  comm::Pending pending_;
};

class Cast final : public BucketReduction {
 public:
  Cast(GradientBucket& bucket, GradientChannel& channel, at::ScalarType dtype)
      : bucket_(bucket), sum_(bucket.flat, dtype, channel.group().size()), pending_(channel.all_reduce(sum_.crossing())) {}

  bool advance() override {
    pending_.wait();
    sum_.store(sum_.crossing(), bucket_.flat, /*add=*/false);
    sum_.release();  // before the other buckets are done
    return true;
  }

 private:
  GradientBucket& bucket_;
  NarrowSum sum_;
  comm::Pending pending_;
};

std::unique_ptr<BucketReduction> start_cast(GradientBucket& bucket, GradientChannel& channel, at::ScalarType dtype) {
  if (bucket.flat.is_complex() || bucket.flat.element_size() <= c10::elementSize(dtype)) return std::make_unique<InPlace>(channel.all_reduce(bucket.flat));
  return std::make_unique<Cast>(bucket, channel, dtype);
}

}  // namespace

comm::Pending GradientChannel::all_reduce(const at::Tensor& tensor) {
  count(static_cast<int64_t>(tensor.nbytes()));
  return comm::all_reduce_async(group_, tensor);
}

void GradientChannel::count(int64_t bytes) {
  statistics_.bytes += bytes;
  ++statistics_.num_collectives;
}

void CommunicationHook::prepare(const std::vector<nn::NamedParameter>&, const std::vector<at::ScalarType>&, const comm::Group&) {}

std::unique_ptr<BucketReduction> AllReduceHook::start(GradientBucket& bucket, GradientChannel& channel) {
  return std::make_unique<InPlace>(channel.all_reduce(bucket.flat));
}

std::unique_ptr<BucketReduction> Bf16Hook::start(GradientBucket& bucket, GradientChannel& channel) { return start_cast(bucket, channel, at::kBFloat16); }

std::unique_ptr<BucketReduction> Fp16Hook::start(GradientBucket& bucket, GradientChannel& channel) { return start_cast(bucket, channel, at::kHalf); }

}  // namespace tessera
