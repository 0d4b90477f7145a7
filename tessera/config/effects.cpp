#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/config/optim_groups.h"
#include "tessera/config/patterns.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// Settings that mean something only beside another.
struct Dependence {
  bool idle;  ///< they mean nothing
  std::string reason;
  std::vector<std::string> keys;
};

bool uses_disk(const OffloadConfig& offload) { return offload.activations.uses("disk") || offload.optimizer.uses("disk") || offload.params.uses("disk"); }

/// Whether each gradient is of one rank, and none crosses the network. mesh.tp may take what is left.
bool reduces_nothing(const Config& config, int world_size) {
  const MeshConfig& mesh = config.mesh;
  const bool deals_experts = config.model.experts > 0 && config.zero.stage > 0 && mesh.tp != 1;
  if (deals_experts) return world_size == 1;
  return mesh.tp > 0 ? world_size <= mesh.pp * mesh.tp : mesh.dp_replicate.value_or(1) * mesh.dp_shard.value_or(1) * mesh.cp == 1;
}

std::vector<Dependence> dependences(const Config& config, int world_size) {
  const auto with = [](const char* key, const auto& value) { return detail::concat("with ", key, " = ", value); };
  const auto& [optim, checkpoint, zero, pipeline] = std::tie(config.optim, config.checkpoint, config.zero, config.pipeline);
  const bool pipelined = config.mesh.pp != 1, staged = pipelined || config.pipeline.virtual_stages > 1;
  return {
      {!uses_optimizer(optim, optimizers_that_use("momentum")), with("optim.name", optim.name), {"optim.momentum"}},
      {!uses_optimizer(optim, optimizers_that_use("betas")), with("optim.name", optim.name), {"optim.betas"}},
      {!uses_optimizer(optim, optimizers_that_use("eps")), with("optim.name", optim.name), {"optim.eps"}},
      {optim.weight_decay == 0 && optim.groups.empty(), "with optim.weight_decay = 0", {"optim.decay_on"}},
      {optim.schedule == "constant", with("optim.schedule", optim.schedule), {"optim.min_lr"}},
      {!uses_optimizer(optim, optimizers_that_use("ns_steps")), with("optim.name", optim.name), {"optim.ns_steps", "optim.split_heads"}},
      {checkpoint.dir.empty(), "without checkpoint.dir", {"checkpoint.every", "checkpoint.keep", "checkpoint.async", "checkpoint.replace"}},
      {checkpoint.dir.empty() || !checkpoint.async, "without checkpoint.async", {"checkpoint.staging_bytes"}},
      {config.run.validate_every == 0, "without run.validate_every", {"data.validation_files"}},
      {checkpoint.resume.empty(), "without checkpoint.resume", {"checkpoint.partial"}},
      {config.recompute.mode == "none", with("recompute.mode", config.recompute.mode), {"recompute.every", "recompute.modules", "recompute.segment"}},
      {config.offload.activations.is("device"), "with offload.activations = device", {"offload.min_bytes", "offload.budget_bytes", "offload.prefetch"}},
      {config.offload.activations.is("device") && config.offload.params.by_pattern.empty() && config.offload.optimizer.by_pattern.empty(),
       "without patterns, or activations, that are moved",
       {"offload.fraction"}},
      {!uses_disk(config.offload), "where nothing goes to disk", {"offload.dir"}},
      {config.offload.optimizer.is("device"), "with offload.optimizer = device", {"offload.update"}},
      {zero.stage < 3, with("zero.stage", zero.stage), {"zero.wrap", "zero.prefetch", "zero.prefetch_bytes", "zero.reshard_after_forward"}},
      {zero.stage < 2, with("zero.stage", zero.stage), {"zero.accumulate"}},
      {zero.stage == 3, with("zero.stage", zero.stage), {"zero.bucket_bytes"}},
      {!staged,
       "with mesh.pp = 1 and pipeline.virtual_stages = 1",
       {"pipeline.schedule", "pipeline.split", "pipeline.vertical_sync", "pipeline.per_update", "pipeline.memory_limit", "pipeline.costs",
        "pipeline.costs_from", "pipeline.kept", "pipeline.post_validate"}},
      {staged && is_asynchronous(pipeline.schedule), with("pipeline.schedule", pipeline.schedule), {"pipeline.post_validate"}},
      {staged && pipeline.schedule != "pipedream", with("pipeline.schedule", pipeline.schedule), {"pipeline.vertical_sync"}},
      {staged && pipeline.schedule != "pipedream_2bw", with("pipeline.schedule", pipeline.schedule), {"pipeline.per_update"}},
      {staged && pipeline.schedule != "zb_auto", with("pipeline.schedule", pipeline.schedule), {"pipeline.memory_limit"}},
      {staged && !is_made_for_costs(pipeline.schedule),
       with("pipeline.schedule", pipeline.schedule),
       {"pipeline.costs", "pipeline.costs_from", "pipeline.kept"}},
      {staged && !pipeline.costs_from.empty(), "with pipeline.costs_from", {"pipeline.costs"}},
      {config.mesh.cp == 1, "with mesh.cp = 1", {"context.method", "context.ulysses", "context.balance"}},
      {config.mesh.cp != 1 && config.context.method != "ulysses_ring", with("context.method", config.context.method), {"context.ulysses"}},
      {world_size == 1, "on one rank, which has no peers", {"comm.backend", "comm.algorithm", "comm.table", "comm.interface", "comm.check", "mesh.order"}},
      {config.comm.compression != "powersgd", with("comm.compression", config.comm.compression), {"comm.powersgd_rank", "comm.powersgd_start"}},
      {config.model.family != "mixtral", with("model.family", config.model.family), {"moe.capacity_factor", "moe.balance_loss", "moe.z_loss", "moe.bias_rate"}},
      {config.model.family == "mixtral" && config.model.router == "expert_choice",
       with("model.router", config.model.router),
       {"moe.capacity_factor", "moe.balance_loss", "model.norm_topk"}},
      {config.model.family == "mixtral" && config.model.router != "sigmoid", with("model.router", config.model.router), {"moe.bias_rate"}},
      {config.model.family == "mixtral" && detail::all_routers_are_frozen(config),
       "beside frozen routers, which lora.trained does not name",
       {"moe.bias_rate"}},
      {config.lora.modules.empty(), "without lora.modules", {"lora.rank", "lora.alpha", "lora.dropout", "lora.trained", "lora.from_peft"}},
      {config.quantize.modules.empty(), "without quantize.modules", {"quantize.format", "quantize.block", "quantize.double_scales"}},
      {config.precision.compute != "fp8", with("precision.compute", config.precision.compute), {"precision.fp8_scales"}},
      {config.precision.loss_scale != "dynamic", with("precision.loss_scale", config.precision.loss_scale), {"precision.growth_steps"}},
      {config.precision.loss_scale == "none", with("precision.loss_scale", config.precision.loss_scale), {"precision.max_skips"}},
      {config.precision.params == "fp32" && reduces_nothing(config, world_size), "on one data rank, which reduces nothing", {"precision.reduce"}},
      {!config.data.shuffle, "without data.shuffle", {"data.seed"}},
      {config.model.family == "mlp", with("model.family", config.model.family), {"model.heads", "model.kv_heads", "optim.split_heads"}},
      {config.model.family == "mlp" || config.model.family == "gpt2", with("model.family", config.model.family), {"model.rope_theta"}},
  };
}

}  // namespace

bool detail::all_routers_are_frozen(const Config& config) {
  if (config.lora.modules.empty()) return false;
  for (int64_t layer = 0; layer < config.model.layers; ++layer) {
    const std::string weight = concat("layers.", layer, ".feed_forward.router.weight");
    if (std::ranges::any_of(config.lora.trained, [&](const std::string& pattern) { return path_matches(pattern, weight); })) return false;
  }
  return true;
}

std::vector<std::string> settings_without_effect_on_reading(const Config& config, const std::vector<std::string>& sets) {
  // Sections, and keys.
  std::vector<std::string> sections{"model.", "mesh.", "tensor.", "zero.", "lora.", "quantize."};
  if (config.mesh.pp != 1 || config.pipeline.virtual_stages > 1) sections.emplace_back("pipeline.");
  if (config.mesh.cp != 1) sections.emplace_back("context.");
  static const std::vector<std::string> keys{
      "offload.params",   "offload.fraction",      "offload.dir",          "data.tokenizer",    "data.bos",           "data.cache_dir", "data.documents",
      "run.device",       "comm.backend",          "comm.algorithm",       "comm.table",        "comm.interface",     "comm.timeout_s", "comm.check",
      "precision.params", "precision.compute",     "precision.fp8_scales", "checkpoint.verify", "checkpoint.partial", "run.threads",    "run.deterministic",
      "run.kernels",      "run.memory_limit_bytes"};
  std::vector<std::string> idle;
  for (const auto& set : sets) {
    std::string key = set.substr(0, set.find('='));
    std::erase_if(key, [](char c) { return c == ' ' || c == '\t'; });
    const bool read = std::ranges::find(keys, key) != keys.end() || std::ranges::any_of(sections, [&](const auto& each) { return key.starts_with(each); });
    if (read) continue;
    const std::string given = set.substr(std::min(set.find_first_not_of(" \t", set.find('=') + 1), set.size()));  // the checkpoint's may stand in its place
    idle.push_back(detail::concat(key, " = ", given, ": has no effect on a model that is only read"));
  }
  return idle;
}

std::vector<std::string> settings_without_effect(const Config& config, int world_size) {
  Config defaults;
  defaults.data.seed = config.run.seed;
  defaults.optim.momentum = momentum_of(defaults.optim);  // which asks for nothing
  std::vector<std::string> idle;
  for (const auto& dependence : dependences(config, world_size)) {
    if (!dependence.idle) continue;
    for (const auto& key : dependence.keys) {
      const auto value = detail::value_text(config, key);
      if (!config.given.contains(key) || value == detail::value_text(defaults, key)) continue;
      idle.push_back(detail::concat(key, " = ", value.value_or(""), ": has no effect ", dependence.reason));
    }
  }
  return idle;
}

}  // namespace tessera
