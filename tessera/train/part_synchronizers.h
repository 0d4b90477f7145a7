#pragma once

#include <memory>
#include <vector>

#include "tessera/nn/gradient_synchronizer.h"

namespace tessera {

/// The synchronizers of the parts of a model that one rank of a pipeline holds, as one. Each part has its own buckets or units and its own last backward, so
/// that the gradients of one are reduced while another's are still to come. All of them start collectives on the same groups, in the order of the schedule,
/// which is the same on all ranks of such a group.
class PartSynchronizers final : public GradientSynchronizer {
 public:
  explicit PartSynchronizers(std::vector<std::unique_ptr<GradientSynchronizer>> parts) : parts_(std::move(parts)) {}

  void begin_step() override {
    for (auto& part : parts_) part->begin_step();
  }
  void before(ActionKind action, const MicroBatchPosition& position) override {
    parts_.at(static_cast<size_t>(position.part))->before(action, position);
    if (position.coming && position.coming->part != position.part) parts_.at(static_cast<size_t>(position.coming->part))->expect(position.coming->kind);
  }
  void after(ActionKind action, const MicroBatchPosition& position) override { parts_.at(static_cast<size_t>(position.part))->after(action, position); }
  void finish() override {
    statistics_ = {};
    for (auto& part : parts_) {
      part->finish();
      const SynchronizationStatistics& one = part->statistics();
      statistics_.exposed_s += one.exposed_s;
      statistics_.bytes += one.bytes;
      statistics_.num_collectives += one.num_collectives;
      statistics_.num_early += one.num_early;
    }
  }
  void after_update() override {
    for (auto& part : parts_) part->after_update();
  }
  const SynchronizationStatistics& statistics() const override { return statistics_; }
  std::vector<nn::NamedParameter> updated() const override {
    std::vector<nn::NamedParameter> all;
    for (const auto& part : parts_) {
      for (auto& parameter : part->updated()) all.push_back(std::move(parameter));
    }
    return all;
  }
  void clear_gradients() override {
    for (auto& part : parts_) part->clear_gradients();
  }
  comm::Group norm_group() const override { return parts_.front()->norm_group(); }
  std::vector<int64_t> held_elements(int rank) const override {
    std::vector<int64_t> all;
    for (const auto& part : parts_) {
      for (const int64_t elements : part->held_elements(rank)) all.push_back(elements);
    }
    return all;
  }

 private:
  std::vector<std::unique_ptr<GradientSynchronizer>> parts_;
  SynchronizationStatistics statistics_;
};

}  // namespace tessera
