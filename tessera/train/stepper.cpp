#include "tessera/train/stepper.h"

#include <algorithm>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/host_read.h"
#include "tessera/optim/clip.h"

namespace tessera {

namespace {

// With run.deterministic the number of threads is part of the arithmetic, so it must not follow from how many ranks share a machine.
int threads_per_rank(const Config& config, int local_ranks) {
  if (config.run.threads) return *config.run.threads;
  if (config.run.deterministic) return 1;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, local_ranks));
}

kernels::KernelChoice choice_of(const Config& config) {
  return config.run.kernels == "reference" ? kernels::KernelChoice::Reference : kernels::KernelChoice::Auto;
}

at::Tensor norm_of(const Config& config, const std::vector<nn::NamedParameter>& parameters) {
  const auto order = config.run.deterministic ? optim::NormOrder::FixedTree : optim::NormOrder::Fast;
  return optim::global_norm(std::vector<optim::NormGroup>{{.parameters = parameters, .reduce = {}}}, order);
}

}  // namespace

data::LoaderOptions loader_options(const Config& config, const Mesh& mesh) {
  return {.seq_len = config.data.seq_len,
          .global_size = config.batch.global_size,
          .micro_size = config.batch.micro_size,
          .shuffle = config.data.shuffle,
          .seed = static_cast<uint64_t>(*config.data.seed),
          .rank = mesh.rank(data_axes()),
          .ranks = mesh.size(data_axes())};
}

RankScope::RankScope(const Config& config, int local_ranks) : kernels_(choice_of(config)) { at::set_num_threads(threads_per_rank(config, local_ranks)); }

Stepper::Stepper(const Config& config, const Mesh& mesh, at::Device device, RankScope& scope, const std::optional<ResumePoint>& resume)
    : config_(config),
      data_group_(mesh[data_axes()]),
      scope_(scope),
      run_(compose(config, mesh, device, resume)),
      engine_(make_engine(config_, run_)),
      learning_rate_(config.optim, config.run.steps) {
  if (data_group_.size() > 1) return;  // buckets are counted as gradients from the start
  for (const auto& p : run_.parameters) {
    attached_.add(nn::GradientDispatcher::of(p.tensor).listen(
        [memory = scope_.memory()](const at::Tensor& parameter) mutable { memory.retag(parameter.grad(), MemoryCategory::Gradients); }));
  }
}

StepOutcome Stepper::step(const data::StepBatch& batch, const StepRequest& request) {
  const double waited_before = comm::waited_seconds();
  const at::Tensor losses = engine_->forward_backward(batch);
  if (request.gradients_ready) request.gradients_ready();
  const at::Tensor norm = norm_of(config_, run_.parameters);
  if (config_.optim.max_grad_norm > 0) optim::clip_gradients(run_.parameters, norm, config_.optim.max_grad_norm);
  const double lr = learning_rate_.at(batch.step);
  run_.optimizer->step(lr);
  const double waited = comm::waited_seconds() - waited_before;
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - request.start;
  StepOutcome outcome = report(batch, losses, norm,
                               {.peak_bytes = static_cast<double>(scope_.memory().peak()),
                                .stop_signal = request.stop_signal ? static_cast<double>(request.stop_signal()) : 0,
                                .times = {.compute_s = passed.count() - waited, .wait_s = waited}});
  outcome.lr = lr;
  return outcome;
}

StepOutcome Stepper::report(const data::StepBatch& batch, const at::Tensor& losses, const at::Tensor& norm, const Own& own) const {
  comm::CallSite site("report");
  MemoryScope scope(MemoryCategory::Comm);
  // One row per rank: its micro-batches' losses, the norm, and what it alone knows. Adding the losses up by their global index on every host gives the same
  // bits in any layout. That a rank wishes to stop travels here, too, so that all ranks stop after the same step, at the cost of no further message.
  const auto options = losses.options().dtype(at::kDouble);
  std::vector<at::Tensor> parts{losses.to(at::kDouble), norm.reshape({1}).to(options.device())};
  for (const double number : {own.peak_bytes, own.stop_signal, own.times.compute_s, own.times.wait_s}) parts.push_back(at::full({1}, number, options));
  const at::Tensor mine = at::cat(parts);
  const int64_t columns = mine.numel(), num_losses = losses.numel();
  const int64_t ranks = data_group_.size();
  const at::Tensor all = at::empty({ranks * columns}, options);
  comm::all_gather(data_group_, all, mine);
  const auto rows = host_read_all(all, 0.0);

  StepOutcome outcome;
  double sum = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const double* row = rows.data() + r * columns;
    for (int64_t i = 0; i < num_losses; ++i) sum += row[i];
    const double* known = row + num_losses + 1;  // behind the norm, as Own has them
    outcome.peak_bytes = std::max(outcome.peak_bytes, static_cast<int64_t>(known[0]));
    const int rank = data_group_.world_rank(static_cast<int>(r));
    if (known[1] != 0 && !outcome.stop) outcome.stop = {.rank = rank, .signal = static_cast<int>(known[1])};
    outcome.ranks.push_back({.rank = rank, .compute_s = known[2], .wait_s = known[3]});
  }
  outcome.loss = sum / static_cast<double>(batch.global_valid_tokens);
  outcome.grad_norm = rows[static_cast<size_t>(num_losses)];
  outcome.exposed_s = run_.synchronizer->statistics().exposed_s;
  return outcome;
}

}  // namespace tessera
