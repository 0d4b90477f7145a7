#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/data/loader.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/sharding.h"
#include "tessera/train/compose.h"
#include "tessera/train/forward_engine.h"
#include "tessera/train/model_stage.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/update_windows.h"

namespace tessera {

/// What a step does beside its gradients.
struct StepOptions {
  /// A schedule with updates in its midst calls `met` when `grad()` of each parameter holds the gradient of the mean loss over all valid tokens of an update's
  /// micro-batches, and `update` where this rank updates, at once or later; `grad()` is that gradient then. When the step is over all updates are made.
  std::function<void()> met{}, update{};
  pipeline::StepTimes* times = nullptr;  ///< takes down when each action ran
  /// Of a dry run that knows the rest from these: so many micro-batches are run, in the order of a step that has no more. 0: all.
  int rehearsed = 0;
};

/// What a rehearsal makes in place of the losses of micro-batches that are not run lies between brackets (ActionEvent) of this name.
inline constexpr std::string_view kLeftOut = "left out";

/// Turns a rank's micro-batches into the gradient of the global batch. It makes of the model's parts the stages of a pipeline, of one stage where a rank holds
/// the whole, and lets the executor carry out the schedule; around each action it says to what synchronizes gradients which one it is, and opens the scopes
/// that the action's thread carries. It knows nothing of how gradients meet, and the loop does not know which schedule that is.
class Engine {
 public:
  /// `schedule`: of all ranks of the pipeline; unset, the configuration's.
  Engine(const Config& config, Composition& run, ScheduleMaker schedule = {});

  /// Forward and backward of every micro-batch; afterwards `grad()` of each parameter holds the gradient of the mean loss over all valid tokens of the global
  /// batch: the same bits for every schedule. Returns the summed loss of each micro-batch, fp32 [micro-batches of this rank], 0 for padding and on ranks that
  /// do not hold the last stage; never read on the host here. Throws InternalError for a schedule that leaves something out.
  at::Tensor forward_backward(const data::StepBatch& batch, StepOptions options = {});

  /// Seconds that the last step waited for gradients to meet.
  double exposed_s() const;

  /// Of the same model, with stages and executors of its own, which it keeps.
  ForwardEngine& forward_only() { return forward_only_; }

 private:
  /// The executor for so many micro-batches, with what only the whole schedule tells of its actions.
  struct Plan {
    std::unique_ptr<pipeline::Executor> executor;
    std::map<std::pair<int, schedules::Kind>, int> last_micro_batch;  ///< of each stage: of the last action of a kind
    schedules::Outlooks outlooks;
    bool runs_ahead = false;                 ///< several forwards of the last stage are alive at once
    std::unique_ptr<UpdateWindows> windows;  ///< null where the step ends with its one update
  };
  Plan& plan_for(size_t micro_batches);
  void around(const schedules::Action& action, const std::function<void()>& body);
  Attachment add_in_place(size_t micro_batches) const;
  /// Losses like the others for the micro-batches behind the first `run`.
  void leave_out_losses(size_t run);
  void compute(ActionKind kind, const schedules::Action& action, const std::function<void()>& body);

  int part_of(int stage) const { return static_cast<int>(std::distance(stages_.begin(), stages_.find(stage))); }

  uint64_t seed_;
  const ZeroConfig zero_;
  Composition& run_;
  ScheduleMaker schedule_;
  ForwardEngine forward_only_;
  std::map<int, ModelStage> stages_;  ///< of this rank, by number
  LossPass pass_;
  std::map<size_t, Plan> plans_;
  const data::StepBatch* batch_ = nullptr;  ///< of the step that runs
  Plan* plan_ = nullptr;
  std::vector<double> scales_;  ///< of each micro-batch's loss
  std::function<void()> met_, update_;
};

}  // namespace tessera
