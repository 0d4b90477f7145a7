#include "tessera/train/ranks_agree.h"

#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/meeting/disagreement.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_text.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {
namespace {

std::string content(const std::string& fingerprint) { return "content " + fingerprint; }

/// Its name, or the content of its file. A rank that holds all stages follows it, too, and not where there is but one.
std::string schedule_of(const Config& config) {
  if (!is_schedule_file(config.pipeline)) return config.pipeline.schedule;
  if (config.mesh.pp == 1 && config.pipeline.virtual_stages == 1) return "of a file that nobody reads";
  const std::string text = schedules::to_csv(schedules::read_csv_file(config.pipeline.schedule));
  return content(hash_hex(text.data(), text.size()));
}

/// What a schedule is made for, where a file says it.
std::string measured_costs_of(const Config& config) {
  if ((config.mesh.pp == 1 && config.pipeline.virtual_stages == 1) || config.pipeline.costs_from.empty() || !is_made_for_costs(config.pipeline.schedule))
    return "none";
  const std::string text = json_text(to_json(schedules::read_timeline(config.pipeline.costs_from)));
  return content(hash_hex(text.data(), text.size()));
}

}  // namespace

bool same_on_all(const comm::Group& group, const nlohmann::json& mine) {
  if (group.size() == 1) return true;
  const std::string text = json_text(mine);
  const at::Tensor hash = at::full({1}, static_cast<int64_t>(hash_bytes(text.data(), text.size())), at::device(at::kCPU).dtype(at::kLong));
  const at::Tensor hashes = at::zeros({group.size()}, hash.options());
  comm::all_gather(group, hashes, hash);
  return hashes.eq(hashes[0]).all().item<bool>();
}

void check_ranks_agree(const comm::Group& group, const Settings& mine) {
  const comm::CallSite site("start");
  const nlohmann::json all_of_mine = mine;
  if (same_on_all(group, all_of_mine)) return;
  std::vector<Settings> of_ranks;
  for (const auto& theirs : checkpoint::gather_json(group, all_of_mine)) of_ranks.push_back(theirs.get<Settings>());
  const auto found = comm::disagreement(of_ranks);
  require(!found, found.value_or(""));
}

Settings pipeline_settings(const Config& config) { return {{"pipeline.schedule", schedule_of(config)}, {"pipeline.costs_from", measured_costs_of(config)}}; }

Settings run_settings(const Config& config, const Inputs& inputs, const comm::WorldOptions& options) {
  Settings settings = shared_settings(config);
  const std::string table = comm::recorded_choice(options).dump();
  settings.emplace_back("comm.table", content(hash_hex(table.data(), table.size())));
  settings.emplace_back("data.tokenizer", content(inputs.corpus->tokenizer()));  // before the texts, whose content is theirs and its
  settings.emplace_back("data.files", content(inputs.corpus->content()));
  settings.emplace_back("data.validation_files", inputs.validation ? content(inputs.validation->content()) : "none");
  for (auto& setting : pipeline_settings(config)) settings.push_back(std::move(setting));
  // Hosts may keep these elsewhere, but whether they are there at all decides which collectives a run makes.
  for (const auto& [key, path] : {std::pair("checkpoint.dir", config.checkpoint.dir), std::pair("checkpoint.resume", config.checkpoint.resume)})
    settings.emplace_back(key, path.empty() ? "not set" : "set");
  const bool reads = reads_starting_files(config, inputs.resume);
  if (!config.model.from_hf.empty() && (reads || !config.quantize.modules.empty()))
    settings.emplace_back("model.from_hf", content(checkpoint::hugging_face_fingerprint(config.model.from_hf)));
  if (!config.lora.from_peft.empty() && reads) settings.emplace_back("lora.from_peft", content(checkpoint::peft_fingerprint(config.lora.from_peft)));
  return settings;
}

}  // namespace tessera
