#include "tessera/train/compose.h"

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data_parallel/batch_coupling.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/meta.h"
#include "tessera/precision/policy.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/progress.h"

namespace tessera {

namespace {

void load_weights(const Config& config, const std::optional<ResumePoint>& resume, Composition& run) {
  if (resume) {
    checkpoint::load(resume->folder, resume->manifest, checkpoint::training_tensors(*run.model, run.optimizer.get()),
                     {.verify = config.checkpoint.verify, .ignore_prefixes = {hook_prefix}});
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

std::shared_ptr<CommunicationHook> make_hook(const Config& config, const std::optional<ResumePoint>& resume) {
  const CommConfig& comm = config.comm;
  if (comm.compression == "bf16") return std::make_shared<Bf16Hook>();
  if (comm.compression == "fp16") return std::make_shared<Fp16Hook>();
  if (comm.compression != "powersgd") return nullptr;
  PowerSgdOptions options{.rank = comm.powersgd_rank, .start = comm.powersgd_start, .seed = static_cast<uint64_t>(config.run.seed)};
  if (resume) options.steps_done = resume->manifest.step;
  return std::make_shared<PowerSgd>(options);
}

/// The state of the run's compression, from a checkpoint that may have been made with another, or none.
void resume_compression(const Config& config, const comm::Group& data, const std::optional<ResumePoint>& resume, const Composition& run) {
  std::vector<std::string> remarks;
  if (config.comm.compression != "none" && data.size() == 1) {
    remarks.push_back("comm.compression = " + config.comm.compression + ": one data rank reduces nothing, so nothing is compressed");
  }
  if (resume) {
    for (auto& remark : load_hook_state(run.hook.get(), *resume, data, config.checkpoint.verify)) remarks.push_back(std::move(remark));
  }
  if (data.rank() > 0) return;
  for (const auto& remark : remarks) log().warn("{}", remark);
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
    options.hook = run.hook = make_hook(config, resume);
    auto ddp = std::make_unique<DistributedDataParallel>(*run.model, data, options);
    run.buckets = ddp.get();
    run.synchronizer = std::move(ddp);
  }
  if (device != at::kMeta) resume_compression(config, data, resume, run);
  return run;
}

}  // namespace tessera
