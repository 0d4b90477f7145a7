#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// One parameter's gradient in a bucket.
struct BucketGradient {
  std::string name;   ///< of the parameter
  at::Tensor tensor;  ///< a view into the bucket, with the shape and strides of the parameter that `prepare` was handed, row-major where those leave gaps
  /// Whether any rank used the parameter in this step. Known from the first `advance` on; false only with find_unused_parameters, and then the gradient is
  /// dropped after the step, so a hook that owes a residual keeps it.
  bool used = true;
};

/// What a hook sees of a bucket. It lives as long as the step.
struct GradientBucket {
  at::Tensor flat;                        ///< [numel], contiguous: this rank's gradients before, the sum over ranks after
  std::vector<BucketGradient> gradients;  ///< in the order in which they lie in `flat`, without gaps
};

/// What a hook communicates through: the group, and the account of what crossed.
class GradientChannel {
 public:
  GradientChannel(comm::Group group, SynchronizationStatistics& statistics) : group_(std::move(group)), statistics_(statistics) {}

  const comm::Group& group() const { return group_; }

  /// Starts the sum of `tensor` over the group, in place, and counts it.
  [[nodiscard]] comm::Pending all_reduce(const at::Tensor& tensor);

  /// Counts a collective that the hook has started on `group()` by itself and that was handed `bytes`.
  void count(int64_t bytes);

 private:
  comm::Group group_;
  SynchronizationStatistics& statistics_;
};

/// The way of one bucket through a hook in one step. On every rank the same collectives must be started in the same calls. Destroyed before it is done where a
/// step failed: then it waits for nothing, and leaves what the hook carries as it was.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  /// Waits for the collective under way. Then either leaves the sum over ranks in the bucket and returns true, or starts the next collective and
  /// returns false: it will be called again.
  virtual bool advance() = 0;
};

/// A tensor that a hook carries from step to step, for a checkpoint.
struct HookTensor {
  enum class Across {
    Equal,  ///< every rank holds the same
    Sum,    ///< each rank holds its own, and what matters is their sum: another number of ranks deals it anew
    Mean,   ///< the same, of their mean
  };
  std::string name;   ///< of the hook, the tensor and the parameter, such as "powersgd.error.layers.0.mlp.w1.weight"
  at::Tensor tensor;  ///< the live one: copy into it to load
  Slice slice;        ///< which part of which logical tensor it is; the ranks of a Sum or Mean are no dimension of it
  Across across = Across::Equal;
};

/// How DistributedDataParallel sums a bucket of gradients over the ranks. Without one, it all-reduces the bucket as it is (AllReduceHook).
///
/// `start` is called for each bucket of the step in the order of the plan, for most while backward still runs, from the thread that runs it. When backward is
/// done, `advance` is called in rounds, in each for every bucket that is not done, in the same order: so the collectives match across ranks, a bucket's
/// next collective overlaps the others' arithmetic, and a hook may take as many collectives as it needs. All runs without autograd. A hook must not read
/// tensors on the host: it runs on meta in a dry run. It counts its scratch memory as MemoryCategory::Comm. One hook serves one DistributedDataParallel.
///
///   struct SignHook : CommunicationHook {                       // signSGD with majority vote (arXiv:1810.05291): a byte an element
///     struct Vote : BucketReduction {
///       Vote(GradientBucket& bucket, GradientChannel& channel)
///           : bucket(bucket), votes(bucket.flat.sign().to(at::kChar)), pending(channel.all_reduce(votes)) {}
///       bool advance() override {
///         pending.wait();
///         bucket.flat.copy_(votes.sign_());
///         return true;
///       }
///       GradientBucket& bucket;
///       at::Tensor votes;
///       comm::Pending pending;
///     };
///     std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override {
///       return std::make_unique<Vote>(bucket, channel);
///     }
///   };
///   DistributedDataParallel ddp(*model, world.group(), {.hook = std::make_shared<SignHook>()});
class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;

  /// Before the first step: the parameters whose gradients will come, whose buckets hold `dtypes` (one per parameter), and the group that shares them. Again
  /// before a step of parameters that were frozen until then, with these alone. In place of a parameter whose strides are others than its gradient's, which are
  /// the same on every rank and in every step, a copy of it that lies as the gradient will.
  /// The place to allocate what is carried from step to step, so that a plan sees it.
  virtual void prepare(const std::vector<nn::NamedParameter>& parameters, const std::vector<at::ScalarType>& dtypes, const comm::Group& group);

  /// Before `prepare`: whether what the hook leaves is divided by the number of ranks (DdpOptions::average). What it owes is then in another unit.
  virtual void set_average(bool /*average*/) {}

  /// Whether it leaves the sum of what it is given and nothing else. Then a mean (DdpOptions::average) of fp16 is that of terms divided before, which cannot
  /// overflow, and not of a sum divided after.
  virtual bool is_linear() const { return false; }

  /// Before the first bucket of each step.
  virtual void begin_step() {}

  /// When all sums of the step are there, on every rank. Never of a step that was dropped, since a pass ended by an exception: ranks may begin unlike numbers
  /// of those.
  virtual void complete_step() {}

  /// Starts to reduce a bucket whose gradients are final. `bucket` and `channel` outlive what it returns.
  virtual std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) = 0;

  /// What a checkpoint keeps; empty before `prepare`.
  virtual std::vector<HookTensor> state() const { return {}; }
};

/// The plain sum, in the dtype of the bucket, in place. Traffic: one all-reduce of the bucket. Memory: none.
class AllReduceHook final : public CommunicationHook {
 public:
  bool is_linear() const override { return true; }
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override;
};

/// The sum in bf16: cast, all-reduce, cast back. Range of fp32, 8 bits of precision: on n ranks an element errs by at most about n 2^-8 times the sum of the
/// ranks' absolute values (by 2^-8 of it where the engine adds in fp32, as shm does). Buckets of 16 bits, and of complex numbers, travel as they are.
/// Traffic: one all-reduce of 2 bytes an element. Memory: 2 bytes an element from the start of a bucket's reduction to its end.
class Bf16Hook final : public CommunicationHook {
 public:
  bool is_linear() const override { return true; }
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override;
};

/// The sum in fp16: divide by n, cast, all-reduce, cast back, multiply by n. Divided first, the sum of n ranks cannot overflow as long as no rank's element
/// exceeds 65,504 n. 11 bits of precision above 6e-5 n, fewer below, and elements under 3e-8 n are lost: bf16 is the safer choice for
/// gradients that are not scaled. Buckets of 16 bits travel as they are: of fp16 the sum itself is a number of fp16, and its mean is as safe as here
/// (is_linear). Traffic and memory as with bf16.
class Fp16Hook final : public CommunicationHook {
 public:
  bool is_linear() const override { return true; }
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override;
};

}  // namespace tessera
