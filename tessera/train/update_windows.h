#pragma once

#include <deque>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/data/loader.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera {

/// A step in whose midst weights are updated, on a rank with one stage, as a gradient synchronizer sees it: each update is a step of its own, of the
/// micro-batches whose gradients it sums. What of their forwards has run before that step is announced as it begins; later micro-batches' forwards are none
/// of its business. Such a step ends when its last backward is done; where the schedule updates later than that (schedules::with_late_updates), its gradients
/// wait aside, and are those of the parameters again while their update goes on.
class UpdateWindows {
 public:
  /// `actions`: the rank's, of an asynchronous schedule. `met`: called when the gradients of an update have met over the data ranks.
  UpdateWindows(const schedules::RankActions& actions, std::function<void()> met);

  /// What the loss of each micro-batch is multiplied by, for the gradient of the mean over all data ranks' valid tokens of its update.
  std::vector<double> scales(const data::StepBatch& batch) const;

  /// What follows are the actions of a step. `synchronizer` and `batch` have to outlive it.
  void begin(GradientSynchronizer& synchronizer, const data::StepBatch& batch);
  /// An action other than an update.
  void around(ActionKind kind, int micro_batch, const std::function<void()>& body);
  /// `body` updates, by the gradients that the parameters have then.
  void update(const std::function<void()>& body);

  /// What the synchronizer cost since begin().
  double exposed_s() const { return exposed_.seconds(); }

 private:
  struct Window {
    int first, last;  ///< micro-batches of an update
    bool late;        ///< other actions come before it
  };
  void open();
  void close();
  void go_on();
  MicroBatchPosition position_of(int micro_batch) const;
  /// What the parameters have; they have `gradients` from then on.
  std::vector<at::Tensor> exchange(std::vector<at::Tensor> gradients) const;

  std::vector<Window> windows_;
  std::function<void()> met_;
  size_t current_ = 0;
  std::set<int> ran_;                            ///< forwards
  std::deque<std::vector<at::Tensor>> waiting_;  ///< gradients of late updates
  GradientSynchronizer* synchronizer_ = nullptr;
  const data::StepBatch* batch_ = nullptr;
  comm::ExposedTime exposed_;
};

}  // namespace tessera
