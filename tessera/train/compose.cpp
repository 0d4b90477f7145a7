#include "tessera/train/compose.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include <ATen/ops/empty.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data_parallel/batch_coupling.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/models/mixture.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/names.h"
#include "tessera/nn/replicas.h"
#include "tessera/precision/gradient_dtype.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/part_synchronizers.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/progress.h"
#include "tessera/train/recompute_blocks.h"
#include "tessera/zero/sharded_data_parallel.h"

// A Composition is a model and all that a configuration attaches to it, and the order in which that happens is right in one way only. Precision comes first,
// since it sets the types that are cut and drawn. Layers are cut before parameters are sharded, which makes slices of slices, and both on meta, so that no rank
// ever holds the whole. Recomputation lies inside of sharding, which has gathered a unit by the time it is computed again, and outside of tensor and context
// parallelism, whose collectives it repeats. The optimizer comes when weights have their values, for masters begin as these; replicas are compared last, when
// whatever was loaded is there.

namespace tessera {

namespace {

bool verify_hashes(const Config& config, const ResumePoint& resume) { return config.checkpoint.verify && !resume.hashed; }

void refuse_coupled_batches(const Config& config, const Mesh& mesh, const torch::nn::Module& model) {
  const MeshRoles roles = mesh_roles(config);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const auto report = batch_coupling_report(model, mesh.size(roles.tokens), chunk(micro_batches, mesh.size(roles.batch), 0).second);
  if (report.empty()) return;
  require(config.run.batch_coupled == "report", "run.batch_coupled = refuse: ", report);
  log().warn("{}", report);
}

/// Each is a step of its own to what synchronizes gradients.
int64_t updates_per_step(const Config& config, const Mesh& mesh) {
  const int stages = mesh.size(mesh_roles(config).stages);
  if (!updates_within_steps(config, stages)) return 1;
  const auto micro_batches = chunk(config.batch.global_size / config.batch.micro_size, mesh.size(mesh_roles(config).batch), 0).second;
  const auto schedule = schedule_maker(config, stages)(static_cast<int>(micro_batches));
  return std::ranges::count(schedule.actions.front(), schedules::Kind::Update, &schedules::Action::kind);
}

std::shared_ptr<CommunicationHook> make_hook(const Config& config, const Mesh& mesh, const std::optional<ResumePoint>& resume) {
  const CommConfig& comm = config.comm;
  const std::string& cast = comm.compression == "none" ? config.precision.reduce : comm.compression;  // where both are set, they say the same
  if (cast == "bf16") return std::make_shared<Bf16Hook>();
  if (cast == "fp16") return std::make_shared<Fp16Hook>();
  if (comm.compression != "powersgd") return nullptr;
  const int64_t updates = updates_per_step(config, mesh);
  PowerSgdOptions options{.rank = comm.powersgd_rank, .start = comm.powersgd_start * updates, .seed = static_cast<uint64_t>(config.run.seed)};
  if (resume) options.steps_done = resume->manifest.step * updates;
  return std::make_shared<PowerSgd>(options);
}

/// The state of the run's compression, from a checkpoint that may have been made with another, or none.
void resume_compression(const Config& config, const Mesh& mesh, const std::optional<ResumePoint>& resume, const Composition& run) {
  std::vector<std::string> remarks;
  const MeshRoles roles = mesh_roles(config);
  const comm::Group data = mesh[roles.gradients];
  if (config.comm.compression != "none" && data.size() == 1) {
    remarks.push_back("comm.compression = " + config.comm.compression + ": one data rank reduces nothing, so nothing is compressed");
  }
  if (resume) {
    for (auto& remark : load_hook_state(hook_shares(run), *resume, data, verify_hashes(config, *resume))) remarks.push_back(std::move(remark));
  }
  if (data.rank() > 0 || run.layers.rank() > 0 || run.pipeline.rank() > 0) return;
  for (const auto& remark : remarks) log().warn("{}", remark);
}

/// In what gradients cross between the ranks of a sharded run: comm.compression says it as well as precision.reduce.
at::ScalarType network_dtype(const Config& config, const precision::Policy& policy) {
  const std::string& compression = config.comm.compression;
  return compression == "bf16" ? at::kBFloat16 : compression == "fp16" ? at::kHalf : policy.reduce;
}

FullyShardOptions stage_3_options(const Config& config, const precision::Policy& policy, LanguageModel& model) {
  const ZeroConfig& zero = config.zero;
  FullyShardOptions options;
  // check_modules() has seen that the whole model has such modules; a stage of it need not.
  if (!zero.wrap.empty()) options.policy = [wrap = zero.wrap](const std::string& path, const torch::nn::Module&) { return nn::matches(wrap, path); };
  options.prefetch.units = zero.prefetch;
  if (zero.prefetch_bytes > 0) options.prefetch.bytes = zero.prefetch_bytes;
  options.reshard_after_forward = zero.reshard_after_forward;
  options.reduce_each_micro_batch = zero.accumulate == "sharded";
  options.unit_bytes_limit = config.run.memory_limit_bytes;
  // What linear layers cast at each use is gathered in that type: the same bits, half the traffic, and no copies that backward would keep of all units.
  options.param_dtype = policy.compute;
  options.cast = precision::cast_at_use(model, policy);
  const at::ScalarType network = network_dtype(config, policy);
  options.reduce_dtype = network == at::kFloat ? policy.gradient_dtype() : network;
  options.gradient_dtype = policy.gradient_dtype();
  options.buffers = BufferBroadcast::Never;  // our models' buffers are tables that no step changes
  return options;
}

ParallelPlan plan_of(const Config& config, const LanguageModel& model) {
  return parallel_plan(model, config.tensor.sequence_parallel, config.tensor.keep_gathered);
}

/// What is synchronized by itself: each stage of the model that this rank holds, or the whole.
std::vector<torch::nn::Module*> roots_of(const Composition& run) {
  std::vector<torch::nn::Module*> roots;
  for (const ModelShare& part : run.parts) roots.push_back(part.module.ptr().get());
  if (roots.empty()) roots.push_back(run.model.get());
  return roots;
}

std::unique_ptr<GradientSynchronizer> as_one(std::vector<PartSynchronizers::Share> shares) {
  if (shares.size() == 1) return std::move(shares.front().synchronizer);
  return std::make_unique<PartSynchronizers>(std::move(shares));
}

/// Parameters that are sharded and synchronized over the same ranks.
struct Dealt {
  nn::ParameterFilter only{};
  comm::Group shard, replicate;
  int holders = 1;  ///< ranks of dp_shard that are one place of `shard`
};

/// Of a module of the model: all that it has, or what is outside of experts and then these, which fewer ranks hold.
std::vector<Dealt> dealt_parameters(const Config& config, const Mesh& mesh, torch::nn::Module& root) {
  const MeshRoles roles = mesh_roles(config);
  const Dealt all{.shard = mesh[roles.shard], .replicate = mesh[roles.replicate]};
  if (config.mesh.ep == 1) return {all};
  const Mesh experts = expert_mesh(config, mesh);
  Dealt dense = all, sparse{.only = experts_of(root, true), .shard = experts["edp"], .replicate = experts[roles.replicate], .holders = config.mesh.ep};
  dense.only = experts_of(root, false);
  std::vector<Dealt> dealt;
  for (Dealt* one : {&dense, &sparse}) {
    if (!nn::unique_parameters(root, one->only).empty()) dealt.push_back(std::move(*one));
  }
  return dealt;
}

/// Makes a synchronizer for each set of parameters of each part, by `make`.
using MakeSynchronizer = std::function<std::unique_ptr<GradientSynchronizer>(torch::nn::Module& root, const Dealt& dealt)>;
std::unique_ptr<GradientSynchronizer> synchronize(const Config& config, const Mesh& mesh, Composition& run, const MakeSynchronizer& make) {
  std::vector<PartSynchronizers::Share> shares;
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  for (size_t part = 0; part < roots.size(); ++part) {
    for (const Dealt& dealt : dealt_parameters(config, mesh, *roots[part])) {
      shares.push_back({.part = static_cast<int>(part), .synchronizer = make(*roots[part], dealt), .holders = dealt.holders});
      if (dealt.shard.size() > 1 || dealt.replicate.size() > 1) continue;
      for (auto& parameter : nn::unique_parameters(*roots[part], dealt.only)) run.alone.push_back(std::move(parameter));
    }
  }
  return as_one(std::move(shares));
}

/// Without those that follow others.
std::vector<nn::NamedParameter> trained(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<nn::NamedParameter> own;
  for (const auto& parameter : parameters) {
    if (!nn::follows(nn::updated_for(parameter.tensor))) own.push_back(parameter);
  }
  return own;
}

/// What the first and the last stage both use: each has a copy of its own, under the embedding's name.
void tie_stages(const Config& config, const Mesh& mesh, Composition& run) {
  if (run.parts.empty() || !config.model.tie_embeddings) return;
  const bool first_too = run.rank_of_stage.front() == run.pipeline.rank();
  std::vector<pipeline::TiedCopies::Copy> copies;
  for (const auto& parameter : run.synchronizer->updated()) {
    if (nn::slice_of(parameter.tensor).name != kTiedWeight) continue;
    const bool first = first_too && !nn::follows(nn::updated_for(parameter.tensor));
    copies.push_back({first ? pipeline::End::First : pipeline::End::Last, parameter.tensor});
  }
  run.tied.emplace(mesh[mesh_roles(config).tied], copies, /*last_follows=*/run.rank_of_stage.front() == run.rank_of_stage.back());
}

/// In the order of the parts; of each part tied ones once.
std::vector<nn::NamedParameter> parameters_of(const Composition& run) {
  std::vector<nn::NamedParameter> all;
  for (torch::nn::Module* root : roots_of(run)) {
    for (auto& parameter : nn::unique_parameters(*root)) all.push_back(std::move(parameter));
  }
  return all;
}

/// The update counts of this rank's parameters alone.
nlohmann::json own_counts(nlohmann::json optimizer, const optim::Optimizer& own) {
  const auto counts = optimizer.find("update_counts");
  if (counts == optimizer.end()) return optimizer;
  nlohmann::json mine = nlohmann::json::object();
  for (const auto& [name, count] : own.update_counts()) {
    if (counts->contains(name)) mine[name] = counts->at(name);
  }
  *counts = std::move(mine);
  return optimizer;
}

void load_state(const Config& config, const ResumePoint& resume, Composition& run, bool first) {
  const auto loaded = checkpoint::load(resume.folder, resume.manifest, checkpoint::training_tensors(*run.model, *run.optimizer, resume.manifest),
                                       {.verify = verify_hashes(config, resume),
                                        .expected = stored_for_others(config, resume.manifest, run),
                                        .ignore_prefixes = {hook_prefix},
                                        .partial = config.checkpoint.partial,
                                        .convert = true});
  if (first && !loaded.converted.empty()) {
    std::map<std::string, int64_t> kinds;
    for (const auto& [name, kind] : loaded.converted) ++kinds[kind];
    std::string list;
    for (const auto& [kind, count] : kinds) list += detail::concat(list.empty() ? "" : ", ", kind, " (", count, " tensors)");
    log().info("{}: saved with another precision.params or precision.master; what was stored is read as {}", resume.folder.string(), list);
  }
  checkpoint::restore_optimizer(run.parts.empty() ? resume.manifest.optimizer : own_counts(resume.manifest.optimizer, *run.optimizer), *run.optimizer, loaded);
  const auto& progress = resume.manifest.progress;
  if (progress.contains("loss_scale")) run.loss_scale.restore(progress.at("loss_scale"), resume.folder.string());
}

/// Stage 3, of a model on meta, so that no rank ever holds the whole of it: outside of a step each parameter is this rank's slice.
void shard_parameters(const Config& config, const precision::Policy& policy, const Mesh& mesh, at::Device device, Composition& run) {
  FullyShardOptions options = stage_3_options(config, policy, *run.model);
  options.device = device;
  run.offloaded = config.offload.params == "host";
  if (run.offloaded) options.offload = Offload::Host;
  run.shard = mesh[mesh_roles(config).shard];
  run.synchronizer = synchronize(config, mesh, run, [&](torch::nn::Module& root, const Dealt& dealt) {
    FullyShardOptions own = options;
    own.only = dealt.only;
    own.replicate = dealt.replicate;
    return fully_shard(root, dealt.shard, own);
  });
}

/// Stages 1 and 2: parameters stay whole, and what the optimizer updates is one part of them on each rank of dp_shard.
void shard_updates(const Config& config, const precision::Policy& policy, const Mesh& mesh, Composition& run) {
  ZeroOptions options;
  options.stage = config.zero.stage;
  options.sizes.bucket_bytes = config.zero.bucket_bytes;
  options.accumulation = config.zero.accumulate == "whole" ? Accumulation::Whole : Accumulation::Sharded;
  options.buffers = BufferBroadcast::AtStart;
  options.reduce_dtype = policy.gradient_dtype();
  if (const at::ScalarType network = network_dtype(config, policy); network != at::kFloat) options.network_dtype = network;
  run.shard = mesh[mesh_roles(config).shard];
  run.updated.clear();
  run.synchronizer = synchronize(config, mesh, run, [&](torch::nn::Module& root, const Dealt& dealt) {
    options.only = dealt.only;
    auto zero = std::make_unique<ShardedDataParallel>(root, ShardGroups{.shard = dealt.shard, .replicate = dealt.replicate}, options);
    for (const auto& shard : trained(zero->shards())) run.updated.push_back(shard);
    return zero;
  });
}

/// What was read may be another file on another host. Stage 0 compares its replicas itself, once it has them.
void check_loaded(const Config& config, const Mesh& mesh, const Composition& run) {
  if (config.zero.stage == 0) return;
  for (const Dealt& dealt : dealt_parameters(config, mesh, *run.model)) {
    equalize_replicas(*run.model, dealt.replicate, ReplicaStart::Check, dealt.only);
    if (config.zero.stage < 3) equalize_replicas(*run.model, dealt.shard, ReplicaStart::Check, dealt.only);
  }
}

/// The plan orders the sums of a bucket, so a run that resumes in the same layout takes up the saved ones, each part its own. Collective over the pipeline.
std::vector<std::optional<BucketPlan>> saved_plans(const ResumePoint& resume, const comm::Group& data, const Composition& run, const DdpOptions& options) {
  std::vector<std::optional<BucketPlan>> plans;
  bool any_other = false;
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  for (size_t part = 0; part < roots.size(); ++part) {
    std::vector<GradientSpec> gradients;
    for (const auto& [name, tensor, aliases] : nn::unique_parameters(*roots[part])) {
      gradients.push_back({name, tensor.numel(), options.reduce_dtype.value_or(tensor.scalar_type())});
    }
    const PlanLayout layout{.data_ranks = data.size(),
                            .stages = static_cast<int>(run.rank_of_stage.size()),
                            .stage = run.stage_of(part),
                            .tensor_ranks = run.layers.size(),
                            .tensor_rank = run.layers.rank(),
                            .sizes = options.sizes};
    bool other = false;
    plans.push_back(bucket_plan_of(resume.manifest.progress, layout, gradients, resume.folder.string(), other));
    any_other |= other;
  }
  for (const auto& others : checkpoint::gather_json(run.pipeline, any_other)) any_other |= others.get<bool>();
  if (any_other && data.rank() == 0 && run.layers.rank() == 0 && run.pipeline.rank() == 0) {
    log().warn(
        "{}: its bucket plan is of another layout (data ranks, mesh.tp, stages, zero.bucket_bytes or parameters), so a new one is made: sums are added in "
        "another order from here on, so the run goes on, but not bit for bit",
        resume.folder.string());
  }
  return plans;
}

std::unique_ptr<GradientSynchronizer> reduce_in_a_tree(const Config& config, const comm::Group& data, torch::nn::Module& root) {
  TreeReductionOptions options;
  options.num_micro_batches = config.batch.global_size / config.batch.micro_size;
  options.buffers = BufferBroadcast::AtStart;
  options.gradient_dtype = precision::policy_from(config.precision).gradient_dtype();
  return std::make_unique<TreeReduction>(root, data, options);
}

/// Stage 0: whole gradients meet on every rank.
void synchronize_replicas(const Config& config, const Mesh& mesh, const std::optional<ResumePoint>& resume, Composition& run) {
  const comm::Group data = mesh[mesh_roles(config).gradients];
  if (mesh.size(mesh_roles(config).tokens) == 1) run.alone = run.parameters;
  std::vector<PartSynchronizers::Share> parts;
  const auto add = [&](std::unique_ptr<GradientSynchronizer> one) {
    parts.push_back({.part = static_cast<int>(parts.size()), .synchronizer = std::move(one)});
  };
  if (config.run.deterministic) {
    run.terms = mesh[mesh_roles(config).columns];
    for (torch::nn::Module* root : roots_of(run)) add(reduce_in_a_tree(config, data, *root));
    run.synchronizer = as_one(std::move(parts));
    return;
  }
  DdpOptions options;
  options.sizes.bucket_bytes = config.zero.bucket_bytes;
  options.buffers = BufferBroadcast::AtStart;  // our models' buffers are tables that no step changes
  options.reduce_dtype = precision::policy_from(config.precision).gradient_dtype();
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  std::vector<std::optional<BucketPlan>> plans(roots.size());
  if (resume && data.size() > 1) plans = saved_plans(*resume, data, run, options);
  for (size_t part = 0; part < roots.size(); ++part) {
    options.plan = std::move(plans[part]);
    options.hook = make_hook(config, mesh, resume);
    if (options.hook) run.hooks.push_back(options.hook);
    auto ddp = std::make_unique<DistributedDataParallel>(*roots[part], data, options);
    run.buckets.push_back(ddp.get());
    add(std::move(ddp));
  }
  run.synchronizer = as_one(std::move(parts));
}

/// What holds for the process, once a rank.
void allow_tf32(const precision::Policy& policy, at::Device device, bool first) {
  const bool used = precision::use_tf32(policy.tf32, device);
  if (policy.tf32 && !used && first && device.is_cpu()) log().warn("precision.compute = tf32: a CPU has no such products, and computes in fp32");
}

/// The head's copy of a weight that is tied takes its values from the embedding's, where both are on this rank.
void let_the_head_follow(const CutModel& model) {
  const int rank = model.pipeline.rank();
  if (model.parts.size() < 2 || model.rank_of_stage.front() != rank || model.rank_of_stage.back() != rank) return;
  for (const auto& parameter : nn::unique_parameters(*model.parts.back().module)) {
    if (parameter.name == kTiedWeight) nn::set_follows(parameter.tensor);
  }
}

}  // namespace

std::vector<std::string> stored_for_others(const Config& config, const checkpoint::Manifest& manifest, const CutModel& run) {
  std::vector<std::string> others;
  if (run.parts.empty()) return others;
  const auto whole = on_meta([&] { return make_model(config.model); });
  std::set<std::string> known;
  for (const auto& parameter : nn::unique_parameters(*whole)) {
    known.insert(parameter.name);
    others.push_back("model." + parameter.name);
  }
  for (const auto& buffer : whole->named_buffers()) known.insert(buffer.key());
  for (const auto& [name, stored] : manifest.tensors) {
    if (known.contains(std::string(checkpoint::parameter_of(name)))) others.push_back(name);
  }
  return others;
}

std::unique_ptr<TensorParallel> cut_layers(const Config& config, LanguageModel& model, const comm::Group& tensor) {
  if (tensor.size() == 1) return nullptr;
  const TensorParallelOptions options{.check_inputs = config.comm.check, .overlap = config.tensor.overlap};
  return parallelize_module(model, tensor, plan_of(config, model), options);
}

std::unique_ptr<ContextParallel> cut_sequences(const Config& config, LanguageModel& model, const comm::Group& columns, int tensor_ranks) {
  if (columns.size() == 1) return nullptr;
  static const std::map<std::string, ContextMethod> methods{{"ring", ContextMethod::Ring},
                                                            {"ring_full", ContextMethod::RingFull},
                                                            {"ulysses", ContextMethod::Ulysses},
                                                            {"ulysses_ring", ContextMethod::UlyssesRing},
                                                            {"all_gather", ContextMethod::AllGather}};
  ContextParallelOptions options{.method = methods.at(config.context.method)};
  if (options.method == ContextMethod::UlyssesRing) options.ulysses = ulysses_ranks(config, columns.size(), tensor_ranks);
  return context_parallel(model, columns, options, model.attention_pattern());
}

namespace {

void take_stages(const Config& config, const PipelineLayout& layout, CutModel& run) {
  const std::vector<int> stages = layout.stages_of(run.pipeline.rank());
  std::vector<ChainRange> links;
  for (const int stage : stages) links.push_back(layout.links[static_cast<size_t>(stage)]);
  run.model->keep(links);
  for (size_t i = 0; i < stages.size(); ++i) run.parts.push_back({stages[i], ModelPart(run.model, links[i])});
  run.rank_of_stage = layout.rank_of;
  if (config.model.tie_embeddings) let_the_head_follow(run);
}

/// What passes through the stages, and who is told of each forward: where a part of a sequence comes in, it does not tell how long the whole is.
void shape_stream(const Config& config, CutModel& run) {
  run.stream.dim = config.model.dim;
  const bool in_parts = config.tensor.sequence_parallel && run.layers.size() > 1;
  if (in_parts) {
    run.stream.part = run.layers.rank();
    run.stream.parts = run.layers.size();
  }
  if (!in_parts && !run.context) return;
  run.stream.before_each = [tensor = in_parts ? run.tensor.get() : nullptr, context = run.context.get(), columns = run.columns](const Pass::Size& size) {
    if (tensor != nullptr) tensor->set_sequence(size.columns);
    if (context != nullptr && size.columns < size.seq_len) context->set_cut(columns.of(size.seq_len));
  };
}

}  // namespace

void cut_model(const Config& config, const PipelineLayout& layout, CutModel& run, const std::function<void()>& recompute) {
  run.tensor = cut_layers(config, *run.model, run.layers);
  run.context = cut_sequences(config, *run.model, run.columns.group, run.layers.size());
  if (recompute) recompute();
  if (layout.stages() > 1) take_stages(config, layout, run);
  shape_stream(config, run);
}

void check_tensor_parallel(const Config& config, int ranks, int64_t seq_len) {
  const auto model = on_meta([&] { return make_model(config.model); });
  const auto tokens = at::empty({1, seq_len}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
  check_parallel_plan(*model, ranks, plan_of(config, *model), [&] { model->loss_sum(tokens, tokens); });
}

namespace {

/// Products that are overlapped begin in the call of the module around their layers, when a unit of a layer alone has not been gathered.
void check_overlapped_units(const Config& config, const torch::nn::Module& model) {
  for (const auto& item : model.named_modules()) {
    require(dynamic_cast<const nn::LinearImpl*>(item.value().get()) == nullptr || !nn::matches(config.zero.wrap, item.key()), "zero.wrap = ", config.zero.wrap,
            ": makes '", item.key(), "' a unit by itself, and with tensor.overlap = true its products begin before it is called; wrap what is around it (",
            "zero.wrap = layers.* or layers.*.*), or set tensor.overlap = false");
  }
}

}  // namespace

void check_modules(const Config& config, int tensor_ranks) {
  if (tensor_ranks > 1) check_tensor_parallel(config, tensor_ranks, config.data.seq_len);
  const auto model = on_meta([&] { return make_model(config.model); });
  const precision::Policy policy = precision::policy_from(config.precision);
  precision::apply(*model, policy);
  const Attachment recomputed = recompute_blocks(config, *model);
  if (config.zero.stage < 3) return;
  check_pattern("zero.wrap", *model, config.zero.wrap);
  if (config.tensor.overlap && tensor_ranks > 1) check_overlapped_units(config, *model);
  fully_shard(*model, comm::Group::self(), stage_3_options(config, policy, *model));
}

Composition compose(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume) {
  const MeshRoles roles = mesh_roles(config);
  Composition run;
  run.channels = pipeline_channels(mesh, roles.stages);
  run.pipeline = run.channels.ahead;
  const PipelineLayout layout = pipeline_layout(config, run.pipeline.size());
  run.model = on_meta([&] { return layout.stages() > 1 ? make_model_for_stages(config.model) : make_model(config.model); });
  run.model->head()->set_loss({.label_smoothing = config.loss.label_smoothing, .z_loss = config.loss.z_loss});
  for (MixtureFeedForwardImpl* mixture : mixtures_of(*run.model)) mixture->set_training(config.moe);
  const precision::Policy policy = precision::policy_from(config.precision);
  precision::require_support(policy, device);
  const auto seed = static_cast<uint64_t>(config.run.seed);
  precision::apply(*run.model, policy);
  run.layers = mesh[roles.layers];
  run.columns = {mesh[roles.columns], column_rule(config.context)};
  run.cut = mesh[roles.cut];
  run.elements = mesh[roles.elements];
  if (run.columns.cut()) {
    for (MixtureFeedForwardImpl* mixture : mixtures_of(*run.model)) mixture->router().set_peers(run.columns.group);
  }
  if (config.mesh.ep > 1) run.experts = expert_parallel(*run.model, expert_mesh(config, mesh)["ep"]);
  cut_model(config, layout, run, [&] { run.recomputed = recompute_blocks(config, *run.model, run.columns.most(config.data.seq_len)); });
  if (config.zero.stage == 3) shard_parameters(config, policy, mesh, device, run);
  materialize(*run.model, seed, device);
  run.parameters = parameters_of(run);
  run.updated = trained(run.parameters);
  const comm::Group data = mesh[roles.tokens];
  allow_tf32(policy, device, data.rank() == 0);
  if (config.zero.stage == 1 || config.zero.stage == 2) shard_updates(config, policy, mesh, run);
  // Before there is an optimizer: master weights begin as the weights are.
  const bool from_hf = device != at::kMeta && !resume && !config.model.from_hf.empty();
  if (from_hf) checkpoint::load_hugging_face(config.model.from_hf, config.model, checkpoint::parameter_targets(*run.model));
  {
    const HostMemory beside(run.offloaded);
    run.optimizer = precision::make_optimizer(config.optim, policy, seed, run.updated);
    run.loss_scale = precision::LossScale(config.precision);
    if (device != at::kMeta && resume) load_state(config, *resume, run, data.rank() == 0 && run.layers.rank() == 0);
  }
  if (from_hf || (device != at::kMeta && resume)) check_loaded(config, mesh, run);

  refuse_coupled_batches(config, mesh, *run.model);
  if (config.zero.stage == 0) synchronize_replicas(config, mesh, resume, run);
  tie_stages(config, mesh, run);
  if (device != at::kMeta) resume_compression(config, mesh, resume, run);
  return run;
}

}  // namespace tessera
