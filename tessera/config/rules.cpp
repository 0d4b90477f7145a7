#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>
#include <sstream>
#include <tuple>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/config/expert_rules.h"
#include "tessera/config/limits.h"
#include "tessera/config/offload_rules.h"
#include "tessera/config/optim_groups.h"
#include "tessera/config/patterns.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/kernel_names.h"
#include "tessera/core/temporary_place.h"

namespace tessera {
namespace {

constexpr int64_t byte_vocabulary = 256;

bool is_rotary(const ModelConfig& model) { return model.family == "llama" || model.family == "mixtral"; }
bool has_attention(const ModelConfig& model) { return model.family != "mlp"; }

int64_t default_ffn_dim(const ModelConfig& model) {
  if (!is_rotary(model)) return 4 * model.dim;
  constexpr int64_t multiple = 64;
  return (8 * model.dim / 3 + multiple - 1) / multiple * multiple;
}

/// The folder that a variable names. A relative one is passed over, as the XDG rules ask: it is another one in each folder where a command is started.
std::optional<std::filesystem::path> absolute_folder(const char* variable) {
  const char* const value = std::getenv(variable);
  const std::filesystem::path folder = value ? value : "";
  return folder.is_absolute() ? std::optional(folder) : std::nullopt;
}

std::string default_cache_dir() {
  namespace fs = std::filesystem;
  if (const auto cache = absolute_folder("XDG_CACHE_HOME")) return (*cache / "tessera").string();
  if (const auto home = absolute_folder("HOME")) return (*home / ".cache" / "tessera").string();
  const TemporaryPlace place = temporary_place();
  std::error_code ignored;
  if (!fs::is_directory(place.folder, ignored)) place.refuse("there is no such folder", "say with data.cache_dir where packed texts go");
  return (place.folder / "tessera").string();
}

void at_least(const std::string& key, int64_t value, int64_t least) {
  require(value >= least, key, " = ", value, ": expected at least ", least, "; set ", key);
}

/// Sizes are multiplied, two at a time and with the number of ranks: more than this each could leave 64 bits.
void check_sizes(const Config& config) {
  constexpr int64_t most = 1'000'000'000;
  const auto check = [&](const std::string& key, int64_t size) {
    at_least(key, size, -most);
    require(size <= most, key, " = ", size, ": expected at most ", most, "; set ", key);
  };
  ModelConfig::for_each_field(config.model, [&](const char* name, const auto& field, const FieldRule&, std::string_view) {
    using Field = std::decay_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, int64_t>) check(std::string("model.") + name, field);
    if constexpr (std::is_same_v<Field, std::optional<int64_t>>) check(std::string("model.") + name, field.value_or(0));
  });
  check("data.seq_len", config.data.seq_len);
  check("batch.global_size", config.batch.global_size);
  check("batch.micro_size", config.batch.micro_size);
  check("batch.per_rank", config.batch.per_rank);
}

/// A path is absolute by now, so its folder may hold what nobody wrote. A checkpoint keeps the configuration as JSON, which is UTF-8: no step could be saved.
void check_text(const Config& config) {
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule&, std::string_view) {
      const auto check = [&](const std::string& text) {
        require(detail::is_utf8(text), section, ".", name, " = ", text, ": is not UTF-8, and neither log.dir/config.toml nor a checkpoint could keep it; ",
                "rename the file or folder that is not, or work in another folder");
      };
      using Field = std::decay_t<decltype(field)>;
      if constexpr (std::is_same_v<Field, std::string>) check(field);
      if constexpr (std::is_same_v<Field, std::vector<std::string>>) std::ranges::for_each(field, check);
    });
  });
}

/// A number that is none in fp32 would be seen in the loss, and its name would not.
void check_numbers(const Config& config) {
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule&, std::string_view) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, double>) {
        const double size = std::abs(field);
        require(size == 0 || (size >= std::numeric_limits<float>::min() && size <= std::numeric_limits<float>::max()), section, ".", name, " = ",
                format_float(field), ": is beyond what fp32 holds, 1.2e-38 to 3.4e38; set ", section, ".", name, " to a number within");
      }
    });
  });
}

void validate_experts(const ModelConfig& model) {
  const ModelConfig none;
  const bool any = model.experts != 0 || model.experts_per_token != 0 || model.shared_ffn_dim != 0 || model.router != none.router ||
                   model.norm_topk != none.norm_topk || model.shared_gate;
  if (model.family != "mixtral") {
    const char* const set = model.experts != 0             ? "experts"
                            : model.experts_per_token != 0 ? "experts_per_token"
                            : model.router != none.router  ? "router"
                            : model.shared_ffn_dim != 0    ? "shared_ffn_dim"
                            : model.shared_gate            ? "shared_gate"
                                                           : "norm_topk";
    require(!any, "model.", set, ": is of a mixture of experts, and model.family = ", model.family, " has none; leave it out, or set model.family = mixtral");
    return;
  }
  require(model.experts >= 1 && model.experts <= kMostExperts, "model.experts = ", model.experts, ": expected 1 to ", kMostExperts,
          " experts a block (Mixtral has 8); set model.experts, or model.family = llama for none");
  require(model.experts_per_token >= 1 && model.experts_per_token <= model.experts, "model.experts_per_token = ", model.experts_per_token,
          ": expected 1 to model.experts = ", model.experts, "; set model.experts_per_token (Mixtral: 2)");
  at_least("model.shared_ffn_dim", model.shared_ffn_dim, 0);
  require(
      !model.shared_gate || model.shared_ffn_dim > 0,
      "model.shared_gate = true: scales the shared expert, and model.shared_ffn_dim = 0 says there is none; set model.shared_ffn_dim, or shared_gate = false");
}

void validate_model(const ModelConfig& model) {
  require(!model.family.empty(), "model.family is not set: name one of llama, gpt2, mixtral, mlp, or give model.from_hf");
  at_least("model.dim", model.dim, 1);
  at_least("model.layers", model.layers, 1);
  constexpr int64_t most_layers = 100'000;  // each is a module of its own, also where nothing but shapes is built
  require(model.layers <= most_layers, "model.layers = ", model.layers, ": expected at most ", most_layers, "; set model.layers");
  at_least("model.vocab_size", model.vocab_size, 1);
  at_least("model.ffn_dim", model.ffn_dim.value_or(0), 1);
  if (model.max_seq_len) at_least("model.max_seq_len", *model.max_seq_len, 1);  // unset: data.seq_len, which it follows, is to blame
  require(model.dropout >= 0 && model.dropout < 1, "model.dropout = ", model.dropout, ": expected a probability from 0 to below 1");
  require(model.norm_eps > 0, "model.norm_eps = ", model.norm_eps, ": expected a positive number, such as 1e-5");
  require(model.rope_theta > 0, "model.rope_theta = ", model.rope_theta, ": expected a positive number, such as 10000");
  if (has_attention(model)) {
    at_least("model.heads", model.heads, 1);
    const int64_t kv_heads = model.kv_heads.value_or(model.heads);
    at_least("model.kv_heads", kv_heads, 1);
    require(model.dim % model.heads == 0, "model.heads = ", model.heads, ": must divide model.dim = ", model.dim, "; set model.heads to a divisor");
    require(model.heads % kv_heads == 0, "model.kv_heads = ", kv_heads, ": must divide model.heads = ", model.heads, "; set model.kv_heads to a divisor");
    require(model.family != "gpt2" || kv_heads == model.heads, "model.kv_heads = ", kv_heads,
            ": gpt2 has one key head per query head; leave model.kv_heads out");
    require(!is_rotary(model) || model.dim / model.heads % 2 == 0, "model.heads = ", model.heads,
            ": rotary embedding needs an even head size, and model.dim / model.heads is ", model.dim / model.heads, "; change model.dim or model.heads");
  }
  at_least("model.sliding_window", model.sliding_window, 0);
  require(model.sliding_window == 0 || has_attention(model), "model.sliding_window = ", model.sliding_window, ": model.family = ", model.family,
          " treats each token by itself, so it sees no other; leave model.sliding_window out");
  validate_experts(model);
  constexpr double most_parameters = 1e17;  // of which all states together have so many bytes that 64 bits still count them
  const auto dim = static_cast<double>(model.dim), experts = static_cast<double>(std::max<int64_t>(model.experts, 1));
  const double of_layer = 4 * dim * dim + 3 * dim * static_cast<double>(*model.ffn_dim) * experts;
  const double parameters = static_cast<double>(model.layers) * of_layer + 2 * dim * static_cast<double>(model.vocab_size);
  require(parameters <= most_parameters, "model.dim = ", model.dim, ": with model.layers = ", model.layers, ", model.ffn_dim = ", *model.ffn_dim,
          " and model.vocab_size = ", model.vocab_size, " these are some ", parameters, " parameters, and bytes are counted of ", most_parameters,
          " at most; set a smaller model");
}

void validate_lora(const LoraConfig& lora, const ModelConfig& model) {
  if (lora.modules.empty()) return;
  at_least("lora.rank", lora.rank, 1);
  require(model.dim == 0 || lora.rank <= model.dim, "lora.rank = ", lora.rank, ": at model.dim = ", model.dim,
          " a product of that rank says no more than a whole weight; set lora.rank to 1 to ", model.dim);
  require(std::isfinite(lora.alpha) && lora.alpha > 0, "lora.alpha = ", format_float(lora.alpha),
          ": adapters count alpha / rank times, and with 0 nothing would be learnt; set lora.alpha to a number above 0, such as 2 * lora.rank");
  require(lora.dropout >= 0 && lora.dropout < 1, "lora.dropout = ", lora.dropout, ": expected a probability from 0 to below 1");
}

void validate_quantize(const Config& config, bool trains) {
  const auto& quantize = config.quantize;
  if (quantize.modules.empty()) return;
  constexpr int64_t most = 1 << 20;
  require(quantize.block >= 1 && quantize.block <= most, "quantize.block = ", quantize.block, ": expected 1 to ", most, "; set quantize.block (64)");
  require(!trains || !config.lora.modules.empty(), "quantize.modules = ", quantize.modules,
          ": weights in fewer bits are frozen, and nothing is trained beside them; set lora.modules, or leave quantize.modules out");
}

void validate_data(const Config& config, Purpose purpose) {
  const auto& data = config.data;
  at_least("data.seq_len", data.seq_len, 1);
  at_least("model.max_seq_len", config.model.max_seq_len.value_or(0), 1);
  require(data.seq_len <= *config.model.max_seq_len, "data.seq_len = ", data.seq_len, ": longer than model.max_seq_len = ", *config.model.max_seq_len,
          "; lower data.seq_len or raise model.max_seq_len");
  require(!data.tokenizer.empty(), "data.tokenizer is empty: set it to byte, or to a SentencePiece .model file");
  require(data.tokenizer != "byte" || config.model.vocab_size >= byte_vocabulary, "model.vocab_size = ", config.model.vocab_size, ": the byte tokenizer has ",
          byte_vocabulary, " ids; set model.vocab_size to at least that");
  at_least("data.seed", data.seed.value_or(config.run.seed), 0);
  if (purpose == Purpose::Plan) return;
  require(!data.files.empty(), "data.files is not set: name the training text, such as data.files = [\"corpus.txt\"]");
  for (const auto& file : data.files) require(!file.empty(), "data.files holds an empty name: name the training text");
  require(config.run.validate_every == 0 || !data.validation_files.empty(), "run.validate_every = ", config.run.validate_every,
          ": needs held-out text; set data.validation_files, or run.validate_every = 0");
}

void validate_batch(const BatchConfig& batch, int64_t data_ranks, Purpose purpose) {
  at_least("batch.micro_size", batch.micro_size, 1);
  require(batch.per_rank == 0, "batch.per_rank = ", batch.per_rank, ": is not settled for these ranks (settle_batch); set batch.global_size");
  at_least("batch.global_size", batch.global_size, 1);
  const int64_t whole = batch.global_size / batch.micro_size;
  require(batch.global_size % batch.micro_size == 0, "batch.global_size = ", batch.global_size, ": a step is a whole number of forward passes of ",
          "batch.micro_size = ", batch.micro_size, " sequences each, and ", batch.global_size, " leave a last one of ", batch.global_size % batch.micro_size,
          " (ranks that get fewer passes than others are no problem; a smaller pass would be another arithmetic); set batch.global_size to ",
          whole > 0 ? detail::concat(whole * batch.micro_size, " or ") : "", (whole + 1) * batch.micro_size, ", or batch.micro_size to a divisor of it");
  constexpr int64_t most_passes = int64_t{1} << 22;  // each has an entry in what a step, or a plan of it, goes through
  require(whole <= most_passes, "batch.global_size = ", batch.global_size, ": a step of ", whole, " forward passes of batch.micro_size = ", batch.micro_size,
          " sequences each; at most ", most_passes, "; set a larger batch.micro_size, or a smaller batch.global_size");
  if (purpose == Purpose::Plan) return;  // a plan shows what the ranks would need that such a batch leaves idle, and says so
  const int64_t micro_batches = batch.global_size / batch.micro_size;
  require(micro_batches >= data_ranks, "batch.global_size = ", batch.global_size, ": gives ", micro_batches, " micro-batches of ", batch.micro_size, " for ",
          data_ranks, " data ranks, and each needs one; set batch.global_size to at least ", data_ranks * batch.micro_size, " or use fewer ranks");
}

void validate_moe(const Config& config) {
  const auto& [model, moe] = std::tie(config.model, config.moe);
  const bool always_one = model.experts > 1 && model.experts_per_token == 1 && (model.router == "sigmoid" || (model.router == "softmax" && model.norm_topk));
  const char* const way_out = model.from_hf.empty()
                                  ? "set model.router = softmax with model.norm_topk = false (Switch), or model.experts_per_token to 2 or more"
                                  : "train such a model beside its routers, which then stay as they are: lora.modules names what has adapters";
  require(!always_one || detail::all_routers_are_frozen(config),
          "model.experts_per_token = 1: a token's only weight, over the sum of its weights, is always one, so that the router would get no ",
          "gradient from the loss; ", way_out);
  const auto weight = [](const char* key, double value) {
    require(value >= 0 && std::isfinite(value), key, " = ", value, ": expected 0 or a positive weight, such as 1e-2");
  };
  weight("moe.balance_loss", moe.balance_loss);
  weight("moe.z_loss", moe.z_loss);
  require(moe.bias_rate >= 0 && std::isfinite(moe.bias_rate), "moe.bias_rate = ", moe.bias_rate, ": expected 0 or a positive step, such as 1e-3");
  require(moe.capacity_factor >= 0 && std::isfinite(moe.capacity_factor), "moe.capacity_factor = ", moe.capacity_factor,
          ": expected a positive number of even shares, such as 1.25, or 0 to drop nothing");
  if (model.family != "mixtral" || moe.capacity_factor == 0) return;
  const double even =
      static_cast<double>(config.batch.micro_size) * static_cast<double>(config.data.seq_len * model.experts_per_token) / static_cast<double>(model.experts);
  require(moe.capacity_factor * even >= 1, "moe.capacity_factor = ", moe.capacity_factor,
          ": an even share of a forward pass of batch.micro_size x data.seq_len", " tokens is ", even,
          " per expert, so that this would leave room for none; set moe.capacity_factor to at least ", 1 / even, ", or 0 to drop nothing");
}

void validate_loss(const LossConfig& loss) {
  require(loss.label_smoothing >= 0 && loss.label_smoothing < 1, "loss.label_smoothing = ", loss.label_smoothing,
          ": the share of a target that does not go to its label; expected 0 to below 1, such as 0.1");
  require(loss.z_loss >= 0 && std::isfinite(loss.z_loss), "loss.z_loss = ", loss.z_loss, ": expected 0 or a positive weight, such as 1e-4");
}

void validate_kernels(const ByPattern& kernels) {
  static const std::vector<std::string> known{
#define TESSERA_KERNEL(name) #name,
      TESSERA_KERNELS(TESSERA_KERNEL)
#undef TESSERA_KERNEL
  };
  std::string all;
  for (const auto& name : known) all += (all.empty() ? "" : ", ") + name;
  for (const auto& [name, choice] : kernels.by_pattern) {
    require(name == "*" || std::ranges::find(known, name) != known.end(), "run.kernels: '", name, "' = ", choice,
            ": there is no kernel of this name; did you mean ", nearest(name, known), "? There are ", all, ", and * for the rest");
  }
}

/// What every process has that computes, be it to train or to read a model.
void validate_process(const Config& config) {
  // What waits for a socket counts milliseconds in 32 bits.
  constexpr double longest_s = 1'000'000;
  require(config.comm.timeout_s > 0 && config.comm.timeout_s <= longest_s, "comm.timeout_s = ", format_float(config.comm.timeout_s),
          ": expected a positive number of seconds, at most 1000000 (11 days); set comm.timeout_s");
  validate_kernels(config.run.kernels);
  at_least("run.threads", config.run.threads.value_or(1), 1);
  require(config.run.threads.value_or(1) <= most_threads, "run.threads = ", config.run.threads.value_or(1), ": expected at most ", most_threads,
          " threads a rank; set run.threads, or leave it out for the cores of this host over its ranks");
  at_least("run.memory_limit_bytes", config.run.memory_limit_bytes, 0);
  check_device_name(config.run.device);
}

void validate_pipeline(const PipelineConfig& pipeline) {
  at_least("pipeline.virtual_stages", pipeline.virtual_stages, 1);
  at_least("pipeline.per_update", pipeline.per_update, 0);
  at_least("pipeline.memory_limit", pipeline.memory_limit, 0);
  require(pipeline.kept > 0 && pipeline.kept <= 1, "pipeline.kept = ", format_float(pipeline.kept),
          ": a share of a micro-batch's activations, more than 0 and at most 1; set pipeline.kept = 1 where a backward of inputs frees none");
  const std::vector<double>& costs = pipeline.costs;
  if (costs.empty()) return;
  std::string text;
  for (const double cost : costs) text += (text.empty() ? "" : ", ") + format_float(cost);
  const bool all = costs.size() == 3 || costs.size() == 4;
  require(
      all && costs[0] > 0 && costs[1] > 0 && costs[2] > 0 && costs.back() >= 0, "pipeline.costs = [", text,
      "]: expected the times of a stage's forward, backward of inputs and backward of weights, each above 0, and of a message, 0 or more, which may be left ",
      "out; such as [1, 1.1, 0.9], or [] for an estimate");
}

void validate_rest(const Config& config) {
  validate_pipeline(config.pipeline);
  at_least("checkpoint.every", config.checkpoint.every, 0);
  at_least("checkpoint.keep", config.checkpoint.keep, 0);
  at_least("checkpoint.staging_bytes", config.checkpoint.staging_bytes, 4096);
  require(config.checkpoint.resume != "latest" || !config.checkpoint.dir.empty(),
          "checkpoint.resume = latest: there is no folder to look in; set checkpoint.dir, or name a checkpoint");
  require(config.log.peak_tflops >= 0, "log.peak_tflops = ", config.log.peak_tflops, ": a rate is above 0; set 0 where it is not known");
  require(config.log.straggler_ratio == 0 || config.log.straggler_ratio > 1, "log.straggler_ratio = ", config.log.straggler_ratio,
          ": expected a number above 1, such as 1.2, or 0 to name nobody");
  at_least("log.timeline_every", config.log.timeline_every, 0);
  at_least("run.steps", config.run.steps, 1);
  at_least("run.seed", config.run.seed, 0);
  at_least("run.validate_every", config.run.validate_every, 0);
}

void validate_compression(const Config& config) {
  const auto& comm = config.comm;
  at_least("comm.powersgd_rank", comm.powersgd_rank, 1);
  at_least("comm.powersgd_start", comm.powersgd_start, 0);
  require(comm.compression == "none" || !config.run.deterministic, "comm.compression = ", comm.compression,
          ": run.deterministic adds whole gradients in a tree that is the same for every number of ranks; set comm.compression = none, or run.deterministic = "
          "false");
}

void validate_sharding(const Config& config) {
  const int stage = config.zero.stage;
  at_least("zero.bucket_bytes", config.zero.bucket_bytes, 1);
  at_least("zero.prefetch", config.zero.prefetch, 0);
  at_least("zero.prefetch_bytes", config.zero.prefetch_bytes, 0);
  if (stage == 0) return;
  require(!config.run.deterministic, "run.deterministic = true: adds whole gradients in one tree, and with zero.stage = ", stage,
          " no rank has whole gradients; set zero.stage = 0, or run.deterministic = false");
  // bf16 and fp16 mean here what precision.reduce means: in what gradients cross.
  require(config.comm.compression != "powersgd",
          "comm.compression = powersgd: approximates whole gradients as they are all-reduced, and with zero.stage = ", stage,
          " no rank has whole gradients; set comm.compression to none, bf16 or fp16, or zero.stage = 0");
}

void validate_recompute(const Config& config) {
  const auto& recompute = config.recompute;
  at_least("recompute.every", recompute.every, 1);
  at_least("recompute.segment", recompute.segment, 0);
  at_least("recompute.budget_bytes", recompute.budget_bytes, 0);
  at_least("recompute.ffn_tile", recompute.ffn_tile, 0);
  require(recompute.keep.empty() || recompute.mode == "selective", "recompute.keep: recompute.mode = ", recompute.mode,
          " keeps no operator's output; set recompute.mode = selective");
  require(recompute.mode != "selective" || !recompute.keep.empty() || has_attention(config.model),
          "recompute.mode = selective: model.family = ", config.model.family,
          " has no attention; name operators in recompute.keep, or set recompute.mode = full");
  require(recompute.budget_bytes == 0 || (recompute.mode == "full" && recompute.every == 1), "recompute.budget_bytes = ", recompute.budget_bytes,
          ": picks among whole modules itself; set recompute.mode = full and recompute.every = 1");
  if (recompute.segment <= 1) return;
  require(recompute.mode == "full" && recompute.every == 1 && recompute.budget_bytes == 0, "recompute.segment = ", recompute.segment,
          ": recomputes every module of a run of them; set recompute.mode = full, recompute.every = 1 and recompute.budget_bytes = 0");
  require(config.zero.stage < 3, "recompute.segment = ", recompute.segment,
          ": computes several modules again when the last of them is due, and zero.stage = 3 has gathered that one alone; set zero.stage to 2 or less, or "
          "recompute.segment = 0");
}

/// What gives a rank a part of each sequence, and how nothing does.
struct CutSequence {
  bool any = false;
  std::string by, without;
};

CutSequence cut_sequence(const Config& config, bool columns) {
  if (columns) return {.any = true, .by = "mesh.cp", .without = "mesh.cp = 1"};
  return {.any = config.tensor.sequence_parallel, .by = "tensor.sequence_parallel", .without = "tensor.sequence_parallel = false"};
}

/// What updates a part of the experts by more than each element alone: "optim.name = muon", or "optim.groups = layers.*: name = muon"; empty if nothing does.
std::string expert_update_beyond_elements(const Config& config) {
  const std::vector<OptimGroup> groups = optim_groups(config.optim);
  const auto is_by_element = [](const std::string& name) { return name == "adamw" || name == "sgd" || name == "lion"; };
  for (int64_t layer = 0; layer < config.model.layers; ++layer) {
    for (const char* weight : {"w1", "w2", "w3"}) {
      const std::string name = detail::concat("layers.", layer, ".feed_forward.experts.", weight);
      const auto group = std::ranges::find_if(groups, [&](const OptimGroup& each) { return named_by(each.pattern, name).has_value(); });
      const OptimConfig& settings = group == groups.end() ? config.optim : group->settings;
      if (is_by_element(settings.name)) continue;
      const bool grouped = group != groups.end() && group->given.contains("name");
      return (grouped ? "optim.groups = " + group->pattern + ": name = " : "optim.name = ") + settings.name;
    }
  }
  return "";
}

void validate_mesh(const Config& config, const std::vector<std::pair<std::string, int>>& axes) {
  int64_t regrouped = 1;
  for (const auto& [axis, size] : axes) {
    if (axis == "dp_shard" || axis == "cp" || axis == "tp") regrouped *= size;
  }
  const auto size_along = [&](const char* axis) {
    return std::find_if(axes.begin(), axes.end(), [&](const auto& entry) { return entry.first == axis; })->second;
  };
  const bool tensor = size_along("tp") > 1, columns = size_along("cp") > 1;
  require(tensor || !config.tensor.sequence_parallel,
          "tensor.sequence_parallel = true: cuts the sequence between layers that mesh.tp cuts, and mesh.tp is 1; "
          "set mesh.tp to more, or tensor.sequence_parallel = false");
  require(tensor || !config.tensor.overlap,
          "tensor.overlap = true: hides the communication of layers that mesh.tp cuts behind their products, and mesh.tp is 1; "
          "set mesh.tp to more, or tensor.overlap = false");
  require(!config.tensor.overlap || config.precision.compute != "fp8",
          "tensor.overlap = true: multiplies parts of a tensor as they arrive, and precision.compute = fp8 scales by the largest entry of all of it; "
          "set tensor.overlap = false, or precision.compute = bf16");
  require(config.tensor.sequence_parallel || !config.tensor.keep_gathered,
          "tensor.keep_gathered = true: only tensor.sequence_parallel gathers what a layer could keep, and it is false; "
          "set tensor.sequence_parallel = true, or tensor.keep_gathered = false");
  validate_expert_choice(config, columns);
  const CutSequence cut = cut_sequence(config, columns);
  require(!cut.any || config.moe.capacity_factor == 0, "moe.capacity_factor = ", config.moe.capacity_factor,
          ": drops by the order of all tokens of a forward pass, of which ", cut.by, " gives a rank a part; set moe.capacity_factor = 0, or ", cut.without);
  const bool over_replicas = config.run.deterministic && config.zero.stage == 0 && !tensor && !columns;
  validate_experts_over_ranks(config, config.zero.stage > 0 ? regrouped : size_along(over_replicas ? "dp_replicate" : "tp"), over_replicas);
  if (!over_replicas || config.mesh.ep * config.mesh.expert_tp == 1) return;
  const std::string update = expert_update_beyond_elements(config);
  require(update.empty(), update, ": looks at more of an expert's weight than each element, and run.deterministic with experts over data ranks has no order ",
          "for that; update experts by adamw, sgd or lion (optim.groups = [\"**.experts: name = adamw\"], before other groups), or set mesh.ep = 1 and ",
          "mesh.expert_tp = 1");
}

}  // namespace

bool experts_have_alike(const ModelConfig& model) { return model.router == "expert_choice" || model.experts_per_token == model.experts; }

void validate_expert_choice(const Config& config, bool columns, bool reads) {
  const CutSequence cut = cut_sequence(config, columns);
  require(!cut.any || config.model.family != "mixtral" || config.model.router != "expert_choice",
          "model.router = expert_choice: experts choose among all tokens of a forward pass, of which ", cut.by, " gives a rank a part; set ",
          reads ? "" : "model.router = softmax or sigmoid, or ", cut.without);
}

void validate_experts_over_ranks(const Config& config, int ranks, bool over_replicas, bool reads) {
  const auto& [mesh, model] = std::tie(config.mesh, config.model);
  at_least("mesh.ep", mesh.ep, 1);
  at_least("mesh.expert_tp", mesh.expert_tp, 1);
  const std::string keys = mesh.expert_tp == 1 ? detail::concat("mesh.ep = ", mesh.ep)
                           : mesh.ep == 1      ? detail::concat("mesh.expert_tp = ", mesh.expert_tp)
                                               : detail::concat("mesh.ep = ", mesh.ep, ", mesh.expert_tp = ", mesh.expert_tp);
  const int64_t apart = int64_t{mesh.ep} * mesh.expert_tp;
  require(apart == 1 || model.experts > 0, keys, ": model.family = ", model.family, " has no experts; set mesh.ep = 1 and mesh.expert_tp = 1");
  const std::string over = config.zero.stage > 0 ? detail::concat("dp_shard x cp x tp = ", ranks)
                           : reads               ? detail::concat("mesh.tp = ", ranks, " (which alone deals those of a model that is only read)")
                           : over_replicas       ? detail::concat("mesh.dp_replicate = ", ranks, " (with run.deterministic, which shards nothing)")
                                           : detail::concat("mesh.tp = ", ranks, " (with zero.stage = 0, whose other ranks hold all that they have alike)");
  require(ranks % apart == 0, keys, ": deals experts over ", apart, " of the ranks of ", over, ", and must divide that; set ",
          config.zero.stage > 0      ? "a mesh.dp_shard, mesh.cp or mesh.tp that makes it so"
          : reads                    ? "a mesh.tp that makes it so"
          : over_replicas            ? "a mesh.dp_replicate that makes it so"
          : config.run.deterministic ? "a mesh.tp that makes it so, or mesh.cp = 1 and mesh.tp = 1 with such a mesh.dp_replicate"
                                     : "zero.stage = 1, 2 or 3 and a mesh.dp_shard (or mesh.cp) that it divides, or such a mesh.tp",
          ", or mesh.ep = 1 and mesh.expert_tp = 1");
  require(mesh.ep == 1 || model.experts % mesh.ep == 0, "mesh.ep = ", mesh.ep, ": cannot deal model.experts = ", model.experts,
          " evenly; set mesh.ep to a divisor of it");
  require(mesh.expert_tp == 1 || model.ffn_dim.value_or(0) % mesh.expert_tp == 0, "mesh.expert_tp = ", mesh.expert_tp,
          ": cannot cut each expert's model.ffn_dim = ", model.ffn_dim.value_or(0), " evenly; set mesh.expert_tp to a divisor of it");
}

void resolve(Config& config) {
  check_sizes(config);
  auto& model = config.model;
  // With from_hf the shape comes from its config.json, which another room reads; until then there is nothing to derive from.
  if (model.from_hf.empty() || model.dim > 0) {
    if (!model.kv_heads && model.heads > 0) model.kv_heads = model.heads;
    if (!model.ffn_dim && model.dim > 0 && !model.family.empty()) model.ffn_dim = default_ffn_dim(model);
    if (!model.max_seq_len && config.data.seq_len > 0) model.max_seq_len = config.data.seq_len;
    if (model.vocab_size == 0 && config.data.tokenizer == "byte") model.vocab_size = byte_vocabulary;
  }
  if (!config.data.seed) config.data.seed = config.run.seed;
  // Gradients lie beside the slices that they update, and so does state where nobody says otherwise.
  auto& offload = config.offload;
  for (const auto& [key, places] : {std::pair{"offload.gradients", &offload.gradients}, {"offload.optimizer", &offload.optimizer}}) {
    if (!offload.params.by_pattern.empty() && !config.given.contains(key) && places->is("device")) *places = offload.params;
  }
  if (config.data.cache_dir.empty()) config.data.cache_dir = default_cache_dir();
  if (config.log.dir.empty()) config.log.dir = (std::filesystem::current_path() / "runs" / config.name).string();
}

void validate(const Config& config, int world_size, Purpose purpose) {
  require(config.zero.stage >= 0 && config.zero.stage <= 3, "zero.stage = ", config.zero.stage, ": expected 0, 1, 2 or 3");
  const auto axes = resolve_mesh(config.mesh, config.zero.stage, world_size);
  const auto size_of = [&](const std::string& wanted) {
    return std::find_if(axes.begin(), axes.end(), [&](const auto& axis) { return axis.first == wanted; })->second;
  };
  if (purpose == Purpose::Train) check_text(config);
  validate_model(config.model);
  validate_process(config);
  validate_rest(config);
  validate_lora(config.lora, config.model);
  validate_quantize(config, /*trains=*/true);
  validate_compression(config);
  validate_recompute(config);
  validate_sharding(config);
  const int sharded = config.zero.stage == 0 ? 1 : size_of("dp_shard") * size_of("cp");
  validate_offload(config, {.cut = sharded * size_of("tp"), .stages = size_of("pp")});
  detail::validate_precision(config);
  validate_data(config, purpose);
  validate_batch(config.batch, int64_t{size_of("dp_replicate")} * size_of("dp_shard"), purpose);
  validate_loss(config.loss);
  validate_moe(config);
  detail::validate_optim(config.optim, config.run.steps);
  validate_mesh(config, axes);
  validate_context(config, config.data.seq_len, "data.seq_len", size_of("cp"), size_of("tp"));
  detail::validate_asynchronous(config, size_of("pp"));
  detail::validate_tied_update(config, size_of("pp"));
  detail::validate_graph(config, size_of);
  check_numbers(config);
}

void validate_reading(const Config& config) {
  at_least("pipeline.virtual_stages", config.pipeline.virtual_stages, 1);
  validate_model(config.model);
  validate_lora(config.lora, config.model);
  validate_quantize(config, /*trains=*/false);
  detail::validate_formats(config.precision);
  validate_process(config);
}

}  // namespace tessera
