#pragma once

#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "tessera/data/loader.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera {

/// A step in whose midst weights are updated, on a rank with one stage, as a gradient synchronizer sees it: each update is a step of its own, of the
/// micro-batches whose gradients it sums. What of their forwards has run before that step is announced as it begins; later micro-batches' forwards are none
/// of its business.
class UpdateWindows {
 public:
  /// `actions`: the rank's, of an asynchronous schedule.
  explicit UpdateWindows(const schedules::RankActions& actions);

  /// What the loss of each micro-batch is multiplied by, for the gradient of the mean over all data ranks' valid tokens of its update.
  std::vector<double> scales(const data::StepBatch& batch) const;

  /// What follows are the actions of a step. `synchronizer` and `batch` have to outlive it.
  void begin(GradientSynchronizer& synchronizer, const data::StepBatch& batch);
  /// An action other than an update.
  void around(ActionKind kind, int micro_batch, const std::function<void()>& body);
  /// `body` updates, when the gradients of all data ranks have met.
  void update(const std::function<void()>& body);

  /// What the synchronizer cost since begin().
  double exposed_s() const { return exposed_s_; }

 private:
  void open();
  MicroBatchPosition position_of(int micro_batch) const;

  std::vector<std::pair<int, int>> windows_;  ///< first and last micro-batch of each update
  size_t current_ = 0;
  std::set<int> ran_;  ///< forwards
  GradientSynchronizer* synchronizer_ = nullptr;
  const data::StepBatch* batch_ = nullptr;
  double exposed_s_ = 0;
};

}  // namespace tessera
