#include "tessera/train/compose.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <ATen/ops/empty.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hook_prefix.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/config/optim_groups.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/data_parallel/batch_coupling.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/fsdp/unit_plan.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tessera/models/mixture.h"
#include "tessera/models/parallel_plans.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/names.h"
#include "tessera/offload/activations.h"
#include "tessera/offload/host_gradients.h"
#include "tessera/offload/host_optimizer.h"
#include "tessera/offload/host_sums.h"
#include "tessera/offload/paged_optimizer.h"
#include "tessera/optim/groups.h"
#include "tessera/optim/several.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tessera/train/adapters.h"
#include "tessera/train/expert_ranks.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/places.h"
#include "tessera/train/recompute_blocks.h"
#include "tessera/train/synchronize.h"
#include "tessera/train/tie_stages.h"

// A Composition is a model and all that a configuration attaches to it, and the order in which that happens is right in one way only. Precision comes first,
// since it sets the types that are cut and drawn. Experts are dealt before other layers are cut, which then leave them alone, and both before parameters are
// sharded, which makes slices of slices; all on meta, so that no rank ever holds the whole. Recomputation lies inside of sharding, which has gathered a unit by
// the time it is computed again, and outside of tensor and context parallelism, whose collectives it repeats; what it keeps, offload then moves. The optimizer
// comes when weights have their values, for masters begin as these; replicas are compared last, when whatever was loaded is there.

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

ParallelPlan plan_of(const Config& config, const LanguageModel& model) {
  return parallel_plan(model, config.tensor.sequence_parallel, config.tensor.keep_gathered);
}

/// In the order of the parts; of each part tied ones once.
std::vector<nn::NamedParameter> parameters_of(const Composition& run) {
  std::vector<nn::NamedParameter> all;
  for (torch::nn::Module* root : roots_of(run)) {
    for (auto& parameter : nn::unique_parameters(*root)) all.push_back(std::move(parameter));
  }
  return all;
}

/// What an update that is not made element by element asks of the ranks that hold other elements of the same parameters, of those that `only` picks.
optim::WholeModel whole_model(const Config& config, const Composition& run, at::Device device, const nn::ParameterFilter& only = {}) {
  optim::WholeModel whole;
  whole.of_more = true;  // stages, and what waits elsewhere; check_modules has looked at the groups
  std::set<std::string> named;
  for (const auto& parameter : run.parameters) {
    if (nn::follows(parameter.tensor) || (only && !only(parameter)) || !named.insert(parameter.name).second) continue;
    optim::add_parameter(whole, parameter);
  }
  for (torch::nn::Module* root : roots_of(run)) optim::note_uses(whole, *root);
  for (const Slice& parameter : whole.parameters) {
    if (!config.optim.split_heads) break;
    if (parameter.name.ends_with(".wq.weight")) whole.stacks[parameter.name] = config.model.heads;
    if (parameter.name.ends_with(".wk.weight") || parameter.name.ends_with(".wv.weight")) whole.stacks[parameter.name] = *config.model.kv_heads;
  }
  // Where it is tied, the last stage has it as the head's alone, and both ends update it alike.
  if (config.model.tie_embeddings) whole.looked_up.emplace(kTiedWeight);
  if (run.cut.size() == 1) return whole;
  optim::note_held_elsewhere(whole, run.updated);
  whole.ranks = run.cut;
  whole.device = device;
  return whole;
}

void load_state(const Config& config, const ResumePoint& resume, Composition& run, bool first) {
  const std::set<std::string> ahead = checkpoint::updates_ahead(resume.manifest);
  require(ahead.empty() || config.offload.delayed_update, "offload.delayed_update = false: ", resume.folder.string(),
          " was saved by a run of true, whose last update is not in its weights; set offload.delayed_update = true");
  std::vector<std::string> ignored{checkpoint::kHookPrefix};
  for (const std::string& name : quantized_weights(config)) ignored.push_back("model." + name);
  const auto loaded = checkpoint::load(resume.folder, resume.manifest, checkpoint::training_tensors(*run.model, *run.optimizer, resume.manifest),
                                       {.verify = verify_hashes(config, resume),
                                        .expected = stored_for_others(config, resume.manifest, run),
                                        .ignore_prefixes = std::move(ignored),
                                        .partial = config.checkpoint.partial,
                                        .convert = true});
  if (first && !loaded.converted.empty()) {
    std::map<std::string, int64_t> kinds;
    for (const auto& [name, kind] : loaded.converted) ++kinds[kind];
    std::string list;
    for (const auto& [kind, count] : kinds) list += detail::concat(list.empty() ? "" : ", ", kind, " (", count, " tensors)");
    log().info("{}: saved with another precision.params, precision.master or optim.state_dtype; what was stored is read as {}", resume.folder.string(), list);
  }
  const auto& saved = resume.manifest.optimizer;
  checkpoint::restore_optimizer(run.parts.empty() ? saved : checkpoint::own_counts(saved, *run.optimizer), *run.optimizer, loaded);
  run.optimizer->follow_all_but(ahead);
  if (run.host != nullptr) run.host->follow();
  const auto& progress = resume.manifest.progress;
  if (progress.contains("loss_scale")) run.loss_scale.restore(progress.at("loss_scale"), resume.folder.string());
}

/// What offload.activations says of the model's modules; nothing where they stay on the device.
Attachment move_activations(const Config& config, LanguageModel& model, at::Device device, const DiskBytes& disk = {}) {
  const OffloadConfig& offload = config.offload;
  if (offload.activations.is("device")) return {};
  const auto place_of = [](const std::string& name) {
    return name == "device" ? std::nullopt : std::optional(name == "disk" ? OffloadPlace::Disk : OffloadPlace::Host);
  };
  ActivationOffloadOptions options{.where = {},
                                   .fraction = offload.fraction,
                                   .min_bytes = offload.min_bytes,
                                   .budget_bytes = offload.budget_bytes,
                                   .prefetch = offload.prefetch,
                                   .dir = spill_folder(config),
                                   .disk = disk};
  for (const auto& [pattern, place] : offload.activations.by_pattern) options.where.push_back({pattern, place_of(place)});
  if (options.where.empty()) options.where = {{.modules = "layers.*", .place = place_of(offload.activations.everywhere)}};
  for (const auto& named : options.where) check_pattern("offload.activations", model, named.modules);
  return offload_activations(model, device, options);
}

/// Below stage 3: gradients go to the host as they come, and what is updated lies there.
void stream_gradients(const std::shared_ptr<HostSums>& sums, Composition& run) {
  std::vector<nn::NamedParameter> with_gradients = run.updated;
  for (const auto& parameter : run.synchronizer->updated()) {
    if (nn::follows(nn::updated_for(parameter.tensor))) with_gradients.push_back(parameter);
  }
  auto host = std::make_unique<HostGradients>(std::move(run.synchronizer), with_gradients, sums);
  run.host = host.get();
  run.updated = trained(host->updated());
  run.offloaded = true;
  run.synchronizer = std::move(host);
}

/// How a parameter is updated.
struct UpdateKind {
  bool on_host = false;                       ///< what is updated lies there
  WaitingPlace state = WaitingPlace::Device;  ///< where its state waits

  auto operator<=>(const UpdateKind&) const = default;
};

UpdateKind update_of(const OffloadConfig& offload, const Composition& run, const nn::NamedParameter& parameter) {
  return {.on_host = run.offloaded || place_of("offload.params", offload.params, parameter) != WaitingPlace::Device,
          .state = place_of("offload.optimizer", offload.optimizer, parameter)};
}

/// Makes the optimizer of what is updated in one way.
std::unique_ptr<optim::Optimizer> make_one(const Config& config, at::Device device, const Composition& run, const UpdateKind& update,
                                           const std::vector<nn::NamedParameter>& updated, const HostOptimizer::Build& make) {
  const auto paged = [&](const std::vector<nn::NamedParameter>& parameters) -> std::unique_ptr<optim::Optimizer> {
    const auto place = update.state == WaitingPlace::Disk ? OffloadPlace::Disk : OffloadPlace::Host;
    return std::make_unique<PagedOptimizer>(parameters, PagedOptimizerOptions{.place = place, .dir = spill_folder(config), .disk = run.disk}, make);
  };
  if (update.state == WaitingPlace::Device) return make(updated);
  if (config.offload.update == "device") return paged(updated);
  const HostOptimizer::Build inside = update.state == WaitingPlace::Disk ? HostOptimizer::Build(paged) : make;
  if (update.on_host) return inside(updated);
  return std::make_unique<HostOptimizer>(updated, device, inside, HostOptimizer::kPieceBytes, config.offload.delayed_update);
}

/// Where state waits, and where it is updated, as [offload] says; of what lies on the host as a whole, state does, too.
std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config, const precision::Policy& policy, at::Device device, const Composition& run) {
  OptimConfig settings = config.optim;
  settings.split_heads = false;  // whole_model() says so weight by weight
  const auto build = [&](const nn::ParameterFilter& only) {
    return [&, only, settings](const std::vector<nn::NamedParameter>& updated) {
      return precision::make_optimizer(settings, policy, static_cast<uint64_t>(config.run.seed), updated, whole_model(config, run, device, only));
    };
  };
  const OffloadConfig offload = settled_places(config);
  if (offload.params.by_pattern.empty() && offload.optimizer.by_pattern.empty()) {
    return make_one(config, device, run, {.on_host = run.offloaded, .state = place_of("offload.optimizer", offload.optimizer, {})}, run.updated, build({}));
  }
  std::map<UpdateKind, std::vector<nn::NamedParameter>> updates;
  for (const auto& parameter : run.parameters) {  // the same on all ranks that meet, whatever they hold of it
    if (!nn::follows(parameter.tensor)) updates.try_emplace(update_of(offload, run, parameter));
  }
  for (const auto& parameter : run.updated) updates[update_of(offload, run, parameter)].push_back(parameter);
  std::vector<optim::Several::Part> parts;
  for (const auto& [update, updated] : updates) {
    const HostMemory beside(update.on_host);
    const auto alike = [&, wanted = update](const nn::NamedParameter& parameter) { return update_of(offload, run, parameter) == wanted; };
    parts.push_back({.optimizer = make_one(config, device, run, update, updated, build(alike)), .on_host = update.on_host});
  }
  return std::make_unique<optim::Several>(config.optim.name, std::move(parts));
}

/// By what all ranks know: the parameters of one stage may have other optimizers than those of the next, or none.
bool all_update_in_one_pass(const Config& config, const precision::Policy& policy, const Composition& run) {
  if (!run.offloaded && !is_on_host(at::empty({0}, at::TensorOptions(run.device)))) return false;
  std::vector<OptimConfig> kinds{config.optim};
  for (const OptimGroup& group : optim_groups(config.optim)) kinds.push_back(group.settings);
  return std::ranges::all_of(kinds, [&](OptimConfig& kind) {
    kind.groups.clear();
    kind.split_heads = false;  // whole_model() says so weight by weight
    return precision::make_optimizer(kind, policy, /*seed=*/0, {}, {.of_more = true})->updates_in_one_pass();
  });
}

/// What holds for the process, once a rank.
void allow_tf32(const precision::Policy& policy, at::Device device, bool first) {
  const bool used = precision::use_tf32(policy.tf32, device);
  if (policy.tf32 && !used && first && device.is_cpu()) log().warn("precision.compute = tf32: a CPU has no such products, and computes in fp32");
}

/// Terms of a router's loss are of all tokens of a micro-batch, wherever they are.
void let_routers_meet(const Config& config, const Mesh& mesh, LanguageModel& model) {
  const MeshRoles roles = mesh_roles(config);
  const bool states_valid = roles.routes.names == roles.columns.names || mesh.rank(roles.layers) == 0;
  if (mesh.size(roles.routes) == 1) return;
  for (MixtureFeedForwardImpl* mixture : mixtures_of(model)) mixture->router().set_peers(mesh[roles.routes], states_valid);
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

std::filesystem::path spill_folder(const Config& config) {
  if (!config.offload.dir.empty() || config.log.dir.empty()) return config.offload.dir;
  return std::filesystem::path(config.log.dir) / "offload";
}

std::vector<std::string> stored_for_others(const Config& config, const checkpoint::Manifest& manifest, const CutModel& run) {
  std::vector<std::string> others;
  if (run.parts.empty()) return others;
  const auto whole = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *whole);
  std::set<std::string> known;
  const auto quantized = quantized_weights(config);
  for (const auto& parameter : nn::unique_parameters(*whole)) {
    known.insert(parameter.name);
    std::string stored = "model." + parameter.name;
    if (manifest.tensors.contains(stored) || std::ranges::find(quantized, parameter.name) == quantized.end()) others.push_back(std::move(stored));
  }
  for (const auto& buffer : whole->named_buffers()) known.insert(buffer.key());
  for (const auto& [name, stored] : manifest.tensors) {
    if (known.contains(std::string(checkpoint::parameter_of(name)))) others.push_back(name);
  }
  return others;
}

std::unique_ptr<TensorParallel> cut_layers(const Config& config, LanguageModel& model, const comm::Group& tensor) {
  if (tensor.size() == 1) return nullptr;
  const TensorParallelOptions options{.check_inputs = config.comm.check, .overlap = config.tensor.overlap, .watch_terms = false};
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
  run.stream.before_each = [tensor = in_parts ? run.tensor.get() : nullptr, context = run.context.get()](const Pass::Size& size) {
    if (tensor != nullptr) tensor->set_sequence(size.columns);
    if (context != nullptr && size.cut) context->set_cut(*size.cut);
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

/// Products that are overlapped begin in the call of the module around their layers, and all of them end in one node of backward, before which a unit of a
/// layer alone is given up.
void check_overlapped_units(const Config& config, const torch::nn::Module& model) {
  for (const auto& item : model.named_modules()) {
    require(dynamic_cast<const nn::LinearImpl*>(item.value().get()) == nullptr || !nn::matches(config.zero.wrap, item.key()), "zero.wrap = ", config.zero.wrap,
            ": makes '", item.key(), "' a unit by itself, and with tensor.overlap = true its products begin before it is called; wrap what is around it (",
            "zero.wrap = layers.* or layers.*.*), or set tensor.overlap = false");
  }
}

/// Each tile gathers anew what calls inside of it need, and the ranks of mesh.cp, which gather together, may have different numbers of tiles.
void check_tiled_units(const Config& config, const UnitPlan& plan) {
  const std::string inside = tiled_layers(config) + ".*.**";
  for (const UnitPlan::Owner& owner : plan.owners) {
    const bool wrapped = nn::matches(config.zero.wrap, owner.path);
    require(!nn::matches(inside, owner.path), "zero.wrap = ", config.zero.wrap, ": ", wrapped ? "makes '" : "leaves '", owner.path,
            wrapped ? "' a unit by itself" : "' in no unit", ", which is gathered for each tile of recompute.ffn_tile = ", config.recompute.ffn_tile,
            ", and ranks of mesh.cp may have more tiles than others; wrap what is around it (zero.wrap = layers.* or layers.*.*), or set ",
            "recompute.ffn_tile = 0");
  }
}

}  // namespace

void check_modules(const Config& config, const MeshShape& axes) {
  const int tensor_ranks = size_along(axes, mesh_roles(config).layers), stage_ranks = size_along(axes, mesh_roles(config).stages);
  if (tensor_ranks > 1) check_tensor_parallel(config, tensor_ranks, config.data.seq_len);
  const auto model = on_meta([&] { return make_model(config.model); });
  (void)quantized_weights(config);  // or a refusal
  const Attachment adapted = add_adapters(config, *model);
  const precision::Policy policy = precision::policy_from(config.precision);
  precision::apply(*model, policy);
  const Attachment recomputed = recompute_blocks(config, *model, pipeline_layout(config, stage_ranks));
  const Attachment moved = move_activations(config, *model, at::kMeta);
  optim::check_groups(config.optim, nn::unique_parameters(*model));
  check_places(config, nn::unique_parameters(*model));
  quantize_frozen(config, *model, at::kMeta);
  if (config.zero.stage < 3) return;
  check_pattern("zero.wrap", *model, config.zero.wrap);
  if (config.tensor.overlap && tensor_ranks > 1) check_overlapped_units(config, *model);
  FullyShardOptions options = stage_3_options(config, policy, *model);
  if (config.recompute.ffn_tile > 0 && config.mesh.cp != 1) check_tiled_units(config, plan_units(*model, options));
  place_slices(config, at::kMeta, {}, options);
  (void)fully_shard(*model, comm::Group::self(), options);
}

std::vector<std::string> groups_without_effect(const Config& config) {
  if (config.optim.groups.empty() || config.lora.modules.empty()) return {};
  const auto model = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  return optim::groups_without_effect(config.optim, nn::unique_parameters(*model));
}

namespace {

/// The groups that this rank is in. Collective over the mesh.
Composition join_groups(const Config& config, const Mesh& mesh, at::Device device) {
  const MeshRoles roles = mesh_roles(config);
  Composition run;
  run.device = device;
  run.channels = pipeline_channels(mesh, roles.stages);
  run.pipeline = run.channels.ahead;
  run.layers = mesh[roles.layers];
  run.columns = {mesh[roles.columns], column_rule(config, mesh.size(roles.columns))};
  run.cut = mesh[roles.cut];
  run.elements = mesh[roles.elements];
  run.expert_elements = deals_experts_over_replicas(config, mesh.shape()) ? expert_mesh(config, mesh)[{"pp", "ep", "expert_tp"}] : run.elements;
  return run;
}

/// The whole model on meta, in the types in which it is cut and drawn.
void build_whole(const Config& config, const PipelineLayout& layout, const precision::Policy& policy, CutModel& run) {
  run.model = on_meta([&] { return layout.stages() > 1 ? make_model_for_stages(config.model) : make_model(config.model); });
  run.model->head()->set_loss({.label_smoothing = config.loss.label_smoothing, .z_loss = config.loss.z_loss});
  for (MixtureFeedForwardImpl* mixture : mixtures_of(*run.model)) mixture->set_training(config.moe);
  run.adapted = add_adapters(config, *run.model);
  precision::apply(*run.model, policy);
}

/// What tiles of tokens computed again have to be told of a sequence that is cut over the ranks of layers.
TiledParts tiled_parts(const Config& config, const CutModel& run) {
  if (!config.tensor.sequence_parallel || !run.tensor) return {};
  return {.ranks = run.layers.size(),
          .sequence = [tensor = run.tensor.get()] { return tensor->sequence(); },
          .set_sequence = [tensor = run.tensor.get()](int64_t positions) { tensor->set_sequence(positions); }};
}

/// Leaves of the whole model this rank's experts, layers and stages.
void cut_over_ranks(const Config& config, const Mesh& mesh, const PipelineLayout& layout, Composition& run) {
  let_routers_meet(config, mesh, *run.model);
  run.recomputed = tile_routed(config, *run.model);
  run.experts = deal_experts(*run.model, expert_ranks(config, mesh));
  cut_model(config, layout, run, [&] {
    run.recomputed.add(recompute_blocks(config, *run.model, layout, run.columns.most(config.data.seq_len), tiled_parts(config, run)));
    run.moved = move_activations(config, *run.model, run.device, run.disk);
  });
}

/// Frozen weights in fewer bits are dealt over the ranks that parameters are. Ranks of mesh.cp may go through a layer in other numbers of tiles than others,
/// and could not gather for each.
quantize::Sharding code_sharding(const Config& config, const Mesh& mesh) {
  if (config.zero.stage < 3) return {};
  const bool tiled_apart = config.recompute.ffn_tile > 0 && config.mesh.cp != 1;
  return {.group = mesh[mesh_roles(config).shard],
          .reshard_after_forward = config.zero.reshard_after_forward,
          .prefetch = config.zero.prefetch > 0,
          .whole = tiled_apart ? tiled_layers(config) + ".*.**" : ""};
}

/// Memory and values on the device, at stage 3 of this rank's slices alone.
void give_values(const Config& config, const Mesh& mesh, const precision::Policy& policy, const std::optional<ResumePoint>& resume, Composition& run) {
  quantize_frozen(config, *run.model, run.device, resume ? SavedWeights{&resume->folder, &resume->manifest} : SavedWeights(), code_sharding(config, mesh));
  if (config.zero.stage == 3) shard_parameters(config, policy, mesh, run.device, run);
  materialize(*run.model, static_cast<uint64_t>(config.run.seed), run.device);
  run.parameters = parameters_of(run);
  run.updated = trained(run.parameters);
}

bool streams_gradients(const Config& config) { return config.offload.gradients.is("host") && config.zero.stage < 3; }

/// Puts in the place of parameters what the optimizer is to update for them: parts of theirs, or copies on the host.
void replace_updated(const Config& config, const Mesh& mesh, const precision::Policy& policy, const std::optional<ResumePoint>& resume, Composition& run) {
  const bool streamed = streams_gradients(config);
  const auto sums = streamed ? std::make_shared<HostSums>(run.device, config.zero.bucket_bytes) : nullptr;
  if (config.zero.stage == 1 || config.zero.stage == 2) shard_updates(config, policy, mesh, sums, run);
  if (config.zero.stage == 0 && streamed) synchronize_replicas(config, mesh, resume, sums, run);
  if (streamed) stream_gradients(sums, run);
}

bool begins_from_files(const Config& config, at::Device device, const std::optional<ResumePoint>& resume) {
  return device != at::kMeta && reads_starting_files(config, resume) && (!config.model.from_hf.empty() || !config.lora.from_peft.empty());
}

void load_from_files(const Config& config, Composition& run) {
  load_starting_weights(config, *run.model);
  if (run.host != nullptr) run.host->follow();
}

/// The optimizer of what is updated, whose masters begin as the weights are; then the state of all of it, where the run goes on. `first`: says aloud.
void prepare_updates(const Config& config, const precision::Policy& policy, const ResumePoint* resume, bool first, Composition& run) {
  run.updates_in_one_pass = all_update_in_one_pass(config, policy, run);
  const HostMemory beside(run.offloaded);
  run.optimizer = make_optimizer(config, policy, run.device, run);
  if (resume != nullptr) load_state(config, *resume, run, first);
}

/// All but what the ends of a pipeline share.
Composition compose_alone(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume = std::nullopt) {
  const precision::Policy policy = precision::policy_from(config.precision);
  precision::require_support(policy, device);
  Composition run = join_groups(config, mesh, device);
  run.loss_scale = precision::LossScale(config.precision);
  const PipelineLayout layout = pipeline_layout(config, run.pipeline.size());
  build_whole(config, layout, policy, run);
  cut_over_ranks(config, mesh, layout, run);
  give_values(config, mesh, policy, resume, run);

  const bool first = mesh[mesh_roles(config).tokens].rank() == 0;
  allow_tf32(policy, device, first);
  replace_updated(config, mesh, policy, resume, run);
  const bool from_files = begins_from_files(config, device, resume);
  if (from_files) load_from_files(config, run);
  const ResumePoint* const saved = device != at::kMeta && resume ? &*resume : nullptr;
  prepare_updates(config, policy, saved, first && run.layers.rank() == 0, run);
  if (from_files || saved != nullptr) check_loaded(config, mesh, run);

  refuse_coupled_batches(config, mesh, *run.model);
  if (config.zero.stage == 0 && !streams_gradients(config)) synchronize_replicas(config, mesh, resume, /*relay=*/nullptr, run);
  return run;
}

}  // namespace

Composition compose(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume) {
  Composition run = compose_alone(config, mesh, device, resume);
  tie_stages(config, mesh, run, [&](const Mesh& there) { return compose_alone(config, there, device); });
  if (device != at::kMeta) resume_compression(config, mesh, resume, run);
  return run;
}

}  // namespace tessera
