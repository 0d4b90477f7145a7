#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/data/loader.h"
#include "tessera/train/compose.h"
#include "tessera/train/schedule.h"

namespace tessera {

/// Forward passes without gradients, in evaluation mode, of a model of which a rank may hold a part: validation, replays, `tessera eval`.
class ForwardEngine {
 public:
  explicit ForwardEngine(LanguageModel& model) : model_(model) {}

  /// The summed loss of a micro-batch, fp32 []; see LanguageModel::forward for shapes. The same on all ranks that work on the same samples.
  at::Tensor loss_sum(const at::Tensor& tokens, const at::Tensor& labels);
  at::Tensor logits(const at::Tensor& tokens);

 private:
  LanguageModel& model_;
};

/// Turns a rank's micro-batches into the gradient of the global batch, in the order of a schedule: it announces each action to what synchronizes gradients,
/// and knows nothing of how those meet. The loop does not know which schedule that is.
class Engine {
 public:
  using MakeSchedule = std::function<Schedule(size_t micro_batches)>;

  Engine(const Config& config, Composition& run, MakeSchedule schedule = one_after_the_other)
      : seed_(static_cast<uint64_t>(config.run.seed)), run_(run), schedule_(std::move(schedule)) {}

  /// Forward and backward of every micro-batch; afterwards `grad()` of each parameter holds the gradient of the mean loss over all valid tokens of the global
  /// batch: the same bits for every schedule. Returns the summed loss of each micro-batch, fp32 [micro-batches of this rank], 0 for padding; never read on the
  /// host here. Throws InternalError for a schedule that leaves something out.
  at::Tensor forward_backward(const data::StepBatch& batch);

  ForwardEngine forward_only() const { return ForwardEngine(*run_.model); }

 private:
  struct InFlight;

  uint64_t seed_;
  Composition& run_;
  MakeSchedule schedule_;
};

}  // namespace tessera
