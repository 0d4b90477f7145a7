#include "tessera/verify/verify.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/testing.h"
#include "tessera/config/settle_batch.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/mesh/roles.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/compose.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/progress.h"
#include "tessera/train/recompute_blocks.h"
#include "tessera/train/stepper.h"
#include "tessera/verify/bounds.h"
#include "tessera/verify/difference.h"
#include "tessera/verify/meeting.h"
#include "tessera/verify/outputs.h"
#include "tessera/verify/routing.h"

// Two runs that only start alike drift apart by rounding, and after a few steps any bound is too tight or too wide. So the device follows: once a kind of
// tensor is compared, it takes over the layout's values, and each comparison is of one step's arithmetic from equal beginnings. Ranks are threads and show
// views of their tensors, which are read while they wait: nothing is gathered, so no collective that might itself be wrong stands between the two sides.

namespace tessera {

namespace {

using checkpoint::SlicedTensor;

/// The most keys that a query sees.
int64_t most_keys(const Config& config) { return config.model.sliding_window == 1 ? 1 : config.data.seq_len; }

/// The most that a query sees from which a loss of this step follows: of packed documents, the longest up to its last label.
int64_t most_keys(const Config& config, const data::StepBatch& batch) {
  int64_t most = 1;
  for (const data::MicroBatch& micro : batch.micro_batches) {
    if (!micro.document_ids.defined() || !micro.labels.defined() || micro.labels.sizes() != micro.document_ids.sizes()) return most_keys(config);
    const at::Tensor own = at::arange(1, micro.document_ids.size(1) + 1, micro.document_ids.options()) - micro.document_ids;
    const at::Tensor seen = own.masked_select(micro.labels != data::ignored_label);
    if (seen.numel() > 0) most = std::max(most, seen.max().item<int64_t>());
  }
  return std::min(most, most_keys(config));
}

/// What stays of a configuration on one device: all that decides the arithmetic.
Config reference_of(Config config) {
  const double timeout_s = config.comm.timeout_s;
  config.mesh = {};
  config.mesh.dp_replicate = 1;
  config.comm = {};
  config.comm.timeout_s = timeout_s;
  config.zero = {};
  config.tensor = {};
  config.context = {};
  config.pipeline = {};
  // Tiles sum a weight's gradient in parts: under run.deterministic, where bits are compared, they are a part of the arithmetic.
  config.recompute = {.ffn_tile = config.run.deterministic ? config.recompute.ffn_tile : 0};
  // A delayed update computes with other weights on purpose, on one device as on many.
  const bool delayed = config.offload.delayed_update;
  config.offload = {};
  if (delayed) config.offload.optimizer = "host";
  config.offload.delayed_update = delayed;
  return config;
}

/// Of sizes that no machine has, the product stops short of what 64 bits hold.
int64_t product(const MeshConfig& mesh) {
  constexpr int64_t beyond_all = std::numeric_limits<int>::max();
  int64_t ranks = 1;
  for (const int size : {mesh.dp_replicate.value_or(1), mesh.dp_shard.value_or(1), mesh.pp, mesh.cp, mesh.tp}) ranks = std::min(ranks * size, beyond_all);
  return ranks;
}

int checked_world(const Config& layout) {
  constexpr int64_t kMostThreads = 256;
  const int64_t world = product(layout.mesh);
  require(world <= kMostThreads, "--mesh: ", world, " ranks would run as threads of this process, which takes at most ", kMostThreads,
          "; verify a smaller layout of the same axes");
  const auto& backend = layout.comm.backend;
  require(backend == "auto" || backend == "shm" || backend == "gloo", "comm.backend = ", backend,
          ": verify runs its ranks as threads of one process, which auto, shm and gloo carry; set comm.backend to one of them");
  require(layout.comm.compression != "powersgd",
          "comm.compression = powersgd: it trains with other gradients on purpose, so there is nothing to compare; set "
          "comm.compression = none to verify the layout");
  return static_cast<int>(world);
}

at::Device device_for(const Config& config, int rank, int ranks) {
  const std::string& wanted = config.run.device;
  if (wanted == "auto" && num_devices(at::kCUDA) < ranks) return at::kCPU;
  require(ranks == 1 || !wanted.starts_with("cuda:"), "run.device = ", wanted, ": verify runs its ", ranks,
          " ranks as threads of one process, and threads cannot share a device; set run.device = cuda, with a device for each, or cpu");
  return resolve_device(wanted, {.rank = rank, .ranks = ranks});
}

bool finite(const std::vector<SlicedTensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& held) { return std::isfinite(largest_entry(held.tensor)); });
}

/// What one rank shows at a meeting: views of its tensors, read while it waits.
struct Shown {
  std::vector<SlicedTensor> tensors;
  StepOutcome outcome;
};

/// Of a model that is cut into stages, what gives its output on this rank, if anything does.
nn::Module* end_of(Composition& run) { return run.parts.empty() || !run.parts.back().module->gives_loss() ? nullptr : run.parts.back().module.get(); }

/// Weights with the update that is under way beside them (offload.delayed_update).
std::vector<SlicedTensor> delayed_weights(const Composition& run) {
  std::vector<SlicedTensor> weights;
  for (const auto& each : run.optimizer->state_to_save()) {
    if (each.state == optim::kNextState) weights.push_back({each.tensor, each.slice});
  }
  return weights;
}

/// What is refused in the midst of a step is a run that fails: what could be seen of the input has been.
void failing_as_a_step(const std::function<void()>& step) {
  try {
    step();
  } catch (const ConfigError& refusal) {
    throw Error(refusal.what());
  }
}

class Verification {
 public:
  Verification(const Config& config, const MeshConfig& mesh, const VerifyOptions& options);
  VerifyReport run();

 private:
  /// One side of the comparison: a rank of the layout, or the one device.
  struct Side;
  void run_rank(comm::World& world);
  void run_reference();
  data::StepBatch next_batch(Side& side) const;
  /// Of a micro-batch: one where its windows are packed.
  int64_t rows() const { return layout_.data.documents == "none" ? layout_.batch.micro_size : 1; }
  TapOptions tapped(nn::Module* instead) const {
    return {.instead = instead,
            .column_axis = column_axis_,
            .routes_parts = routes_parts_,
            .unheard = layout_.recompute.ffn_tile > 0 ? tiled_layers(layout_) + ".*" : ""};
  }
  std::vector<std::vector<SlicedTensor>> shown_tensors() const;
  bool compare_gradients(const data::StepBatch& batch, Side& reference);
  std::map<std::string, at::Tensor> exact_gradients(const data::StepBatch& batch, Side& reference);
  std::vector<RecordedChoices*> choices_of_ranks();
  void compare_numbers(int64_t step, const StepOutcome& want, bool skipped);

  Config layout_, reference_;
  const VerifyOptions& options_;
  const int world_;
  const MeshShape axes_;
  const Inputs inputs_;
  const int64_t first_step_;
  const SampleRange samples_;  ///< of the steps that are compared
  const VerifyBounds bounds_;
  std::string column_axis_;  ///< that sequences are cut over; empty where they are whole
  bool routes_parts_;        ///< whether each rank routes some tokens of a sequence
  Meeting meeting_;
  std::vector<Shown> shown_;
  std::vector<RecordedOutputs> recorded_;
  TensorComparer initial_{0}, gradients_, weights_;
  DifferenceList losses_, norms_;
  OutputComparison forward_, backward_;
  std::vector<RecordedChoices> choices_;
  RoutingComparison routing_;
  int64_t skipped_ = 0;
};

struct Verification::Side {
  Side(const Verification& verification, const Config& config, const comm::World& world, int local_ranks, at::Device device)
      : mesh(world, mesh_shape(config.mesh, config.zero.stage, world.size())),
        scope(config, local_ranks),
        stepper(config, mesh, device, scope, verification.inputs_.resume),
        loader(verification.inputs_.corpus, loader_options(config, mesh)) {
    if (const auto& resume = verification.inputs_.resume) loader.seek(cursor_of(resume->manifest.progress, resume->folder.string()));
  }
  LanguageModel& model() { return *stepper.run().model; }

  Mesh mesh;
  RankScope scope;
  Stepper stepper;
  data::Loader loader;
};

Config in_layout(Config config, const MeshConfig& mesh) {
  config.mesh = mesh;
  return config;
}

Config settled(Config layout) {
  settle_batch(layout, checked_world(layout));
  return layout;
}

Inputs checked_inputs(const Config& layout, int world, int64_t steps) {
  validate(layout, world);
  for (int rank = 0; rank < world; ++rank) device_for(layout, rank, world);  // or a refusal
  const MeshShape axes = mesh_shape(layout.mesh, layout.zero.stage, world);
  require(!updates_within_steps(layout, size_along(axes, mesh_roles(layout).stages)), "pipeline.schedule = ", layout.pipeline.schedule,
          ": computes with older weights than one device's step, which verify would compare it with; set pipeline.schedule = 1f1b");
  check_pipeline(layout, axes);
  Config here = layout;
  precision::settle_compute(here, at::kCPU, precision::Saying::Silent);
  check_modules(here, axes);
  Inputs inputs = open_inputs(layout);
  const bool lacks_start = !layout.checkpoint.resume.empty() && !inputs.resume;
  if (lacks_start) inputs.remarks.pop_back();  // that a run would start afresh
  for (const auto* remarks : {&inputs.text_remarks, &inputs.remarks}) {
    for (const auto& remark : *remarks) log().warn("{}", remark);
  }
  require(!lacks_start, "checkpoint.resume = ", layout.checkpoint.resume, ": checkpoint.dir = ", layout.checkpoint.dir,
          " holds no checkpoint that can be used, so there is no step to compare from; name another checkpoint.dir, or set checkpoint.resume = \"\" to compare "
          "from the start");
  const int64_t done = inputs.resume ? inputs.resume->manifest.step : 0;
  require(steps >= 1 && steps <= layout.run.steps - done, "--steps = ", steps, ": the run has ", layout.run.steps - done,
          " steps to go (run.steps = ", layout.run.steps, "); give 1 to that many");
  return inputs;
}

Verification::Verification(const Config& config, const MeshConfig& mesh, const VerifyOptions& options)
    : layout_(settled(in_layout(config, mesh))),
      reference_(reference_of(layout_)),
      options_(options),
      world_(checked_world(layout_)),
      axes_(mesh_shape(layout_.mesh, layout_.zero.stage, world_)),
      inputs_(checked_inputs(layout_, world_, options.steps)),
      first_step_(inputs_.resume ? inputs_.resume->manifest.step + 1 : 1),
      samples_{(first_step_ - 1) * layout_.batch.global_size, (first_step_ - 1 + options.steps) * layout_.batch.global_size},
      bounds_(bounds_of(layout_, world_, size_along(axes_, mesh_roles(layout_).batch), size_along(axes_, mesh_roles(layout_).columns))),
      column_axis_(size_along(axes_, mesh_roles(layout_).columns) > 1 ? mesh_roles(layout_).columns.names.front() : std::string()),
      routes_parts_(size_along(axes_, mesh_roles(layout_).routes) > 1),
      meeting_(world_),
      shown_(static_cast<size_t>(world_)),
      recorded_(static_cast<size_t>(world_), RecordedOutputs(options.output_bytes / world_)),
      gradients_(bounds_.gradients),
      weights_(bounds_.weights) {
  losses_.bound = bounds_.losses;
  norms_.bound = bounds_.gradient_norms;
  // Slices that wait on the host beside a device are added up there, in another order than on the device (optim/clip.cpp).
  constexpr double kOfTwoOrders = 1e-14;
  if (!layout_.offload.gradients.is("device") && !device_for(layout_, 0, world_).is_cpu()) norms_.bound = std::max(norms_.bound, kOfTwoOrders);
  routing_.bound = bounds_.routing;
  routing_.share_bound = bounds_.routing_share;
  choices_.resize(static_cast<size_t>(world_));
}

/// The next global batch. Padding is moved out of the samples that are listened to: it computes, but stands for nothing.
data::StepBatch Verification::next_batch(Side& side) const {
  auto batch = side.loader.next();
  for (auto& micro : batch.micro_batches) {
    if (micro.weight == 0) micro.first_sample = samples_.end;
  }
  return batch;
}

void Verification::run_rank(comm::World& world) {
  Side side(*this, layout_, world, world.local_size(), device_for(layout_, world.rank(), world_));
  Shown& shown = shown_[static_cast<size_t>(world.rank())];
  RecordedOutputs& outputs = recorded_[static_cast<size_t>(world.rank())];
  Composition& run = side.stepper.run();
  const auto planted = options_.plant.attach ? options_.plant.attach(run, world.rank()) : Attachment();
  RecordedChoices& choices = choices_[static_cast<size_t>(world.rank())];
  const Attachment routers = record_choices(side.model(), samples_, rows(), choices);
  const Attachment tap = tap_outputs(side.model(), samples_, outputs, tapped(end_of(run)));
  const auto show = [&](std::vector<SlicedTensor> tensors) {
    shown.tensors = std::move(tensors);
    meeting_.show();
    shown.tensors.clear();
  };

  show(checkpoint::parameter_tensors(side.model()));
  for (int64_t i = 0; i < options_.steps; ++i) {
    outputs.begin_step();
    choices.clear();
    failing_as_a_step([&] {
      shown.outcome = side.stepper.step(next_batch(side), {.gradients_ready = [&] {
                                          if (options_.plant.gradients) options_.plant.gradients(run, world.rank());
                                          show(checkpoint::gradient_tensors(side.stepper.run().updated));
                                        }});
    });
    show(checkpoint::parameter_tensors(side.model()));
  }
  if (layout_.offload.delayed_update) show(delayed_weights(run));
}

std::vector<std::vector<SlicedTensor>> Verification::shown_tensors() const {
  std::vector<std::vector<SlicedTensor>> tensors;
  for (const auto& rank : shown_) tensors.push_back(rank.tensors);
  return tensors;
}

void Verification::run_reference() {
  meeting_.wait_for_ranks();
  const auto world = comm::World::alone();
  Side side(*this, reference_, world, world_, device_for(layout_, 0, world_));
  const auto weights = checkpoint::parameter_tensors(side.model());
  initial_.compare(first_step_ - 1, weights, shown_tensors(), own_scales(weights));
  meeting_.dismiss();

  std::vector<RecordedOutputs*> ranks;
  for (auto& rank : recorded_) ranks.push_back(&rank);
  const BatchShape batch_shape{.global_size = layout_.batch.global_size, .micro_size = layout_.batch.micro_size, .keys = most_keys(layout_)};
  OutputComparer outputs(std::move(ranks), bounds_, batch_shape, axes_);
  const Attachment routers = replay_choices(side.model(), samples_, choices_of_ranks(), routing_);
  const Attachment tap = tap_outputs(side.model(), samples_, outputs, tapped(nullptr));
  for (int64_t i = 0; i < options_.steps; ++i) {
    meeting_.wait_for_ranks();  // with their gradients
    const auto batch = next_batch(side);
    StepOutcome outcome;
    bool skipped = false;
    outputs.begin_step();
    failing_as_a_step([&] { outcome = side.stepper.step(batch, {.gradients_ready = [&] { skipped = !compare_gradients(batch, side); }}); });
    if (skipped) outputs.forget_gradients();
    meeting_.wait_for_ranks();  // with their new weights
    const auto theirs = shown_tensors();
    weights_.compare(batch.step, weights, theirs, own_scales(weights));
    compare_numbers(batch.step, outcome, skipped);
    for (const auto& weight : weights) follow(weight, theirs);
    meeting_.dismiss();
  }
  if (layout_.offload.delayed_update) {
    meeting_.wait_for_ranks();  // with the last update, which no step has shown
    const auto updated = delayed_weights(side.stepper.run());
    weights_.compare(first_step_ + options_.steps - 1, updated, shown_tensors(), own_scales(updated));
    meeting_.dismiss();
  }
  forward_ = outputs.forward();
  backward_ = outputs.backward();
}

std::vector<RecordedChoices*> Verification::choices_of_ranks() {
  std::vector<RecordedChoices*> choices;
  for (auto& rank : choices_) choices.push_back(&rank);
  return choices;
}

/// Of the step that `reference` makes, from its weights, in the next wider format: of 16 bits in fp32, of fp32 in fp64, with kernels that have it.
std::map<std::string, at::Tensor> Verification::exact_gradients(const data::StepBatch& batch, Side& reference) {
  Config wide = reference_;
  wide.precision.compute = tessera::roundoff(reference_.precision.compute) > tessera::roundoff("fp32") ? "fp32" : "fp64";
  if (wide.precision.compute == "fp64") wide.run.kernels = "reference";
  const auto world = comm::World::alone();
  Side side(*this, wide, world, world_, device_for(layout_, 0, world_));
  const auto weights = checkpoint::parameter_tensors(side.model()), from = checkpoint::parameter_tensors(reference.model());
  for (size_t i = 0; i < weights.size(); ++i) {
    const c10::NoGradGuard no_grad;
    if (weights[i].tensor.defined()) at::Tensor(weights[i].tensor.detach()).copy_(from[i].tensor);
  }
  RoutingComparison unused;
  const Attachment routers = replay_choices(side.model(), samples_, choices_of_ranks(), unused);
  std::map<std::string, at::Tensor> gradients;
  side.stepper.step(batch, {.gradients_ready = [&] {
                      for (const auto& [tensor, slice] : checkpoint::gradient_tensors(side.stepper.run().updated)) {
                        gradients[slice.name] = tensor.defined() ? tensor.detach().clone() : at::zeros(slice.local_shape());
                      }
                    }});
  return gradients;
}

/// Whether there were any.
bool Verification::compare_gradients(const data::StepBatch& batch, Side& side) {
  const Composition& reference = side.stepper.run();
  const auto own = checkpoint::gradient_tensors(reference.updated);
  const auto theirs = shown_tensors();
  // A loss scale that is still too large overflows on both sides, and both skip the step: there are no gradients to compare.
  // Ranks hold parts: one that is not finite is in the norm of all.
  const bool overflow = reference.loss_scale.enabled() && !finite(own) && !std::all_of(theirs.begin(), theirs.end(), finite);
  if (overflow) {
    ++skipped_;
  } else {
    std::map<std::string, at::Tensor> exact;
    const auto ask = [&](const std::string& name) {
      if (exact.empty()) exact = exact_gradients(batch, side);
      return exact.at(name);
    };
    gradients_.compare(batch.step, own, theirs, gradient_scales(own, most_keys(layout_, batch)), bounds_.gradient_floor / reference.loss_scale.value(),
                       bounds_.bit_for_bit ? Exact() : Exact(ask));
  }
  for (const auto& gradient : own) follow(gradient, theirs);
  meeting_.dismiss();
  return !overflow;
}

void Verification::compare_numbers(int64_t step, const StepOutcome& want, bool skipped) {
  const auto note = [&](DifferenceList& list, double got, double expected, int rank) {
    const double apart = got == expected ? 0 : std::abs(got - expected);
    const double value = relative(std::isnan(apart) ? std::numeric_limits<double>::infinity() : apart, std::abs(expected));
    if (list.each.empty()) list.each.emplace_back();
    if (value > list.each.front().value) list.each.front() = {.name = {}, .value = value, .step = step, .rank = rank, .note = {}};
  };
  for (int rank = 0; rank < world_; ++rank) {
    const StepOutcome& got = shown_[static_cast<size_t>(rank)].outcome;
    if (!skipped || std::isfinite(want.loss)) note(losses_, got.loss, want.loss, rank);
    if (!skipped) note(norms_, got.grad_norm, want.grad_norm, rank);
  }
}

VerifyReport Verification::run() {
  const auto guarded = [this](const auto& work) {
    try {
      work();
    } catch (...) {
      meeting_.fail(std::current_exception());
      throw;
    }
  };
  std::thread reference([&] {
    try {
      guarded([&] { run_reference(); });
    } catch (...) {  // kept by the meeting
    }
  });
  try {
    std::vector<comm::Decorator> decorators;
    if (options_.plant.network) decorators.push_back(options_.plant.network);
    comm::run_ranks(world_, [&](comm::World& world) { guarded([&] { run_rank(world); }); },
                    {.timeout = comm::world_options(layout_.comm).timeout,
                     .decorators = std::move(decorators),
                     .backend = layout_.comm.backend,
                     .algorithm = layout_.comm.algorithm,
                     .table = layout_.comm.table,
                     .check = layout_.comm.check});
  } catch (...) {
    meeting_.fail(std::current_exception());
  }
  reference.join();
  meeting_.rethrow();

  MeshShape mesh = axes_;
  if (layout_.mesh.ep > 1) mesh.emplace_back("ep", layout_.mesh.ep);
  if (layout_.mesh.expert_tp > 1) mesh.emplace_back("expert_tp", layout_.mesh.expert_tp);
  return {.mesh = std::move(mesh),
          .ranks = world_,
          .first_step = first_step_,
          .steps = options_.steps,
          .micro_batches = layout_.batch.global_size / layout_.batch.micro_size,
          .skipped = skipped_,
          .bit_for_bit = bounds_.bit_for_bit,
          .scaled = layout_.precision.compute == "fp16" && layout_.precision.loss_scale != "none",
          .unscaled = layout_.precision.compute == "fp16" && layout_.precision.loss_scale == "none",
          .initial_weights = initial_.list(),
          .losses = losses_,
          .gradient_norms = norms_,
          .gradients = gradients_.list(),
          .weights = weights_.list(),
          .routing = routing_,
          .forward = forward_,
          .backward = backward_};
}

}  // namespace

at::Device verify_device(const Config& config, const MeshConfig& mesh) { return device_for(config, 0, checked_world(in_layout(config, mesh))); }

VerifyReport verify(const Config& config, const MeshConfig& mesh, const VerifyOptions& options) { return Verification(config, mesh, options).run(); }

}  // namespace tessera
