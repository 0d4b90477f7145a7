#include <string>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/config/optim_groups.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"

// In an asynchronous pipeline each stage updates by itself, when it has a gradient: at no moment do all stages have the gradients of the same samples. What
// needs such a moment is refused here.

namespace tessera {

bool updates_within_steps(const Config& config, int pipeline_ranks) { return pipeline_ranks > 1 && is_asynchronous(config.pipeline.schedule); }

namespace detail {

void validate_asynchronous(const Config& config, int stages) {
  if (!updates_within_steps(config, stages)) return;
  const std::string with = concat("with pipeline.schedule = ", config.pipeline.schedule);
  const std::string or_synchronous = ", or a schedule that updates where a step ends: pipeline.schedule = 1f1b";
  require(config.zero.stage == 0, "zero.stage = ", config.zero.stage, ": shards weights between their uses, and ", with,
          " a rank keeps several versions of them whole; set zero.stage = 0", or_synchronous);
  require(config.optim.max_grad_norm == 0, "optim.max_grad_norm = ", config.optim.max_grad_norm, ": is of the norm over all stages, and ", with,
          " each stage updates when it has its own gradient; set optim.max_grad_norm = 0", or_synchronous);
  require(config.precision.loss_scale == "none", "precision.loss_scale = ", config.precision.loss_scale, ": skips a step that has overflowed on any rank, and ",
          with, " other stages have updated by then; set precision.loss_scale = none", or_synchronous);
  require(!config.run.deterministic, "run.deterministic = true: promises the same bits for any number of data ranks, and ", with,
          " which samples an update sums depends on that number; set run.deterministic = false (the same layout repeats its bits)", or_synchronous);
  // Elsewhere the last stage needs what an update makes only after the first stage has brought its term: docs/pipeline-schedules.md.
  const bool never_behind = config.pipeline.schedule == "pipedream" && !config.pipeline.vertical_sync;
  require(
      !config.model.tie_embeddings || !never_behind, "model.tie_embeddings = true: ", with, " the last stage takes each micro-batch with weights that all ",
      "before it have updated, and of a shared weight the first stage has its term of the last micro-batch's gradient p - 1 backwards later: one would wait ",
      "for the other every time; set pipeline.vertical_sync = true, pipeline.schedule = pipedream_2bw, or set model.tie_embeddings = false", or_synchronous);
}

void validate_tied_update(const Config& config, int stages) {
  if (stages == 1 || !config.model.tie_embeddings || config.zero.stage == 0) return;
  require(!uses_optimizer(config.optim, {"adafactor"}),
          "optim.name = adafactor: scales an update by sums over the whole tensor, which ranks add up in the order of their ",
          "parts; with model.tie_embeddings = true the first and the last stage cut theirs at other places, and their copies would part in the last bit; set ",
          "zero.stage = 0, model.tie_embeddings = false or another optim.name");
}

}  // namespace detail
}  // namespace tessera
