#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/memory/host_link.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"
#include "tessera/offload/host_sums.h"

namespace tessera {

/// Around what synchronizes the gradients of a step: what is updated lies on the host, with gradients that go there while backward runs (ZeRO-Offload,
/// arXiv:2101.06840). Sums over micro-batches, norm, clipping and update are the host's; behind the update parameters go back. The bits are those of the same
/// run without it.
///
///   const auto sums = std::make_shared<HostSums>(device, in_flight_bytes);
///   auto ddp = std::make_unique<DistributedDataParallel>(*model, world.group(), DdpOptions{.relay = sums});     // or ShardedDataParallel
///   HostGradients host(std::move(ddp), nn::unique_parameters(*model), sums);                                   // .., zero->shards(), ..
///
/// Several data ranks meet on the device, by buckets: what earlier micro-batches have left on the host comes back to be reduced with the last one's, bucket by
/// bucket, and this rank's part of the sum goes out; where each micro-batch is reduced (stage 2), its part alone goes out and is added there.
///
///   device    the parameters, gradients on their way out (HostSums), and the buckets at hand: one that is reduced, and those that fill
///   host      a copy of what this rank updates, the sums, and what is on its way; with several data ranks, but for stage 2, whole sums until they are reduced
///   traffic   an element's gradient out with each micro-batch, its parameter in with each step. Several data ranks: the sum in and its part out beside that
///
/// `updated` is what the synchronizer inside updates. updated() are the copies, with the slices of the parameters, and are those parameters to who asks
/// (nn::updated_for); a copy requires a gradient where its parameter does when a step begins, or updated() is asked for. Who writes parameters in another way
/// is followed where their version counter tells, when a step begins; else call follow(). Works on meta.
class HostGradients final : public GradientSynchronizer {
 public:
  /// `sums`: the relay of all that `inner` is made of.
  HostGradients(std::unique_ptr<GradientSynchronizer> inner, const std::vector<nn::NamedParameter>& updated, std::shared_ptr<HostSums> sums);
  ~HostGradients() override;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override { inner_->before(action, position); }
  void after(ActionKind action, const MicroBatchPosition& position) override { inner_->after(action, position); }
  void expect(ActionKind action) override { inner_->expect(action); }
  void drain() override { inner_->drain(); }
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override { return inner_->statistics(); }
  std::vector<nn::NamedParameter> updated() const override;
  void clear_gradients() override;
  comm::Group norm_group() const override { return inner_->norm_group(); }
  std::vector<int64_t> held_elements(int rank) const override { return inner_->held_elements(rank); }
  Slice slice_on(int rank, const at::Tensor& updated) const override;

  /// Copies take the parameters' values of now.
  void follow();

 private:
  /// Of when a parameter and its copy were last equal.
  struct Versions {
    nn::WriteMark parameter;
    int64_t copy = 0;
  };
  void take(size_t index);
  void note_versions(size_t index);
  void follow_frozen() const;

  std::shared_ptr<HostSums> sums_;
  HostLink link_;
  std::unique_ptr<GradientSynchronizer> inner_;
  std::vector<nn::NamedParameter> parameters_, copies_;
  std::vector<Versions> versions_;
  std::vector<char> with_gradient_;  ///< in the last finish(): a program may clear the gradient before the update comes back
};

}  // namespace tessera
