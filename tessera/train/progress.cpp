#include "tessera/train/progress.h"

#include <algorithm>
#include <filesystem>

#include "tessera/checkpoint/peft.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/core/error.h"
#include "tessera/core/json_reason.h"

namespace tessera {

namespace {

// Turns what nlohmann-json throws on a field that is missing or of another type into a refusal that names the checkpoint.
template <class Read>
auto read_field(const nlohmann::json& progress, const char* field, const std::string& source, Read&& read) {
  try {
    return read(progress.at(field));
  } catch (const nlohmann::json::exception& e) {
    throw ConfigError(detail::concat(source, ": progress.", field, " in manifest.json cannot be read (", json_reason(e),
                                     "); the checkpoint is damaged or of another version, use another"));
  }
}

bool holds_exactly(const BucketLayout& plan, std::span<const GradientSpec> gradients, const std::string& source) {
  try {
    check_bucket_layout(plan, gradients, source);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace

int data_ranks_of(const nlohmann::json& progress, const std::string& source) {
  return read_field(progress, "data_ranks", source, [](const nlohmann::json& n) { return n.get<int>(); });
}

nlohmann::json progress_json(const Config& config, const data::Cursor& cursor, const nlohmann::json& plans, const nlohmann::json& algorithms, int data_ranks) {
  return {{"config", to_toml(config)},
          {"cursor",
           {{"step", cursor.step},
            {"global_size", cursor.global_size},
            {"seq_len", cursor.seq_len},
            {"seed", cursor.seed},
            {"shuffle", cursor.shuffle},
            {"content", cursor.content},
            {"offset", cursor.offset}}},
          {"data_ranks", data_ranks},
          {"bucket_plan", plans},
          {"comm", algorithms}};
}

std::vector<std::string> trained_beside_adapters(const Config& config, const nlohmann::json& progress, const std::string& source) {
  std::vector<std::string> all = config.lora.trained;
  const auto add = [&](const std::vector<std::string>& patterns) {
    for (const std::string& pattern : patterns) {
      if (std::ranges::find(all, pattern) == all.end()) all.push_back(pattern);
    }
  };
  const LoraConfig before = config_of(progress, source).lora;
  add(before.trained);
  if (before.modules.empty()) add({checkpoint::kWholeModel});
  if (progress.contains("lora_trained")) {
    add(read_field(progress, "lora_trained", source, [](const nlohmann::json& saved) { return saved.get<std::vector<std::string>>(); }));
  }
  return all;
}

data::Cursor cursor_of(const nlohmann::json& progress, const std::string& source) {
  return read_field(progress, "cursor", source, [](const nlohmann::json& c) {
    return data::Cursor{.step = c.at("step").get<int64_t>(),
                        .global_size = c.at("global_size").get<int64_t>(),
                        .seq_len = c.at("seq_len").get<int64_t>(),
                        .seed = c.at("seed").get<uint64_t>(),
                        .shuffle = c.at("shuffle").get<bool>(),
                        .content = c.at("content").get<std::string>(),
                        .offset = c.value("offset", int64_t{0})};
  });
}

Config config_of(const nlohmann::json& progress, const std::string& source) {
  const auto text = progress.find("config");
  require(text != progress.end() && text->is_string(), source,
          ": was saved by a program of its own, and only what `tessera train` saved can be read here; name such a checkpoint");
  return parse_config(text->get<std::string>(), std::filesystem::current_path(), {}, source);
}

std::optional<Config> config_if_any(const nlohmann::json& progress) {
  try {
    return config_of(progress, "");
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

std::optional<BucketLayout> bucket_plan_of(const nlohmann::json& progress, const PlanLayout& layout, std::span<const GradientSpec> gradients,
                                           const std::string& source, bool& other) {
  // One plan served every rank: of whole layers, or of parts of equal size, which another number of ranks would not have.
  auto plans = read_field(progress, "bucket_plan", source, [](const nlohmann::json& saved) {
    std::vector<BucketLayout> read;
    if (!saved.is_array()) return std::vector{bucket_layout_from_json(saved)};
    for (const auto& each : saved) read.push_back(bucket_layout_from_json(each));
    return read;
  });
  const bool one = plans.size() == 1, mine = one || static_cast<int>(plans.size()) == layout.stages * layout.tensor_ranks;
  other = false;
  if (plans.empty() || plans.front().empty()) return std::nullopt;
  BucketLayout& plan = plans[mine && !one ? static_cast<size_t>(layout.stage * layout.tensor_ranks + layout.tensor_rank) : 0];
  const bool same = mine && data_ranks_of(progress, source) == layout.data_ranks && plan.sizes == layout.sizes && holds_exactly(plan, gradients, source);
  other = !same;
  if (!same) return std::nullopt;
  return std::move(plan);
}

comm::WorldOptions world_options_of(const Config& config, int data_ranks, const nlohmann::json& progress, const std::string& source,
                                    std::vector<std::string>& remarks) {
  auto options = comm::world_options(config.comm);
  if (!progress.contains("comm") || data_ranks_of(progress, source) != data_ranks) return options;
  const auto saved = comm::with_recorded_choice(options, progress.at("comm"), source);
  const auto now = comm::recorded_choice(options), before = comm::recorded_choice(saved);
  if (now == before) return options;
  if (options.algorithm == "auto") {
    if (!options.table.empty()) {
      remarks.push_back(detail::concat("comm.table = ", options.table, ": not used, since ", source,
                                       " goes on with the algorithms that it recorded (comm.algorithm = ", saved.algorithm,
                                       "); to choose anew, name algorithms in comm.algorithm"));
    }
    return saved;
  }
  remarks.push_back(detail::concat("comm.algorithm = ", options.algorithm, " instead of ", saved.algorithm, " as in ", source,
                                   ": sums are added in another order from here on, so the run goes on, but not bit for bit"));
  return options;
}

}  // namespace tessera
