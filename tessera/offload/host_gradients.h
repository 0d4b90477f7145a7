#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/core/attachment.h"
#include "tessera/memory/host_link.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"

namespace tessera {

/// Around what synchronizes the gradients of a step: what is updated lies on the host, with gradients that go there while backward runs (ZeRO-Offload,
/// arXiv:2101.06840). Sums over micro-batches, norm, clipping and update are the host's; behind the update parameters go back. Their bits are those of a run
/// on one device, where each gradient is of one rank alone.
///
///   device    the parameters, and gradients on their way: at most `in_flight_bytes` of them, or one
///   host      a copy of the parameters, the sums, and what is on its way
///   traffic   an element's gradient out with each micro-batch, its parameter in with each step
///
/// updated() are the copies, with the slices of the parameters, and are those parameters to who asks (nn::updated_for). Who writes parameters in another way
/// is followed where their version counter tells, when a step begins; else call follow(). Works on meta.
class HostGradients final : public GradientSynchronizer {
 public:
  HostGradients(std::unique_ptr<GradientSynchronizer> inner, const std::vector<nn::NamedParameter>& updated, at::Device device, int64_t in_flight_bytes);
  ~HostGradients() override;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override { inner_->before(action, position); }
  void after(ActionKind action, const MicroBatchPosition& position) override { inner_->after(action, position); }
  void expect(ActionKind action) override { inner_->expect(action); }
  void drain() override { inner_->drain(); }
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override { return inner_->statistics(); }
  std::vector<nn::NamedParameter> updated() const override { return copies_; }
  void clear_gradients() override;
  comm::Group norm_group() const override { return inner_->norm_group(); }
  std::vector<int64_t> held_elements(int rank) const override { return inner_->held_elements(rank); }
  Slice slice_on(int rank, const at::Tensor& updated) const override { return inner_->slice_on(rank, nn::updated_for(updated)); }

  /// Copies take the parameters' values of now.
  void follow();

 private:
  /// A gradient on its way.
  struct Flight {
    size_t index;
    at::Tensor gradient;  ///< on the host
    CopyStream::Point arrived;
  };

  /// Version counters when a parameter and its copy were last equal.
  struct Versions {
    int64_t parameter = 0, copy = 0;
  };

  void take(size_t index);
  void send(size_t index);
  void land();

  std::unique_ptr<GradientSynchronizer> inner_;
  HostLink link_;
  int64_t in_flight_bytes_;
  std::vector<nn::NamedParameter> parameters_, copies_;
  std::vector<Versions> versions_;
  std::deque<Flight> flights_;
  int64_t flying_bytes_ = 0;
  CopyStream::Point returned_;  ///< parameters of the last update
  Attachment hooks_;
};

}  // namespace tessera
