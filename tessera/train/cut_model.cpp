#include "tessera/train/cut_model.h"

#include <algorithm>

namespace tessera {

CutRule column_rule(const Config& config, int cp) {
  const CutRule head_tail = &SequenceCut::head_tail, contiguous = &SequenceCut::contiguous;
  return holds_one_part(config, cp) ? contiguous : head_tail;
}

int64_t ColumnRanks::most(int64_t length) const {
  int64_t most = 0;
  const SequenceCut cut = of(length);
  for (int rank = 0; rank < cut.ranks(); ++rank) most = std::max(most, cut.columns(rank));
  return most;
}

pipeline::Channels pipeline_channels(const Mesh& mesh, const Axes& stages) {
  const comm::Group ranks = mesh[stages];
  if (ranks.matches_tags()) return ranks;
  return {ranks, mesh.another(stages, "back"), mesh.another(stages, "beside")};
}

std::map<int, ModelStage> stages_of(const CutModel& model) {
  std::map<int, ModelStage> stages;
  if (model.parts.empty()) stages.emplace(0, ModelStage(*model.model, model.stream));
  for (const ModelShare& part : model.parts) stages.emplace(part.stage, ModelStage(part.module, model.stream));
  return stages;
}

std::map<int, pipeline::Stage*> pointers_to(std::map<int, ModelStage>& stages) {
  std::map<int, pipeline::Stage*> pointers;
  for (auto& [number, stage] : stages) pointers.emplace(number, &stage);
  return pointers;
}

at::Device device_of(const LanguageModel& model) {
  const auto parameters = model.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

}  // namespace tessera
