#include "tessera/train/stepper.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/host_read.h"
#include "tessera/core/log.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/memory/memory.h"
#include "tessera/mesh/positions.h"
#include "tessera/mesh/roles.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/sharing.h"
#include "tessera/optim/clip.h"
#include "tessera/precision/gradient_dtype.h"
#include "tessera/precision/non_finite.h"
#include "tessera/precision/policy.h"
#include "tessera/train/batch_feed.h"
#include "tessera/train/threads.h"

// A Stepper is one rank of a run and the one step that changes it: gradients of the global batch, their norm, the update, and what all ranks report. Where
// steps come from and what becomes of them it does not know, so that train loops over it, plan runs it on meta, and verify two of them side by side. All that
// ranks tell each other of a step goes in one message, the wish to stop included: whoever reads it stops after the same step.

namespace tessera {

namespace {

constexpr int64_t kLostLosses = 2;  // in a row, after which a run with a loss scale stops

kernels::KernelChoices choices_of(const ByPattern& kernels) {
  using kernels::KernelChoice;
  const auto choice_of = [](const std::string& choice) { return choice == "reference" ? KernelChoice::Reference : KernelChoice::Auto; };
  const auto& named = kernels.by_pattern;
  const auto rest = named.find("*");
  kernels::KernelChoices choices(choice_of(rest == named.end() ? kernels.everywhere : rest->second));
  for (const auto& [name, choice] : named) {
    if (const auto kernel = kernels::kernel_named(name)) choices.set(*kernel, choice_of(choice));
  }
  return choices;
}

/// Whose rows lie on the ranks of `elements`. `device` is that of the model, whose engine adds up. `meanwhile` runs while it does.
optim::NormGroup norm_group(std::vector<nn::NamedParameter> parameters, const comm::Group& elements, at::Device device,
                            const std::function<void()>& meanwhile) {
  optim::NormGroup group{.parameters = std::move(parameters), .reduce = {}};
  // A rank may count nothing (a last stage that is a tied head, on all of its tensor ranks but the first): its zero lies where the others' sums do.
  if (group.parameters.empty()) group.parameters.push_back({.name = "nothing", .tensor = at::empty({0}, at::TensorOptions(device)), .aliases = {}});
  if (elements.size() == 1) return group;
  group.reduce = [elements, device, meanwhile](at::Tensor& sums) {
    const comm::CallSite site("norm");
    const at::Tensor message = sums.to(device);
    comm::Pending on_its_way = comm::all_reduce_async(elements, message);
    if (meanwhile) meanwhile();
    on_its_way.wait();
    if (!message.is_same(sums)) sums.copy_(message);
  };
  return group;
}

at::Tensor norm_of(const Config& config, const Composition& run, at::Device device, const std::function<void()>& meanwhile) {
  // A rank's own rows are added up in a tree in any case. Where layers are cut, it is that of this mesh.tp, as the products' sums are, for any data ranks.
  // Stages have different rows: each adds its own up.
  const auto order = config.run.deterministic && !run.tensor && run.parts.empty() ? optim::NormOrder::FixedTree : optim::NormOrder::Fast;
  const auto counted = nn::counted_once(run.updated);
  if (!config.run.deterministic || config.model.experts == 0) return optim::global_norm({norm_group(counted, run.elements, device, meanwhile)}, order);
  // Experts may lie on ranks that have all else alike. They are added up by themselves wherever they lie: one order for one device, too.
  const auto of_experts = experts_of(*run.model, true);
  std::vector<nn::NamedParameter> rest, experts;
  for (const auto& parameter : counted) (of_experts(parameter) ? experts : rest).push_back(parameter);
  return optim::global_norm({norm_group(std::move(rest), run.elements, device, meanwhile), norm_group(std::move(experts), run.expert_elements, device, {})},
                            order);
}

/// Of the ranks that hold the last stage, and so have the losses, one of those that have the same.
std::vector<bool> that_bring_losses(const Mesh& mesh, const MeshRoles& roles, int last_stage, const comm::Group& group) {
  const std::vector<int> of_layers = ranks_along(mesh.shape(), roles.layers.names), of_stages = ranks_along(mesh.shape(), roles.stages.names);
  std::vector<bool> brings;
  for (int member = 0; member < group.size(); ++member) {
    const auto rank = static_cast<size_t>(group.world_rank(member));
    brings.push_back(of_layers[rank] == 0 && of_stages[rank] == last_stage);
  }
  return brings;
}

/// Numbers of the host on the device, which takes them from pinned memory while the host goes on.
at::Tensor on_device(const std::vector<double>& numbers, const at::TensorOptions& options) {
  const at::Device device = options.device();
  const auto size = static_cast<int64_t>(numbers.size());
  if (device.is_meta()) return at::empty({size}, options);
  const at::Tensor host = at::empty({size}, options.device(at::kCPU).pinned_memory(!device.is_cpu()));
  std::copy(numbers.begin(), numbers.end(), host.mutable_data_ptr<double>());
  return host.to(device, /*non_blocking=*/true);
}

MemoryByCategory bytes_at(const double* numbers) {
  MemoryByCategory bytes{};
  for (size_t c = 0; c < bytes.size(); ++c) bytes[c] = static_cast<int64_t>(numbers[c]);
  return bytes;
}

void require_finite_updates(const data::StepBatch& batch, double norm) {
  if (std::isfinite(norm)) return;
  throw Error(
      detail::concat("step ", batch.step,
                     ": the gradient of one of its updates is not finite, and stages have gone on from it; resume from the last checkpoint with a lower "
                     "optim.lr"));
}

RankScope& computing_on(at::Device device, RankScope& scope) {
  scope.compute_on(device);
  return scope;
}

}  // namespace

data::LoaderOptions loader_options(const Config& config, const Mesh& mesh) {
  const MeshRoles roles = mesh_roles(config);
  const PipelineLayout stages = pipeline_layout(config, mesh.size(roles.stages));
  const auto holder_of = [rank = mesh.rank(roles.stages)](int holder) { return holder == rank; };
  return {.seq_len = config.data.seq_len,
          .global_size = config.batch.global_size,
          .micro_size = config.batch.micro_size,
          .shuffle = config.data.shuffle,
          .seed = static_cast<uint64_t>(*config.data.seed),
          .rank = mesh.rank(roles.batch),
          .ranks = mesh.size(roles.batch),
          .reads = {.tokens = holder_of(stages.rank_of.front()), .labels = holder_of(stages.rank_of.back()), .padding = config.model.experts > 0},
          .columns = {.rule = column_rule(config, mesh.size(roles.columns)), .rank = mesh.rank(roles.columns), .ranks = mesh.size(roles.columns)},
          .packed = config.data.documents != "none"};
}

RankScope::RankScope(const Config& config, int local_ranks, MemoryTracker memory)
    : graph_(config.run.graph),
      repeats_bits_(config.run.deterministic),
      limit_(config.run.memory_limit_bytes),
      memory_(std::move(memory)),
      kernels_(choices_of(config.run.kernels)),
      products_(!kernels::takes_reference(kernels::Kernel::fp32_products)) {
  at::set_num_threads(threads_per_rank(config.run, local_ranks));
  if (limit_ == 0) return;
  memory_.set_limit(limit_);
  memory_.keep_details();
}

void RankScope::compute_on(at::Device device) {
  track_device(device.type());
  memory_.compute_on(device);
  if (device.is_cpu() || device.is_meta()) return;
  device_.reset_device(device);
  if (graph_) stream_.reset_stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  if (repeats_bits_) deterministic_.emplace();
  if (limit_ > 0) limit_device(device, limit_);
}

Stepper::Stepper(const Config& config, const Mesh& mesh, at::Device device, RankScope& scope, const std::optional<ResumePoint>& resume)
    : config_(config),
      data_group_(mesh[mesh_roles(config).tokens]),
      all_ranks_(mesh[mesh_roles(config).world]),
      scope_(computing_on(device, scope)),
      run_(compose(config, mesh, device, resume)),
      brings_losses_(that_bring_losses(mesh, mesh_roles(config), run_.rank_of_stage.back(), all_ranks_)),
      engine_(config_, run_),
      resumed_(resume.has_value()),
      learning_rate_(config.optim, config.run.steps),
      experts_(config_, mesh, run_),
      clock_(run_.device) {
  if (config.run.graph) graph_.emplace(run_.device, scope_.memory());
  if (updates_within_steps(config, run_.pipeline.size())) {
    updates_.emplace(run_);
  } else if (config.pipeline.post_validate && run_.pipeline.size() > 1) {
    tentative_.emplace(*run_.optimizer, run_.updated);
  }
  if (const auto dtype = precision::policy_from(config.precision).gradient_dtype()) {
    using precision::AddedUp;
    const bool in_slices = config.zero.stage == 3;
    precision::take_gradients_in(*dtype, run_.parameters, config.run.deterministic || in_slices ? AddedUp::Elsewhere : AddedUp::Here);
    if (in_slices && config_.offload.params.is("device")) precision::take_gradients_in(*dtype, run_.alone, AddedUp::Here);
  }
  // What lies in buckets or slices is counted as gradients from the start.
  for (const auto& p : run_.alone) {
    attached_.add(nn::GradientDispatcher::of(p.tensor).listen(
        [memory = scope_.memory()](const at::Tensor& parameter) mutable { memory.retag(parameter.grad(), MemoryCategory::Gradients); }));
  }
}

StepOutcome Stepper::step(const data::StepBatch& batch, const StepRequest& request) {
  if (!lie_on(batch.micro_batches, run_.device)) {
    data::StepBatch there = batch;
    move_to(there.micro_batches, run_.device);
    return step(there, request);
  }
  const comm::ExposedTime::Scope asking = clock_.begin(request.start);
  const double lr = learning_rate_.at(batch.step - run_.loss_scale.skipped());  // the schedule waits for steps that were skipped
  const auto [losses, norm] = gradients(batch, request, lr);
  if (!updates_) {
    mark_memory("update");
    if (!post_validate(norm)) update(norm, lr);
    hand_on();
  }
  experts_.meet();
  const Own own{
      .memory = {.peak = scope_.memory().peak_by_category(), .current = scope_.memory().current_by_category(), .host = scope_.memory().host_peak_by_category()},
      .stop_signal = request.stop_signal ? static_cast<double>(request.stop_signal()) : 0,
      .times = clock_.end(),
      .flops = *flops_};
  if (request.meanwhile) request.meanwhile();
  StepOutcome outcome = report(batch, losses, norm, own);
  clock_.has_read();
  const bool updated = has_updated(batch, outcome);
  if (updated) experts_.balance();
  if (updated && outcome.not_finite) {  // a loss may be lost where its gradient is not
    throw Error(
        detail::concat("step ", batch.step, ": the loss of rank ", *outcome.not_finite, " is not finite, though the gradient is; ", way_on(batch.step)));
  }
  outcome.lr = lr;
  outcome.experts = experts_.read();
  outcome.loss_scale = {.value = run_.loss_scale.value(), .skipped = run_.loss_scale.skipped()};
  return outcome;
}

StepGraph::Result Stepper::gradients(const data::StepBatch& batch, const StepRequest& request, double lr) {
  const auto passes = [&](const data::StepBatch& of, const StepRequest& asked) -> StepGraph::Result {
    const at::Tensor losses = forward_backward(of, asked, lr);
    return {.losses = losses, .norm = updates_ ? updates_->norm(losses.device()) : complete_gradients(asked, losses.device(), lr)};
  };
  if (!graph_ || request.times) return passes(batch, request);
  StepRequest asked = request;
  asked.gradients_ready = {};
  auto result = graph_->run(batch, run_.updated, [&](const data::StepBatch& of) { return passes(of, asked); });
  if (request.gradients_ready) request.gradients_ready();
  return result;
}

at::Tensor Stepper::complete_gradients(const StepRequest& request, at::Device device, double lr) {
  const HostMemory beside(run_.offloaded);
  if (run_.terms.size() > 1) {
    const comm::CallSite site("context_parallel.gradients");
    nn::sum_gradients(run_.terms, run_.parameters);
  }
  nn::sum_terms(run_.layers, run_.updated, run_.cut);
  if (run_.tied) run_.tied->sum();
  still_scaled_ = unscales_with_the_update(request);
  if (!still_scaled_) run_.loss_scale.unscale(run_.updated);
  if (request.gradients_ready) request.gradients_ready();
  at::Tensor norm = norm_of(config_, run_, device, tentative_ ? [this, lr] { tentative_->make(lr); } : std::function<void()>());
  return still_scaled_ ? norm.div_(run_.loss_scale.value()) : norm;
}

/// Where nobody looks at gradients between, and it makes no difference to a bit: powers of two.
bool Stepper::unscales_with_the_update(const StepRequest& request) const {
  int exponent = 0;
  const double value = run_.loss_scale.value();
  return value != 1 && std::frexp(value, &exponent) == 0.5 && !request.gradients_ready && !tentative_ && !graph_ && run_.updates_in_one_pass;
}

bool Stepper::post_validate(const at::Tensor& norm) {
  if (!tentative_ || !tentative_->made()) return false;
  const double most = config_.optim.max_grad_norm;
  const double read = host_read(most <= 0 ? norm : at::where(at::isfinite(norm), optim::clip_factor(norm, most), norm), 1);  // in one read
  const bool stands = most <= 0 ? std::isfinite(read) : read == 1;
  stands ? tentative_->keep() : tentative_->take_back();
  return stands;
}

void Stepper::update(const at::Tensor& norm, double lr) {
  const HostMemory beside(run_.offloaded);
  const double most = config_.optim.max_grad_norm;
  at::Tensor scale = most > 0 ? optim::clip_factor(norm, most) : at::Tensor();
  if (still_scaled_) scale = (scale.defined() ? scale : at::ones_like(norm)).div_(run_.loss_scale.value());
  run_.optimizer->step(lr, optim::not_finite(norm), scale);
}

void Stepper::hand_on() {
  const HostMemory beside(run_.offloaded);
  if (run_.tied) run_.tied->follow();
  run_.synchronizer->after_update();
}

at::Tensor Stepper::forward_backward(const data::StepBatch& batch, const StepRequest& request, double lr) {
  const StepOptions options{
      .met = [this] { updates_->met(); }, .update = [this, lr] { updates_->update(lr); }, .times = request.times, .rehearsed = request.rehearsed};
  if (flops_) return engine_.forward_backward(batch, options);
  const auto counter = std::make_shared<nn::FlopCounter>();
  at::Tensor losses;
  {
    const nn::OperatorScope counted(counter);
    losses = engine_.forward_backward(batch, options);
  }
  flops_ = {.run = counter->flops() - counter->flops_beside(), .recomputed = counter->recomputed_flops()};
  return losses;
}

bool Stepper::has_updated(const data::StepBatch& batch, const StepOutcome& outcome) {
  if (updates_) {
    require_finite_updates(batch, outcome.grad_norm);
    return true;
  }
  using Decision = precision::LossScale::Decision;
  auto& scale = run_.loss_scale;
  const double used = scale.value();
  const Decision decision = scale.after_backward(std::isfinite(outcome.grad_norm), outcome.not_finite.has_value());
  if (decision == Decision::Update) return true;
  run_.optimizer->take_back_count();
  // What is reported is the loss before it is scaled, so no lower scale makes it a number. One batch may overflow where the next does not; two are the weights.
  const bool lost = scale.enabled() && scale.lost_in_a_row() >= kLostLosses;
  if (decision == Decision::Stop || lost) {
    // The weights are still those that the step began with, so the passes may run again, this time under watch.
    const precision::NonFiniteWatch watch(*run_.model, run_.parameters);
    engine_.forward_backward(batch);
    const std::string where = precision::describe_non_finite(watch, run_.parts.empty() ? data_group_ : all_ranks_);
    std::string tried;
    if (lost) {
      tried = detail::concat(", and neither is the loss, which no precision.loss_scale changes, for ", scale.lost_in_a_row(), " steps in a row");
    } else if (scale.enabled()) {
      tried = detail::concat(" for ", scale.skipped_in_a_row(), " steps in a row (precision.max_skips), at a loss scale of ", format_float(used));
    }
    const bool fixed = scale.enabled() && config_.precision.loss_scale != "dynamic" && !lost;
    const std::string way = fixed ? "set a lower precision.loss_scale, or dynamic, which finds one"
                                  : way_on(batch.step) + (config_.optim.max_grad_norm > 0 ? "" : ", or with optim.max_grad_norm");
    throw Error(detail::concat("step ", batch.step, ": the gradient's norm is not finite", tried, ": ", where, "; the step was not applied: ", way));
  }
  if (data_group_.rank() == 0) {
    log().warn("step {}: the gradient's norm is not finite at a loss scale of {}: the step is skipped, and the next one scales by {}", batch.step,
               format_float(used), format_float(scale.value()));
  }
  return false;
}

std::string Stepper::way_on(int64_t step) const {
  const auto& [every, z_loss] = std::tie(config_.checkpoint.every, config_.loss.z_loss);
  const std::string smaller = z_loss > 0 ? detail::concat("a smaller loss.z_loss (it is ", format_float(z_loss), ")") : std::string();
  if (step <= std::max<int64_t>(run_.loss_scale.skipped_in_a_row(), 1) && !resumed_)
    return smaller.empty() ? "no weight has been updated yet: look at those it began with, and at [precision]" : "start again with " + smaller;
  const bool saved = resumed_ || (!config_.checkpoint.dir.empty() && every > 0 && step > every);
  return detail::concat(saved ? "resume from the last checkpoint" : "start again", " with a lower optim.lr", smaller.empty() ? "" : ", or " + smaller);
}

StepOutcome Stepper::report(const data::StepBatch& batch, const at::Tensor& losses, const at::Tensor& norm, const Own& own) const {
  comm::CallSite site("report");
  MemoryScope scope(MemoryCategory::Comm);
  // One row per rank: its micro-batches' losses, the norm, and what it alone knows. Adding the losses up by their global index on every host gives the same
  // bits in any layout. That a rank wishes to stop travels here, too, so that all ranks stop after the same step, at the cost of no further message.
  const auto options = losses.options().dtype(at::kDouble);
  std::vector<double> numbers{own.stop_signal, own.times.compute_s, own.times.wait_s, own.flops.run, own.flops.recomputed};
  for (const auto* bytes : {&own.memory.peak, &own.memory.current, &own.memory.host}) numbers.insert(numbers.end(), bytes->begin(), bytes->end());
  const at::Tensor mine = at::cat({losses.to(at::kDouble), norm.reshape({1}).to(options.device()), on_device(numbers, options)});
  const int64_t columns = mine.numel(), num_losses = losses.numel();
  const int64_t ranks = all_ranks_.size();
  const at::Tensor all = at::empty({ranks * columns}, options);
  comm::all_gather(all_ranks_, all, mine);
  const auto rows = host_read_all(all, 0.0);

  StepOutcome outcome;
  double sum = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const double* row = rows.data() + r * columns;
    for (int64_t i = 0; i < num_losses; ++i) {
      if (brings_losses_[static_cast<size_t>(r)]) sum += row[i];
      if (!std::isfinite(row[i]) && !outcome.not_finite) outcome.not_finite = all_ranks_.world_rank(static_cast<int>(r));
    }
    const double* known = row + num_losses + 1;  // behind the norm, as `numbers` has them
    const int rank = all_ranks_.world_rank(static_cast<int>(r));
    if (known[0] != 0 && !outcome.stop) outcome.stop = {.rank = rank, .signal = static_cast<int>(known[0])};
    outcome.ranks.push_back({.rank = rank, .compute_s = known[1], .wait_s = known[2]});
    outcome.flops.run += known[3];
    outcome.flops.recomputed += known[4];
    const double* const bytes = known + 5;
    const MemoryUse memory{.peak = bytes_at(bytes), .current = bytes_at(bytes + num_memory_categories), .host = bytes_at(bytes + 2 * num_memory_categories)};
    if (r == 0 || total_of(memory.peak) > total_of(outcome.memory.peak)) outcome.memory = memory;
  }
  outcome.loss = sum / static_cast<double>(batch.global_valid_tokens);
  outcome.grad_norm = rows[static_cast<size_t>(num_losses)];
  outcome.exposed_s = engine_.exposed_s();
  return outcome;
}

}  // namespace tessera
