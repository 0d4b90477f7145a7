#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/data/loader.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/train/compose.h"
#include "tessera/train/model_stage.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {

/// Forward passes without gradients, in evaluation mode, of a model of which a rank may hold a part: validation, replays, `tessera eval`.
class ForwardEngine {
 public:
  explicit ForwardEngine(LanguageModel& model) : model_(model) {}
  /// Through the stages of a pipeline; collective over its ranks.
  explicit ForwardEngine(Composition& run) : model_(*run.model), run_(run.parts.empty() ? nullptr : &run) {}

  /// The summed loss of a micro-batch, fp32 []; see LanguageModel::forward for shapes. The same on all ranks that work on the same samples.
  at::Tensor loss_sum(const at::Tensor& tokens, const at::Tensor& labels);
  /// Of a model that is whole.
  at::Tensor logits(const at::Tensor& tokens);

 private:
  LanguageModel& model_;
  Composition* run_ = nullptr;
};

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
  at::Tensor forward_backward(const data::StepBatch& batch);

  ForwardEngine forward_only() const { return ForwardEngine(run_); }

 private:
  /// The executor for so many micro-batches, with what only the whole schedule tells of its actions.
  struct Plan {
    std::unique_ptr<pipeline::Executor> executor;
    std::map<std::pair<int, schedules::Kind>, int> last_micro_batch;  ///< of each stage: of the last action of a kind
    bool runs_ahead = false;                                          ///< several forwards of the last stage are alive at once
  };
  Plan& plan_for(size_t micro_batches);
  void around(const schedules::Action& action, const std::function<void()>& body);

  uint64_t seed_;
  Composition& run_;
  ScheduleMaker schedule_;
  std::map<int, ModelStage> stages_;  ///< of this rank, by number
  std::map<size_t, Plan> plans_;
  const data::StepBatch* batch_ = nullptr;  ///< of the step that runs
  const Plan* plan_ = nullptr;
  double scale_ = 1;
};

}  // namespace tessera
