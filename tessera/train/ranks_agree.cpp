#include "tessera/train/ranks_agree.h"

#include <algorithm>
#include <map>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_text.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {
namespace {

/// The values of one setting and who has them, in the order of the first rank that does.
std::vector<std::pair<std::string, std::vector<int>>> values_of(const std::string& key, const std::vector<Settings>& of_ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (int rank = 0; const auto& settings : of_ranks) {
    const auto found = std::ranges::find(settings, key, &Settings::value_type::first);
    const std::string value = found == settings.end() ? "not given" : found->second;
    auto same = std::ranges::find(values, value, [](const auto& each) { return each.first; });
    if (same == values.end()) same = values.insert(values.end(), {value, {}});
    same->second.push_back(rank++);
  }
  return values;
}

/// "0.003 on ranks 0-2, 0.3 on rank 3"
std::string text_of(const std::vector<std::pair<std::string, std::vector<int>>>& values) {
  std::string text;
  for (const auto& [value, ranks] : values) text += (text.empty() ? "" : ", ") + value + " on " + comm::name_ranks(ranks);
  return text;
}

std::string content(const std::string& fingerprint) { return "content " + fingerprint; }

/// Its name, or the content of its file.
std::string schedule_of(const Config& config) {
  if (config.mesh.pp == 1 || !is_schedule_file(config.pipeline)) return config.pipeline.schedule;
  const std::string text = schedules::to_csv(schedules::read_csv_file(config.pipeline.schedule));
  return content(hash_hex(text.data(), text.size()));
}

/// What a schedule is made for, where a file says it.
std::string measured_costs_of(const Config& config) {
  if (config.mesh.pp == 1 || config.pipeline.costs_from.empty() || !is_made_for_costs(config.pipeline.schedule)) return "none";
  const std::string text = json_text(to_json(schedules::read_timeline(config.pipeline.costs_from)));
  return content(hash_hex(text.data(), text.size()));
}

}  // namespace

std::optional<std::string> disagreement(const std::vector<Settings>& of_ranks) {
  std::vector<std::string> keys;
  for (const auto& settings : of_ranks) {
    for (const auto& [key, value] : settings) {
      if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
    }
  }
  std::string first, others;
  for (const auto& key : keys) {
    const auto values = values_of(key, of_ranks);
    if (values.size() == 1) continue;
    if (first.empty()) {
      first = detail::concat(key, " = ", text_of(values), ": all ranks of a run need the same");
    } else {
      others += (others.empty() ? " (as of " : ", ") + key;
    }
  }
  if (first.empty()) return std::nullopt;
  return first + others + (others.empty() ? "" : ", which differ too)") + "; start each with the same recipe, flags and texts";
}

void check_ranks_agree(const comm::Group& group, const Settings& mine) {
  if (group.size() == 1) return;
  const comm::CallSite site("start");
  const nlohmann::json all_of_mine = mine;
  const std::string text = json_text(all_of_mine);
  const at::Tensor hash = at::full({1}, static_cast<int64_t>(hash_bytes(text.data(), text.size())), at::device(at::kCPU).dtype(at::kLong));
  const at::Tensor hashes = at::empty({group.size()}, hash.options());
  comm::all_gather(group, hashes, hash);
  if (hashes.eq(hashes[0]).all().item<bool>()) return;
  std::vector<Settings> of_ranks;
  for (const auto& theirs : checkpoint::gather_json(group, all_of_mine)) of_ranks.push_back(theirs.get<Settings>());
  const auto found = disagreement(of_ranks);
  require(!found, found.value_or(""));
}

Settings run_settings(const Config& config, const Inputs& inputs, const comm::WorldOptions& options) {
  Settings settings = shared_settings(config);
  const std::string table = comm::recorded_choice(options).dump();
  settings.emplace_back("comm.table", content(hash_hex(table.data(), table.size())));
  settings.emplace_back("data.tokenizer", content(inputs.corpus->tokenizer()));  // before the texts, whose content is theirs and its
  settings.emplace_back("data.files", content(inputs.corpus->content()));
  settings.emplace_back("data.validation_files", inputs.validation ? content(inputs.validation->content()) : "none");
  settings.emplace_back("pipeline.schedule", schedule_of(config));
  settings.emplace_back("pipeline.costs_from", measured_costs_of(config));
  const bool fresh = !inputs.resume;
  if (!config.model.from_hf.empty() && (fresh || !config.quantize.modules.empty()))
    settings.emplace_back("model.from_hf", content(checkpoint::hugging_face_fingerprint(config.model.from_hf)));
  if (!config.lora.from_peft.empty() && fresh) settings.emplace_back("lora.from_peft", content(checkpoint::peft_fingerprint(config.lora.from_peft)));
  return settings;
}

}  // namespace tessera
