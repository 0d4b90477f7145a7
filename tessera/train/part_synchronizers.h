#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_synchronizer.h"

namespace tessera {

/// Several synchronizers as one: of the parts of a model that one rank of a pipeline holds, and within a part of parameters that are dealt over other ranks
/// than the rest (experts). Each has its own buckets or units, and each part its own last backward, so that the gradients of one are reduced while another's
/// are still to come. All of them start collectives on the same groups, in the order of the schedule, which is the same on all ranks of such a group.
class PartSynchronizers final : public GradientSynchronizer {
 public:
  struct Share {
    int part = 0;  ///< whose actions it is told
    std::unique_ptr<GradientSynchronizer> synchronizer;
    std::vector<int> places{};  ///< by rank of the group that parameters are sharded over: its place among those that shard these; empty: the same
  };

  explicit PartSynchronizers(std::vector<Share> shares) : shares_(std::move(shares)) {}

  void begin_step() override {
    for (Share& share : shares_) share.synchronizer->begin_step();
  }
  void before(ActionKind action, const MicroBatchPosition& position) override {
    for (Share& share : shares_) {
      if (share.part == position.part) share.synchronizer->before(action, position);
    }
    if (!position.coming || position.coming->part == position.part) return;
    for (Share& share : shares_) {
      if (share.part == position.coming->part) share.synchronizer->expect(position.coming->kind);
    }
  }
  void after(ActionKind action, const MicroBatchPosition& position) override {
    for (Share& share : shares_) {
      share.part == position.part ? share.synchronizer->after(action, position) : share.synchronizer->drain();
    }
  }
  void finish() override {
    for (Share& share : shares_) share.synchronizer->finish();
    add_up();
  }
  void after_update() override {
    for (Share& share : shares_) share.synchronizer->after_update();
    add_up();  // what is gathered then is waited for, too
  }
  const SynchronizationStatistics& statistics() const override { return statistics_; }
  std::vector<nn::NamedParameter> updated() const override {
    std::vector<nn::NamedParameter> all;
    for (const Share& share : shares_) {
      for (auto& parameter : share.synchronizer->updated()) all.push_back(std::move(parameter));
    }
    return all;
  }
  void clear_gradients() override {
    for (Share& share : shares_) share.synchronizer->clear_gradients();
  }
  comm::Group norm_group() const override { return shares_.front().synchronizer->norm_group(); }
  std::vector<int64_t> held_elements(int rank) const override {
    std::vector<int64_t> all;
    for (const Share& share : shares_) {
      for (const int64_t elements : share.synchronizer->held_elements(place_of(rank, share))) all.push_back(elements);
    }
    return all;
  }
  Slice slice_on(int rank, const at::Tensor& updated) const override {
    for (const Share& share : shares_) {
      const auto own = share.synchronizer->updated();
      if (std::ranges::none_of(own, [&](const nn::NamedParameter& one) { return one.tensor.is_same(updated); })) continue;
      return share.synchronizer->slice_on(place_of(rank, share), updated);
    }
    throw InternalError("internal error: no part updates this tensor");
  }

 private:
  void add_up() {
    statistics_ = {};
    for (const Share& share : shares_) {
      const SynchronizationStatistics& one = share.synchronizer->statistics();
      statistics_.exposed += one.exposed;
      statistics_.bytes += one.bytes;
      statistics_.num_collectives += one.num_collectives;
      statistics_.num_early += one.num_early;
    }
  }

  static int place_of(int rank, const Share& share) { return share.places.empty() ? rank : share.places[static_cast<size_t>(rank)]; }

  std::vector<Share> shares_;
  SynchronizationStatistics statistics_;
};

}  // namespace tessera
