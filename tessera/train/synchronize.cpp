#include "tessera/train/synchronize.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/core/log.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/names.h"
#include "tessera/nn/replicas.h"
#include "tessera/train/part_synchronizers.h"
#include "tessera/train/places.h"
#include "tessera/train/progress.h"
#include "tessera/zero/sharded_data_parallel.h"

// A model, or each stage of it on this rank, is one or two sets of parameters: what lies outside of experts is dealt over all data ranks, and experts over
// those that hold the same ones. Each set of each part has a synchronizer of its own, of the kind that zero.stage says; together they are one to the engine.

namespace tessera {

namespace {

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

/// In what gradients cross between the ranks of a sharded run: comm.compression says it as well as precision.reduce.
at::ScalarType network_dtype(const Config& config, const precision::Policy& policy) {
  const std::string& compression = config.comm.compression;
  return compression == "bf16" ? at::kBFloat16 : compression == "fp16" ? at::kHalf : policy.reduce;
}

std::unique_ptr<GradientSynchronizer> as_one(std::vector<PartSynchronizers::Share> shares) {
  if (shares.size() == 1) return std::move(shares.front().synchronizer);
  return std::make_unique<PartSynchronizers>(std::move(shares));
}

/// Parameters that are sharded and synchronized over the same ranks.
struct Dealt {
  nn::ParameterFilter only{};
  comm::Group shard, replicate;
  std::vector<int> places{};  ///< by rank of the mesh's role `shard`: its place in this `shard`, where that is another
  bool has_buffers = true;    ///< takes care of the module's buffers, which are one set's
};

/// Experts, or all else, of a module may be frozen as a whole (lora.trained), or not there.
bool trains_any(const torch::nn::Module& root, const nn::ParameterFilter& only) {
  return std::ranges::any_of(nn::unique_parameters(root, only), [](const nn::NamedParameter& parameter) { return parameter.tensor.requires_grad(); });
}

/// Of a module of the model: all that it has, or what is outside of experts and then these, which fewer ranks hold.
std::vector<Dealt> dealt_parameters(const Config& config, const Mesh& mesh, torch::nn::Module& root) {
  const MeshRoles roles = mesh_roles(config);
  const Dealt all{.shard = mesh[roles.shard], .replicate = mesh[roles.replicate]};
  if (!deals_experts(config, mesh.shape())) return {all};
  const Mesh experts = expert_mesh(config, mesh);
  Dealt dense = all, sparse{.only = experts_of(root, true), .shard = experts["edp"], .replicate = experts[roles.replicate]};
  dense.only = experts_of(root, false);
  for (const int rank : mesh.members(roles.shard)) sparse.places.push_back(experts.rank(rank, "edp"));
  std::vector<Dealt> dealt;
  for (Dealt* one : {&dense, &sparse}) {
    if (!trains_any(root, one->only)) continue;
    one->has_buffers = dealt.empty();
    dealt.push_back(std::move(*one));
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
      shares.push_back({.part = static_cast<int>(part), .synchronizer = make(*roots[part], dealt), .places = dealt.places});
      if (dealt.shard.size() > 1 || dealt.replicate.size() > 1) continue;
      for (auto& parameter : nn::unique_parameters(*roots[part], dealt.only)) run.alone.push_back(std::move(parameter));
    }
  }
  return as_one(std::move(shares));
}

}  // namespace

std::vector<torch::nn::Module*> roots_of(const Composition& run) {
  std::vector<torch::nn::Module*> roots;
  for (const ModelShare& part : run.parts) roots.push_back(part.module.ptr().get());
  if (roots.empty()) roots.push_back(run.model.get());
  return roots;
}

std::vector<nn::NamedParameter> trained(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<nn::NamedParameter> own;
  for (const auto& parameter : parameters) {
    if (!nn::follows(nn::updated_for(parameter.tensor))) own.push_back(parameter);
  }
  return own;
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

void shard_parameters(const Config& config, const precision::Policy& policy, const Mesh& mesh, at::Device device, Composition& run) {
  FullyShardOptions options = stage_3_options(config, policy, *run.model);
  place_slices(config, device, run.disk, options);
  run.offloaded = config.offload.params.is("host") || config.offload.params.is("disk");
  run.shard = mesh[mesh_roles(config).shard];
  run.synchronizer = synchronize(config, mesh, run, [&](torch::nn::Module& root, const Dealt& dealt) {
    FullyShardOptions own = options;
    own.only = dealt.only;
    own.replicate = dealt.replicate;
    if (dealt.shard.size() == 1 && dealt.replicate.size() <= 1 && !own.offloads()) own.param_dtype.reset();  // nothing is gathered: layers cast at each use
    return fully_shard(root, dealt.shard, own);
  });
}

void shard_updates(const Config& config, const precision::Policy& policy, const Mesh& mesh, const std::shared_ptr<GradientRelay>& relay, Composition& run) {
  ZeroOptions options;
  options.relay = relay;
  options.stage = config.zero.stage;
  options.sizes.bucket_bytes = config.zero.bucket_bytes;
  options.accumulation = config.zero.accumulate == "whole" ? Accumulation::Whole : Accumulation::Sharded;
  options.reduce_dtype = policy.gradient_dtype();
  if (const at::ScalarType network = network_dtype(config, policy); network != at::kFloat) options.network_dtype = network;
  run.shard = mesh[mesh_roles(config).shard];
  run.updated.clear();
  run.synchronizer = synchronize(config, mesh, run, [&](torch::nn::Module& root, const Dealt& dealt) {
    options.only = dealt.only;
    options.buffers = dealt.has_buffers ? BufferBroadcast::AtStart : BufferBroadcast::Never;
    auto zero = std::make_unique<ShardedDataParallel>(root, ShardGroups{.shard = dealt.shard, .replicate = dealt.replicate}, options);
    for (const auto& shard : trained(zero->shards())) run.updated.push_back(shard);
    return zero;
  });
  std::set<std::string> sharded;
  for (const auto& shard : run.updated) sharded.insert(shard.name);
  for (const auto& frozen : trained(run.parameters)) {
    if (!sharded.contains(frozen.name)) run.updated.push_back(frozen);  // of a set that is frozen, which nobody cuts
  }
}

void check_loaded(const Config& config, const Mesh& mesh, const Composition& run) {
  if (config.zero.stage == 0) {
    if (run.host != nullptr) equalize_replicas(*run.model, mesh[mesh_roles(config).gradients], ReplicaStart::Check);
    return;
  }
  for (const Dealt& dealt : dealt_parameters(config, mesh, *run.model)) {
    equalize_replicas(*run.model, dealt.replicate, ReplicaStart::Check, dealt.only);
    if (config.zero.stage < 3) equalize_replicas(*run.model, dealt.shard, ReplicaStart::Check, dealt.only);
  }
}

namespace {

/// The plan orders the sums of a bucket, so a run that resumes in the same layout takes up the saved ones, each part its own. Collective over the pipeline.
std::vector<std::optional<BucketLayout>> saved_plans(const ResumePoint& resume, const comm::Group& data, const Composition& run, const DdpOptions& options) {
  std::vector<std::optional<BucketLayout>> plans;
  bool any_other = false;
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  for (size_t part = 0; part < roots.size(); ++part) {
    std::vector<GradientSpec> gradients;
    for (const auto& parameter : nn::unique_parameters(*roots[part])) {
      if (!parameter.tensor.requires_grad()) continue;  // what is frozen is in no bucket
      gradients.push_back(spec_of(parameter, options.reduce_dtype.value_or(parameter.tensor.scalar_type())));
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
        "{}: its bucket layout is of another layout (data ranks, mesh.tp, stages, zero.bucket_bytes or parameters), so a new one is made: sums are added in "
        "another order from here on, so the run goes on, but not bit for bit",
        resume.folder.string());
  }
  return plans;
}

/// The fixed tree of each part; where experts lie on several data ranks, one of all else and one of the experts, to which each of these ranks' micro-batches
/// come apart.
void reduce_in_trees(const Config& config, const Mesh& mesh, Composition& run) {
  TreeReductionOptions options;
  options.num_micro_batches = config.batch.global_size / config.batch.micro_size;
  options.buffers = BufferBroadcast::AtStart;
  options.gradient_dtype = precision::policy_from(config.precision).gradient_dtype();
  const comm::Group data = mesh[mesh_roles(config).gradients];
  std::vector<PartSynchronizers::Share> shares;
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  const auto add = [&](size_t part, const comm::Group& group, const TreeReductionOptions& own) {
    if (own.only ? !trains_any(*roots[part], own.only) : nn::unique_parameters(*roots[part]).empty()) return;
    shares.push_back({.part = static_cast<int>(part), .synchronizer = std::make_unique<TreeReduction>(*roots[part], group, own)});
  };
  const bool over_replicas = deals_experts_over_replicas(config, mesh.shape());
  const comm::Group holders = over_replicas ? expert_mesh(config, mesh)["edp"] : comm::Group::self();
  for (size_t part = 0; part < roots.size(); ++part) {
    TreeReductionOptions rest = options, experts = options;
    if (over_replicas) rest.only = experts_of(*roots[part], false);
    add(part, data, rest);
    if (!over_replicas) continue;
    experts.only = experts_of(*roots[part], true);
    experts.sources = config.mesh.ep * config.mesh.expert_tp;
    experts.buffers = BufferBroadcast::Never;
    add(part, holders, experts);
  }
  run.synchronizer = as_one(std::move(shares));
}

}  // namespace

void synchronize_replicas(const Config& config, const Mesh& mesh, const std::optional<ResumePoint>& resume, const std::shared_ptr<GradientRelay>& relay,
                          Composition& run) {
  const comm::Group data = mesh[mesh_roles(config).gradients];
  if (mesh.size(mesh_roles(config).tokens) == 1) run.alone = run.parameters;
  std::vector<PartSynchronizers::Share> parts;
  const auto add = [&](std::unique_ptr<GradientSynchronizer> one) {
    parts.push_back({.part = static_cast<int>(parts.size()), .synchronizer = std::move(one)});
  };
  if (config.run.deterministic) {
    run.terms = mesh[mesh_roles(config).columns];
    return reduce_in_trees(config, mesh, run);
  }
  DdpOptions options;
  options.relay = relay;
  options.sizes.bucket_bytes = config.zero.bucket_bytes;
  options.buffers = BufferBroadcast::AtStart;  // our models' buffers are tables that no step changes
  options.reduce_dtype = precision::policy_from(config.precision).gradient_dtype();
  const std::vector<torch::nn::Module*> roots = roots_of(run);
  std::vector<std::optional<BucketLayout>> plans(roots.size());
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

}  // namespace tessera
