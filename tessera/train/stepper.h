#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "tessera/core/attachment.h"
#include "tessera/data/loader.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/memory/history.h"
#include "tessera/memory/host_cache.h"
#include "tessera/mesh/mesh.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/tentative_update.h"
#include "tessera/train/compose.h"
#include "tessera/train/deterministic_operators.h"
#include "tessera/train/engine.h"
#include "tessera/train/expert_load.h"
#include "tessera/train/stage_updates.h"
#include "tessera/train/step_clock.h"
#include "tessera/train/step_graph.h"
#include "tessera/train/stop.h"

namespace tessera {

/// The share of each step that this rank of the mesh is dealt: what `train` loads, and `plan` has in shape alone.
data::LoaderOptions loader_options(const Config& config, const Mesh& mesh);

/// How the loss is scaled after a step.
struct LossScaling {
  double value = 1;     ///< 1: not at all
  int64_t skipped = 0;  ///< steps of the whole run that were not applied, as their gradients were not finite
};

/// FLOPs of the matrix products in the passes of a step (nn::product_flops), as the first step of this process showed them: all steps have the same shapes.
/// What was run counts, those of a data rank's padding micro-batch included (data/loader.h): where micro-batches do not go up in the ranks, more than is
/// useful.
struct StepFlops {
  double run = 0;
  double recomputed = 0;  ///< of those, what recompute ran again
};

/// What one optimizer step yields; equal on every rank.
struct StepOutcome {
  double loss = 0;       ///< mean over all valid tokens of the global batch, before the update
  double grad_norm = 0;  ///< before clipping; where weights change in the midst of the step, the root mean square over its updates
  double lr = 0;
  LossScaling loss_scale;
  std::optional<int> not_finite;    ///< the first rank with a loss that is not
  MemoryUse memory;                 ///< of the data rank with the largest peak
  StepFlops flops;                  ///< of all ranks together
  double exposed_s = 0;             ///< seconds this rank waited for gradients that backward did not hide (not equal)
  std::vector<RankTimes> ranks;     ///< of every data rank
  std::vector<ExpertLoad> experts;  ///< of every layer with a mixture of experts
  std::optional<StopRequest> stop;  ///< some rank wishes to stop: all may, after this very step
};

/// What a step is told besides its data.
struct StepRequest {
  /// Called between backward and clipping, when `grad()` of every parameter holds the gradient of the global batch; not where weights change in the midst of
  /// the step (updates_within_steps): there is no such moment. What it changes is in the norm, but for run.graph.
  std::function<void()> gradients_ready{};
  /// Asked when the step is done: the signal by which this rank was asked to stop, 0 if it was not.
  std::function<int()> stop_signal{};
  /// Called when the step's work is asked for, before the host waits for what it yields: what it does takes no time where an accelerator computes meanwhile.
  std::function<void()> meanwhile{};
  /// Takes down when each action of this rank ran.
  pipeline::StepTimes* times = nullptr;
  int rehearsed = 0;  ///< StepOptions::rehearsed
  /// When the step began for this rank, loading included.
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
};

/// Settings that hold for the thread that runs a rank: number of threads, kernels, memory accounting. They end with this object.
class RankScope {
 public:
  /// `memory` counts what the rank allocates, and refuses what would pass run.memory_limit_bytes (then with details of what is alive).
  RankScope(const Config& config, int local_ranks, MemoryTracker memory = {});

  MemoryTracker& memory() { return memory_; }

  /// The thread's work that names no device goes to this one from now on, and what is allocated there counts. Before the first tensor there. With run.graph it
  /// goes to a stream of its own, for the default one cannot be captured. With run.deterministic libtorch's operators there repeat their bits.
  void compute_on(at::Device device);

 private:
  c10::OptionalDeviceGuard device_;
  c10::OptionalStreamGuard stream_;
  bool graph_, repeats_bits_;
  std::optional<DeterministicOperators> deterministic_;
  int64_t limit_;
  CacheHostMemory cache_;
  MemoryTracker memory_;
  TrackMemory tracking_{memory_};
  kernels::KernelChoiceGuard kernels_;
  kernels::FastProducts products_;
};

/// One rank of a run and the step that changes it. `train` loops over it; `plan` runs the very same on meta, over groups that record.
class Stepper {
 public:
  Stepper(const Config& config, const Mesh& mesh, at::Device device, RankScope& scope, const std::optional<ResumePoint>& resume = std::nullopt);

  /// One optimizer step: forward and backward of all micro-batches, clipping, update, and one small all-gather of what is reported. A batch that lies elsewhere
  /// than the model is brought there first (BatchFeed does so ahead of the step).
  ///
  /// On an accelerator the host asks for the whole step, the update included, which the device leaves out where the norm is not finite, and reads once, what is
  /// reported; with pipeline.post_validate and with a mixture of experts, once more.
  StepOutcome step(const data::StepBatch& batch, const StepRequest& request = {});

  ForwardEngine& forward_only() { return engine_.forward_only(); }
  Composition& run() { return run_; }
  const Composition& run() const { return run_; }

 private:
  /// What this rank alone knows of a step, as numbers.
  struct Own {
    MemoryUse memory;
    double stop_signal = 0;
    RankTimes times;
    StepFlops flops;
  };
  /// Losses and norm; every parameter has its gradient. By the graph, where there is one.
  StepGraph::Result gradients(const data::StepBatch& batch, const StepRequest& request, double lr);
  at::Tensor forward_backward(const data::StepBatch& batch, const StepRequest& request, double lr);
  /// What the update needs of all ranks' gradients, and their norm. `device` is that of the model.
  at::Tensor complete_gradients(const StepRequest& request, at::Device device, double lr);
  /// Whether gradients keep the loss scale until the update reads them.
  bool unscales_with_the_update(const StepRequest& request) const;
  /// Whether the update that was made while the norm was on its way is the right one; otherwise it is taken back.
  bool post_validate(const at::Tensor& norm);
  void update(const at::Tensor& norm, double lr);
  void hand_on();  ///< what an update has made, to whoever follows it
  /// Whether the optimizer has stepped: not where the gradient's norm is not finite. Throws Error naming rank and module where the run must end.
  bool has_updated(const data::StepBatch& batch, const StepOutcome& outcome);
  /// What to do about a run that cannot go on from this step.
  std::string way_on(int64_t step) const;
  StepOutcome report(const data::StepBatch& batch, const at::Tensor& losses, const at::Tensor& norm, const Own& own) const;

  const Config& config_;
  comm::Group data_group_, all_ranks_;
  RankScope& scope_;
  Composition run_;
  std::vector<bool> brings_losses_;  ///< by rank of all_ranks_: of the ranks that have the same losses (the same data rank), and those that have none, one
  Engine engine_;
  std::optional<StageUpdates> updates_;              ///< where weights change in the midst of steps
  std::optional<optim::TentativeUpdate> tentative_;  ///< pipeline.post_validate
  bool resumed_;
  optim::LearningRate learning_rate_;
  std::optional<StepFlops> flops_;  ///< of this rank
  bool still_scaled_ = false;       ///< the step's gradients: unscales_with_the_update()
  ExpertLoads experts_;
  StepClock clock_;
  std::optional<StepGraph> graph_;  ///< run.graph
  Attachment attached_;
};

}  // namespace tessera
