#include "tessera/plan/framework.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <tuple>

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/plan/hardware_files.h"
#include "tessera/plan/toml_table.h"

// A framework is told apart by what it says of itself, in four kinds of lines: keys of our configuration, the operators that it does not fuse, what its host
// takes, and what it holds beside tensors. The step stays ours; where that cannot say what a framework does, there is no file for it.

namespace tessera::plan {
namespace {

OperatorHabit habit_of(TomlTable& table, const std::string& name) {
  OperatorHabit habit{.name = name};
  habit.launches = table.number("launches").value_or(1);
  habit.passes = table.number("passes").value_or(1);
  habit.score_passes = table.number("score_passes").value_or(0);
  table.end({"launches", "passes", "score_passes"});
  return habit;
}

/// A line is of all operators whose name begins so.
bool is_operator(const std::string& name) {
  if (name.empty()) return false;
  return std::ranges::any_of(c10::Dispatcher::singleton().getAllOpNames(), [&](const c10::OperatorName& known) { return known.name.starts_with(name); });
}

/// Of a parameter, beside ours.
double held_bytes(const Framework& framework, const Config& config, int world) {
  if (config.zero.stage == 0) return framework.held_per_parameter;
  const auto axes = resolve_mesh(config.mesh, config.zero.stage, world);
  const auto shards = std::ranges::find(axes, "dp_shard", [](const auto& axis) { return axis.first; });
  if (shards == axes.end() || shards->second == 1) return framework.held_per_parameter;
  return framework.held_when_sharded + framework.held_per_sharded / shards->second;
}

double microseconds(TomlTable& table, const std::string& key, double otherwise) { return table.number_or_none(key).value_or(otherwise * 1e6) * 1e-6; }

}  // namespace

Framework parse_framework(const std::string& text, const std::string& origin) {
  const toml::table parsed = parse_toml(text, origin);
  TomlTable file(parsed, origin);
  Framework framework{.key = origin, .name = file.text("name")};
  if (auto settings = file.table("settings")) {
    for (const std::string& section : settings->keys()) {
      auto keys = settings->table(section);
      for (const std::string& key : keys->keys()) {
        const std::string value = keys->written(key);
        Config unused;
        detail::set_from_text(unused, section, key, value, origin);  // a value that no configuration takes is refused here, where it is known who wrote it
        framework.settings.push_back(section + "." + key + "=" + value);
      }
    }
  }
  Habits& habits = framework.habits;
  if (auto host = file.table("host")) {
    habits.launch = microseconds(*host, "launch_us", habits.launch);
    habits.collective_launch = microseconds(*host, "collective_launch_us", habits.collective_launch);
    habits.collective_launch_per_level = microseconds(*host, "collective_launch_level_us", habits.collective_launch_per_level);
    framework.pipelined_launch_per_rank = microseconds(*host, "pipelined_collective_rank_us", 0);
    habits.waits_for_collectives = host->flag("waits_for_collectives").value_or(false);
    host->end({"launch_us", "collective_launch_us", "collective_launch_level_us", "pipelined_collective_rank_us", "waits_for_collectives"});
  }
  if (auto operators = file.table("operators")) {
    for (const std::string& name : operators->keys()) {
      require(is_operator(name), operators->name_of(detail::quoted(name)),
              " is the beginning of no operator's name; give one, such as aten::add or tessera::rope");
      auto table = operators->table(name);
      habits.operators.push_back(habit_of(*table, name));
    }
  }
  if (auto logits = file.table("logits")) {
    framework.whole_logits = logits->flag("whole").value_or(false);
    framework.logit_bytes = logits->number_or_none("held_bytes").value_or(0);
    habits.logit_bytes = logits->number_or_none("moved_bytes").value_or(0);
    habits.logit_launches = logits->number_or_none("launches").value_or(0);
    logits->end({"whole", "held_bytes", "moved_bytes", "launches"});
  }
  if (auto stages = file.table("stages")) {
    framework.stages_by_weights = stages->flag("by_weights").value_or(false);
    stages->end({"by_weights"});
  }
  if (auto memory = file.table("memory")) {
    framework.context_bytes = 1e9 * memory->number_or_none("context_gb").value_or(0);
    framework.held_per_parameter = memory->number_or_none("held_per_parameter").value_or(0);
    framework.held_when_sharded = memory->number_or_none("held_when_sharded").value_or(framework.held_per_parameter);
    framework.held_per_sharded = memory->number_or_none("held_per_sharded").value_or(0);
    framework.kept_per_element = memory->number_or_none("kept_per_element").value_or(0);
    framework.reserve = memory->number("reserve").value_or(1);
    require(framework.reserve >= 1, memory->shown("reserve"), ": expected at least 1: what is held over what is alive");
    memory->end({"context_gb", "held_per_parameter", "held_when_sharded", "held_per_sharded", "kept_per_element", "reserve"});
  }
  auto sources = file.table("sources");
  require(sources.has_value() && !sources->keys().empty(), file.name_of("sources"), " is missing: where the lines are from");
  for (const std::string& key : sources->keys()) framework.sources[key] = sources->text(key);
  file.end({"name", "settings", "stages", "host", "operators", "logits", "memory", "sources"});
  return framework;
}

std::vector<std::string> framework_names() { return names_of(kFrameworkFiles); }

Framework find_framework(const std::string& name_or_file) {
  return read_named(name_or_file, kFrameworkFiles, "--framework", "framework", "those of tessera/plan/frameworks", parse_framework);
}

std::vector<std::string> settings_of(const Framework& framework, int tp) {
  std::vector<std::string> settings = framework.settings;
  if (tp == 1) std::erase_if(settings, [](const std::string& setting) { return setting.starts_with("tensor."); });
  return settings;
}

std::vector<std::string> stages_by_weights(const ModelConfig& model, int stages) {
  const double products = model.family == "gpt2" ? 2 : 3;  // of a feed-forward part
  const auto dim = static_cast<double>(model.dim);
  std::vector<double> weights(static_cast<size_t>(model.layers) + 2, 4 * dim * dim + products * dim * static_cast<double>(model.ffn_dim.value()));
  weights.front() = 0;
  weights.back() = dim * static_cast<double>(model.vocab_size);
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts(1);
  double before = 0;
  for (size_t link = 0; link < weights.size(); ++link) {
    ++counts.back();
    before += weights[link];
    if (link + 1 < weights.size() && before > all * static_cast<double>(counts.size()) / stages) counts.push_back(0);
  }
  if (std::ssize(counts) < stages) return {"cost"};
  std::vector<std::string> split;
  for (const int64_t count : counts) split.push_back(std::to_string(count));
  return split;
}

Machine driven(const Framework& framework, const Config& config, Machine machine) {
  machine.habits = framework.habits;
  if (config.mesh.pp > 1) machine.habits.layer_collective_launch_per_rank = framework.pipelined_launch_per_rank;
  if (framework.whole_logits) machine.habits.logit_columns = (config.model.vocab_size + config.mesh.tp - 1) / config.mesh.tp;
  return machine;
}

double reserved_bytes(const Framework& framework, const Config& config, const DryRun& run, bool reserve, std::optional<int> pipeline_rank) {
  const auto& [model, mesh, batch] = std::tie(config.model, config.mesh, config.batch);
  invariant(mesh.tp > 0 && mesh.cp > 0 && mesh.pp > 0, "a framework's bytes are of a mesh whose sizes are settled");
  const double tokens = static_cast<double>(batch.micro_size) * static_cast<double>(config.data.seq_len) / mesh.cp / mesh.tp;
  const double logits = framework.logit_bytes * tokens * static_cast<double>(model.vocab_size);
  const bool cut = run.pipeline.stages.size() > 1;
  const int last = cut ? run.pipeline.stages.back().rank : 0;
  const double held = held_bytes(framework, config, run.world);
  double most = 0;
  for (const RankClass& ranks : run.ranks) {
    if (ranks.pipeline_rank != pipeline_rank.value_or(ranks.pipeline_rank)) continue;
    double alive = static_cast<double>(needed_bytes(ranks));
    const double layers = static_cast<double>(model.layers) / mesh.pp;
    const double kept = cut ? run.pipeline.kept_alive.at(static_cast<size_t>(ranks.pipeline_rank)) : 1;
    // Our step holds some gradients that wait for their sums, too.
    const auto waiting = static_cast<double>(ranks.peak_bytes.at(static_cast<size_t>(MemoryCategory::Other)));
    alive += std::max(0.0, held * static_cast<double>(ranks.parameters) - waiting);
    alive += framework.kept_per_element * tokens * static_cast<double>(model.dim) * layers * kept;
    if (ranks.pipeline_rank == last) alive += logits;
    most = std::max(most, alive);
  }
  return most * (reserve ? framework.reserve : 1);
}

bool fits(const Framework& framework, const Config& config, const DryRun& run) {
  return run.memory_limit == 0 || reserved_bytes(framework, config, run) + framework.context_bytes <= static_cast<double>(run.memory_limit);
}

std::string verdict_of(const Framework& framework, const Config& config, const DryRun& run) {
  const auto bytes = [](double value) { return format_bytes(static_cast<int64_t>(value)); };
  std::string text = fmt::format("framework {}: {} reserved and {} of contexts on the rank that needs most", framework.name,
                                 bytes(reserved_bytes(framework, config, run)), bytes(framework.context_bytes));
  if (run.memory_limit > 0) text += fmt::format(", which {} {}", fits(framework, config, run) ? "fit" : "do not fit", format_bytes(run.memory_limit));
  return text;
}

}  // namespace tessera::plan
