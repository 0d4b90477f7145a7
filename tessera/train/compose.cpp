#include "tessera/train/compose.h"

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data_parallel/batch_coupling.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/meta.h"
#include "tessera/precision/policy.h"
#include "tessera/train/progress.h"

namespace tessera {

namespace {

void load_weights(const Config& config, const std::optional<ResumePoint>& resume, Composition& run) {
  if (resume) {
    checkpoint::load(resume->folder, resume->manifest, checkpoint::training_tensors(*run.model, run.optimizer.get()), {.verify = config.checkpoint.verify});
    checkpoint::restore_optimizer(resume->manifest.optimizer, *run.optimizer);
    return;
  }
  if (config.model.from_hf.empty()) return;
  checkpoint::load_hugging_face(config.model.from_hf, config.model, checkpoint::parameter_tensors(*run.model));
}

void refuse_coupled_batches(const Config& config, const torch::nn::Module& model, int ranks) {
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const auto report = batch_coupling_report(model, ranks, chunk(micro_batches, ranks, 0).second);
  if (report.empty()) return;
  require(config.run.batch_coupled == "report", "run.batch_coupled = refuse: ", report);
  log().warn("{}", report);
}

}  // namespace

const std::vector<std::string>& data_axes() {
  static const std::vector<std::string> axes{"dp_replicate", "dp_shard"};
  return axes;
}

Composition compose(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume) {
  Composition run;
  run.model = on_meta([&] { return make_model(config.model); });
  precision::apply(*run.model, precision::policy_from(config.precision));
  materialize(*run.model, static_cast<uint64_t>(config.run.seed), device);
  run.parameters = nn::unique_parameters(*run.model);
  run.optimizer = optim::make_optimizer(config.optim, run.parameters);
  if (device != at::kMeta) load_weights(config, resume, run);

  const comm::Group data = mesh[data_axes()];
  refuse_coupled_batches(config, *run.model, data.size());
  if (config.run.deterministic) {
    TreeReductionOptions options;
    options.num_micro_batches = config.batch.global_size / config.batch.micro_size;
    options.buffers = BufferBroadcast::AtStart;
    run.synchronizer = std::make_unique<TreeReduction>(*run.model, data, options);
  } else {
    DdpOptions options;
    options.sizes.bucket_bytes = config.zero.bucket_bytes;
    options.buffers = BufferBroadcast::AtStart;  // our models' buffers are tables that no step changes
    // The plan orders the sums of a bucket, so a run that resumes in the same layout takes up the saved one.
    if (resume) options.plan = bucket_plan_of(resume->manifest.progress, data.size(), resume->folder.string());
    auto ddp = std::make_unique<DistributedDataParallel>(*run.model, data, options);
    run.buckets = ddp.get();
    run.synchronizer = std::move(ddp);
  }
  return run;
}

}  // namespace tessera
