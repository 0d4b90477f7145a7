#include "tessera/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>
#include <source_location>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <unistd.h>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/dump.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/adapters.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/flop_rates.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/progress.h"
#include "tessera/train/ranks_agree.h"
#include "tessera/train/stop.h"
#include "tessera/train/timeline.h"

// A Trainer is a run: from where it goes on, over its steps, to its end, with loading, saving, validation and observers around a Stepper. It is made in the
// order in which it may be refused: what ranks disagree on, a folder that another run holds, a checkpoint that does not replay. Only when nothing stands in its
// way does it touch what others left in checkpoint.dir.

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Where the time of a step went, over all ranks: docs/formats.md.
std::map<std::string, double> extras_of(const StepOutcome& outcome) {
  std::vector<double> compute, wait;
  for (const auto& rank : outcome.ranks) compute.push_back(rank.compute_s), wait.push_back(rank.wait_s);
  const double median = lower_median(compute);
  const auto slowest = std::max_element(outcome.ranks.begin(), outcome.ranks.end(), [](const auto& a, const auto& b) { return a.compute_s < b.compute_s; });
  return {{"exposed_comm_s", outcome.exposed_s},
          {"compute_s", median},
          {"wait_s", lower_median(wait)},
          {"slowest_rank", static_cast<double>(slowest->rank)},
          {"slowest_ratio", median > 0 ? slowest->compute_s / median : 1}};
}

// Of a mixture of experts: the worst layer's busiest expert, and means over layers.
std::map<std::string, double> expert_numbers(const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return {};
  double busiest = 0, balance = 0, z = 0, dropped = 0;
  for (const ExpertLoad& load : loads) {
    busiest = std::max(busiest, load.busiest());
    balance += load.balance, z += load.z, dropped += load.dropped;
  }
  const auto layers = static_cast<double>(loads.size());
  return {{"busiest_expert", busiest}, {"router_balance", balance / layers}, {"router_z", z / layers}, {"dropped_choices", dropped / layers}};
}

// Runs `work` on rank 0; where it is refused there, all ranks throw the refusal.
void on_first_rank(const comm::World& world, const std::function<void()>& work, const std::source_location& place = std::source_location::current()) {
  nlohmann::json outcome;
  try {
    if (world.rank() == 0) work();
  } catch (const Error& error) {
    outcome = error.what();
  }
  const auto first = checkpoint::gather_json(world.group(), outcome, place).front();
  require(first.is_null(), first.is_string() ? first.get<std::string>() : std::string());
}

// Of a caller who has not settled it. Ranks that were told different things end here, before they make groups of them.
Config settled(Config config, const Inputs& inputs, const comm::World& world, at::Device device) {
  check_ranks_agree(world.group(), run_settings(config, inputs, world.options()));
  precision::settle_compute(config, device, world.group());
  return config;
}

// Ranks look for the checkpoint on their own: where they do not see the same folder, they must not train on from different steps. The first rank takes
// checkpoint.dir, where nobody has for it.
Inputs agreed(Inputs inputs, const Config& config, const comm::World& world) {
  const comm::CallSite site("start");
  const int64_t step = inputs.resume ? inputs.resume->manifest.step : 0;
  const at::Tensor mine = at::full({1}, step, at::device(at::kCPU).dtype(at::kLong));
  const at::Tensor all = at::empty({world.size()}, mine.options());
  comm::all_gather(world.group(), all, mine);
  const int64_t* steps = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < world.size(); ++rank) {
    require(steps[rank] == steps[0], "checkpoint.resume: rank ", rank, " goes on from step ", steps[rank], " and rank 0 from step ", steps[0],
            "; let every rank see the same checkpoint.dir");
  }
  if (config.checkpoint.dir.empty()) return inputs;
  on_first_rank(world, [&] {
    const bool taken = inputs.lock != nullptr;
    lock_checkpoint_dir(config, inputs);  // first: of all that may be in the way, a live run is
    check_checkpoint_dir(config, inputs);
    if (!taken) {
      for (const auto& remark : inputs.lock->remarks()) log().warn("{}", remark);
    }
  });
  return inputs;
}

constexpr const char* kValidation = "validation";  // in a checkpoint's progress: what the text of validations holds, or held when there last was one

nlohmann::json validation_text(const Config& config, const Inputs& inputs) {
  if (inputs.validation && config.run.validate_every > 0) return inputs.validation->content();
  return inputs.resume ? inputs.resume->manifest.progress.value(kValidation, nlohmann::json()) : nlohmann::json();
}

// Losses of two texts are no curve.
void say_other_validation(const Config& config, const Inputs& inputs) {
  const nlohmann::json before = inputs.resume->manifest.progress.value(kValidation, nlohmann::json());
  if (config.run.validate_every == 0 || !before.is_string() || before == validation_text(config, inputs)) return;
  log().warn("data.validation_files: another text than until step {}: the validation losses behind it are not to be compared with those before",
             inputs.resume->manifest.step);
}

// Who this run is, once all ranks know from where they go on. Says what it does otherwise than before.
checkpoint::RunIdentity begun(const Config& config, const Inputs& inputs, const comm::World& world) {
  if (inputs.resume && world.rank() == 0) {
    for (const auto& remark : changes_since(*inputs.resume, config)) log().warn("{}", remark);
    if (const auto remark = other_update(*inputs.resume, config, world.size()); !remark.empty()) log().warn("{}", remark);
    say_other_validation(config, inputs);
  }
  return run_identity(inputs);
}

std::vector<std::string> trained_beside(const Config& config, const std::optional<ResumePoint>& resume) {
  return resume ? trained_beside_adapters(config, resume->manifest.progress, resume->folder.string()) : config.lora.trained;
}

// Only a run that is about to train moves what others left: one that loading or replay has refused leaves checkpoint.dir as it found it.
void enter(const Config& config, const Inputs& inputs, const checkpoint::RunIdentity& run, const comm::World& world) {
  if (config.checkpoint.dir.empty()) return;
  const comm::CallSite site("start");
  on_first_rank(world, [&] {
    for (const auto& remark : enter_checkpoint_dir(config, inputs, run)) log().warn("{}", remark);
  });
}

// The host of every rank, for messages about one of them.
std::vector<std::string> hosts_of(const comm::World& world) {
  constexpr int64_t kLength = 64;  // of a host name on Linux, its end included
  const comm::CallSite site("start");
  const at::Tensor mine = at::zeros({kLength}, at::device(at::kCPU).dtype(at::kByte));
  ::gethostname(static_cast<char*>(mine.mutable_data_ptr()), kLength - 1);
  const at::Tensor all = at::empty({world.size() * kLength}, mine.options());
  comm::all_gather(world.group(), all, mine);
  std::vector<std::string> hosts;
  for (int rank = 0; rank < world.size(); ++rank) hosts.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * kLength);
  return hosts;
}

checkpoint::SaverOptions saver_options(const CheckpointConfig& config, const checkpoint::RunIdentity& run, const std::optional<ResumePoint>& resume) {
  checkpoint::SaverOptions options{
      .dir = config.dir, .keep = config.keep, .async = config.async, .staging_bytes = config.staging_bytes, .run = run, .known = {}};
  if (resume && resume->hashed) options.known.insert(resume->manifest.step);
  return options;
}

// The bucket layouts that a checkpoint keeps: of stages, and of ranks that hold other parts of their layers, where these differ. Collective over both.
nlohmann::json bucket_plans(const Composition& run) {
  nlohmann::json own = nlohmann::json::array();
  const size_t held = std::max<size_t>(run.parts.size(), 1);
  for (size_t part = 0; part < held; ++part)
    own.push_back({{"stage", run.stage_of(part)}, {"plan", to_json(run.buckets.empty() ? BucketLayout{} : run.buckets[part]->plan())}});
  const auto tensor_ranks = static_cast<size_t>(run.layers.size());
  std::vector<nlohmann::json> plans(run.rank_of_stage.size() * tensor_ranks);
  for (const auto& of_rank : checkpoint::gather_json(run.pipeline, checkpoint::gather_json(run.layers, own))) {
    for (size_t rank = 0; rank < tensor_ranks; ++rank) {
      for (const auto& part : of_rank[rank]) plans[part.at("stage").get<size_t>() * tensor_ranks + rank] = part.at("plan");
    }
  }
  const bool equal = std::ranges::all_of(plans, [&](const auto& each) { return each == plans.front(); });
  return equal ? plans.front() : nlohmann::json(plans);
}

// Of a file that was written over, steps were taken with another text than checkpoints say, or with a mixture of the two.
void require_same_text(const data::Corpus& corpus) {
  const std::string changed = corpus.changed();
  if (changed.empty()) return;
  throw Error(detail::concat("data.files: ", changed, ": steps since the last checkpoint may be of another text, and nothing more is saved; put the text back ",
                             "and go on from the last checkpoint, or start anew. A new text belongs beside the old one, under a name of its own, or is renamed "
                             "into its place (mv)"));
}

// What is written while training goes on needs a group that no step uses.
comm::Group saver_group(const Config& config, const comm::World& world) {
  if (!config.checkpoint.async) return world.group();
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.subgroup(ranks, "checkpoint");
}

// What is alive when the reported step begins has to be known then, so details begin with the first parameter.
MemoryTracker prepared(const MemoryWishes& wishes, const comm::World& world) {
  MemoryTracker tracker = wishes.tracker;
  if (wishes.report && world.rank() == 0) tracker.keep_details();
  return tracker;
}

}  // namespace

Trainer::Trainer(Config config, comm::World& world, Inputs inputs, std::optional<DumpRequest> dump, MemoryWishes memory, std::optional<at::Device> device)
    : device_(device ? *device : resolve_device(config.run.device, {.rank = world.local_rank(), .ranks = world.local_size()})),
      config_(settled(std::move(config), inputs, world, device_)),
      world_(world),
      inputs_(agreed(std::move(inputs), config_, world)),
      identity_(begun(config_, inputs_, world)),
      dump_(std::move(dump)),
      hosts_(hosts_of(world)),
      mesh_(world, mesh_shape(config_.mesh, config_.zero.stage, world.size())),
      scope_(config_, world.local_size(), prepared(memory, world)),
      quantized_from_(config_.checkpoint.dir.empty() ? "" : quantized_source(config_)),
      stepper_(config_, mesh_, device_, scope_, inputs_.resume),
      feed_(data::Loader(inputs_.corpus, loader_options(config_, mesh_)), device_),
      stragglers_(config_.log.straggler_ratio),
      hot_experts_(config_.model.experts_per_token, config_.log.straggler_ratio > 0),
      replay_(config_, mesh_, inputs_.corpus, world.options()) {
  if (!config_.checkpoint.dir.empty())
    saver_ = std::make_unique<checkpoint::Saver>(saver_options(config_.checkpoint, identity_, inputs_.resume), saver_group(config_, world_));
  if (inputs_.resume) {
    feed_.seek(cursor_of(inputs_.resume->manifest.progress, inputs_.resume->folder.string()));
    if (config_.checkpoint.verify) replay(*inputs_.resume);
  }
  enter(config_, inputs_, identity_, world_);
  // The first step differs from all others: buckets are not yet in the order of their use.
  if (memory.report && world.rank() == 0) reported_step_ = std::min(feed_.cursor().step + 2, config_.run.steps);
}

void Trainer::add_observer(std::unique_ptr<Observer> observer) {
  if (world_.rank() == 0) observers_.push_back(std::move(observer));
}

void Trainer::run() {
  const auto start = Clock::now();
  for (auto& o : observers_) o->on_start(info());
  RunEnd end{.step = feed_.cursor().step, .finished = false};
  try {
    train_to_the_end(end);
  } catch (...) {
    release_peers(std::current_exception());
    end.seconds = seconds_since(start);
    for (auto& o : observers_) o->on_end(end);
    throw;
  }
  end.seconds = seconds_since(start);
  for (auto& o : observers_) o->on_end(end);
}

void Trainer::train_to_the_end(RunEnd& end) {
  const bool saves = saver_ != nullptr;
  bool skipped = false, lost = false;  // the last step; and its loss
  if (inputs_.resume) make_up_for(end.step);
  while (!stop_ && end.step < config_.run.steps) {
    const StepResult result = step();
    end.step = result.step;
    skipped = !std::isfinite(result.grad_norm);
    lost = !std::isfinite(result.loss);
    for (auto& o : observers_) o->after_step(result);
    const bool validating = validates(end.step);
    if (end.step == config_.run.steps && !validating) stop_.reset();  // there is nothing left to stop
    const bool saving = saves && due(config_.checkpoint.every, end.step);
    if (saving) save(end.step);  // first: whoever ends us in the midst of a validation does not end what is trained
    if (validating && !stop_) validate_model(end.step);
    if (saves && stop_ && !saving) save(end.step);
  }
  finish_saving();
  require_same_text(*inputs_.corpus);  // of what no save has looked at
  if (stop_) {
    end.reason = stop_reason();
    return;
  }
  if (skipped && world_.rank() == 0) {
    log().warn("step {}, the last, was skipped, as its {} not finite: the weights are those that it began with{}", end.step,
               lost ? "gradient and its loss are" : "gradient is", lost ? "; look at [precision], and at optim.lr, before they are used" : "");
  }
  end.finished = true;
}

void Trainer::make_up_for(int64_t step) {
  const bool last = step == config_.run.steps;
  const bool validating = validates(step) && other_model(*inputs_.resume, config_).empty();  // or these would be other weights than those of that step
  if (!last && !validating) return;
  const comm::CallSite site("start");
  nlohmann::json lacks;
  if (world_.rank() == 0) {
    lacks["step"] = saver_ && !checkpoint::checkpoint_folders(config_.checkpoint.dir).contains(step);
    lacks["validation"] = std::ranges::any_of(observers_, [&](const auto& o) { return o->lacks_validation(step); });
  }
  lacks = checkpoint::gather_json(world_.group(), lacks).front();
  const bool unsaved = lacks["step"].get<bool>();
  if (unsaved && last) save(step);
  if (validating && lacks["validation"].get<bool>()) validate_model(step);
  if (unsaved && stop_ && !last) save(step);
}

// A save under way may wait for the very rank that is lost: it must learn of it, or this rank would wait for the save.
void Trainer::release_peers(const std::exception_ptr& failure) const {
  if (!saver_ || !saver_->pending()) return;
  try {
    std::rethrow_exception(failure);
  } catch (const CommError& error) {
    world_.report_failure(error.what());
    world_.abort();
  } catch (...) {  // a failure of our own: the save is of what was trained before it
  }
}

std::string Trainer::stop_reason() const {
  const char* name = ::sigabbrev_np(stop_->signal);
  const auto who = fmt::format("rank {} got {}", stop_->rank, name ? fmt::format("SIG{}", name) : fmt::format("signal {}", stop_->signal));
  if (config_.checkpoint.dir.empty()) return who + "; nothing was saved, as there is no checkpoint.dir";
  return fmt::format("{}; saved to {}", who, config_.checkpoint.dir);
}

StepResult Trainer::step() {
  const auto start = Clock::now();
  const bool reporting = reported_step_ > 0 && feed_.cursor().step + 1 == reported_step_;
  watch_memory(reporting);
  mark_memory("load");
  const data::StepBatch batch = feed_.next();
  const bool dumping = dump_ && dump_->step == batch.step;
  StepRequest request{.stop_signal = [this] { return stop_signal_ ? stop_signal_() : 0; }, .start = start};
  if (batch.step < config_.run.steps) request.meanwhile = [this] { feed_.prepare(); };
  if (dumping) request.gradients_ready = [this] { dump_gradients(); };
  pipeline::StepTimes times;
  const bool timing = config_.log.timeline_every > 0 && batch.step % config_.log.timeline_every == 0;
  request.times = timing ? &times : nullptr;
  const StepOutcome outcome = stepper_.step(batch, request);
  const auto history = reporting ? end_watch() : nullptr;
  if (dumping) dump_weights();
  stop_ = outcome.stop;
  if (world_.rank() == 0) {
    name_stragglers(outcome.ranks);
    name_hot_experts(outcome.experts);
  }
  const double step_s = seconds_since(start);
  const auto timelines = timing ? gather_timelines(world_.group(), stepper_.run().pipeline, times, batch.step) : nullptr;
  report_saves();
  auto extras = extras_of(outcome);
  const bool scaling = stepper_.run().loss_scale.enabled();
  if (scaling) extras["loss_scale"] = outcome.loss_scale.value;
  // Steps that a run skipped while it scaled are no updates ever after, and the schedule waits for them.
  if (scaling || outcome.loss_scale.skipped > 0) extras["skipped_steps"] = static_cast<double>(outcome.loss_scale.skipped);
  extras.merge(expert_numbers(outcome.experts));
  extras.merge(flop_rates(config_, outcome.flops, batch.global_valid_tokens, step_s, world_.size()));
  if (const auto reserved = reserved_memory(device_); reserved.current > 0) extras["reserved_bytes"] = static_cast<double>(reserved.current);
  if (save_blocked_s_ > 0) extras["save_blocked_s"] = std::exchange(save_blocked_s_, 0);
  return {.step = batch.step,
          .loss = outcome.loss,
          .grad_norm = outcome.grad_norm,
          .lr = outcome.lr,
          .tokens = batch.global_valid_tokens,
          .step_s = step_s,
          .tokens_per_s = static_cast<double>(batch.global_valid_tokens) / step_s,
          .peak_bytes = total_of(outcome.memory.peak),
          .memory = outcome.memory,
          .extras = std::move(extras),
          .experts = outcome.experts,
          .memory_history = history,
          .timelines = timelines};
}

void Trainer::watch_memory(bool reporting) {
  if ((reporting || config_.run.memory_limit_bytes > 0) && !watch_) watch_ = std::make_unique<MemoryWatch>(scope_.memory(), stepper_.run());
  if (reporting) {
    scope_.memory().start_timeline();
  } else {
    scope_.memory().reset_peak();
  }
}

std::shared_ptr<const MemoryHistory> Trainer::end_watch() {
  auto history = std::make_shared<const MemoryHistory>(scope_.memory().end_timeline());
  if (config_.run.memory_limit_bytes == 0) {
    watch_.reset();
    scope_.memory().keep_details(false);
  }
  return history;
}

void Trainer::name_stragglers(const std::vector<RankTimes>& ranks) {
  for (const auto& straggler : stragglers_.after_step(ranks)) {
    log().warn("rank {} computes {:.0f}% slower than the median of {} ranks over the last {} steps ({} against {}); its host is {}", straggler.rank,
               100 * (straggler.ratio() - 1), ranks.size(), StragglerWatch::kWindow, format_duration(straggler.compute_s), format_duration(straggler.median_s),
               hosts_[static_cast<size_t>(straggler.rank)]);
  }
}

void Trainer::name_hot_experts(const std::vector<ExpertLoad>& loads) {
  const auto named = hot_experts_.after_step(loads);
  if (!named.empty()) log().warn("{}", line_of(named, config_));
}

void Trainer::validate_model(int64_t step) {
  mark_memory("validation");
  StopVote vote(world_.group(), stop_signal_);
  const auto found = evaluate(stepper_.forward_only(), inputs_.validation, config_.data.seq_len, config_.batch.micro_size, mesh_[mesh_roles(config_).batch],
                              [&] { return vote.stops(); });
  if (!found) {
    stop_ = vote.request();
    return;
  }
  if (world_.rank() == 0 && !std::isfinite(found->loss)) {
    log().warn("step {}: the validation loss is not finite: of some text in data.validation_files the model makes no number, whatever its training loss says",
               step);
  }
  const std::string changed = world_.rank() == 0 ? inputs_.validation->changed() : "";
  if (!changed.empty() && !std::exchange(validation_changed_, true))
    log().warn("data.validation_files: {}: validation losses from step {} on are not to be compared with those before", changed, step);
  for (auto& o : observers_) o->after_validation({.step = step, .loss = found->loss, .bits_per_byte = found->bits_per_byte});
}

void Trainer::replay(const ResumePoint& resume) {
  const std::string source = resume.folder.string();
  if (const std::string why = other_model(resume, config_); !why.empty()) {
    if (world_.rank() == 0) log().warn("{}: not replayed, {}", source, why);
    return;
  }
  const auto& progress = resume.manifest.progress;
  const auto result = replay_.check(stepper_.forward_only(), cursor_of(progress, source), progress, source);
  if (world_.rank() > 0) return;
  if (result.micro_batches == 0) {
    log().warn("{}: {}", source, in_words(result));
  } else {
    log().info("{}: {}", source, in_words(result));
  }
}

void Trainer::look_around() {
  nlohmann::json problem;
  try {
    require_same_text(*inputs_.corpus);
    if (world_.rank() == 0) {
      for (const auto& remark : hold_on_to_checkpoint_dir(config_, inputs_)) log().warn("{}", remark);
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  for (const auto& found : checkpoint::gather_json(world_.group(), problem)) {
    if (found.is_string()) throw Error(found.get<std::string>());
  }
}

void Trainer::save(int64_t step) {
  const auto start = Clock::now();
  mark_memory("save");
  look_around();
  auto& run = stepper_.run();
  checkpoint::CheckpointState state;
  state.step = step;
  checkpoint::add_training_tensors(state, *run.model, *run.optimizer);
  const MeshRoles roles = mesh_roles(config_);
  for (auto& held : hook_tensors(hook_shares(run), mesh_[roles.gradients])) state.tensors.push_back(std::move(held));
  state.optimizer = checkpoint::optimizer_json(*run.optimizer, run.pipeline);
  const auto plans = bucket_plans(run);
  state.progress = progress_json(config_, feed_.cursor(), plans, comm::recorded_choice(world_.options()), mesh_.size(roles.tokens));
  state.progress["loss_scale"] = run.loss_scale.state();
  state.progress[kValidation] = validation_text(config_, inputs_);
  if (!config_.lora.modules.empty()) state.progress["lora_trained"] = trained_beside(config_, inputs_.resume);
  if (config_.checkpoint.verify) state.progress["replay"] = replay_.record(stepper_.forward_only(), feed_.cursor());
  lost_save_ = config_.checkpoint.verify && state.progress["replay"].value("not_finite", false) ? step : 0;
  if (lost_save_ > 0 && world_.rank() == 0) {
    log().warn(
        "step {}: the loss of the next step's text, by the weights that are being saved, is not finite: no step goes on from them, and "
        "checkpoint.keep does not count them; resume from an older checkpoint with a lower optim.lr, or start again with one",
        step);
  }
  state.agreement = checkpoint::agreement_of(config_, data_identity(*inputs_.corpus));
  if (!quantized_from_.empty()) state.agreement["quantize.from"] = quantized_from_;
  state.run = identity_;
  saver_->save(state);
  save_blocked_s_ += seconds_since(start);
  report_saves();
}

void Trainer::finish_saving() {
  if (!saver_) return;
  saver_->wait();
  report_saves();
  if (!last_save_.error.empty()) throw Error(detail::concat("step ", last_save_.step, " could not be saved: ", last_save_.error));
  if (lost_save_ == 0) return;
  throw Error(detail::concat("step ", lost_save_,
                             ": the run ends with weights of which no step goes on: the loss of the next step's text is not finite; resume ",
                             "from an older checkpoint with a lower optim.lr, or start again with one"));
}

void Trainer::report_saves() {
  if (!saver_) return;
  for (auto& outcome : saver_->outcomes()) {
    last_save_ = std::move(outcome);
    if (world_.rank() > 0) continue;
    if (!last_save_.error.empty()) log().warn("step {} was not saved; checkpoints that were there before still are: {}", last_save_.step, last_save_.error);
    if (!last_save_.remark.empty()) log().warn("step {} is saved, but not all that is older was removed: {}", last_save_.step, last_save_.remark);
  }
}

void Trainer::dump_gradients() const {
  checkpoint::dump(dump_->dir / "grad.safetensors", config_.model, checkpoint::gradient_tensors(stepper_.run().updated), world_.group());
}

void Trainer::dump_weights() const {
  checkpoint::dump(dump_->dir / "weights.safetensors", config_.model, checkpoint::parameter_tensors(*stepper_.run().model), world_.group());
}

RunInfo Trainer::info() const {
  return {.name = config_.name,
          .log_dir = config_.log.dir,
          .first_step = feed_.cursor().step + 1,
          .last_step = config_.run.steps,
          .ranks = world_.size(),
          .parameters = num_parameters(config_.model),
          .identity = identity_};
}

}  // namespace tessera
