#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/config/config.h"
#include "tessera/context_parallel/context_parallel.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/layout/sequence_cut.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/model.h"
#include "tessera/pipeline/channels.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/train/model_stage.h"

namespace tessera {

/// The embedding, which a head that is tied to it uses, too.
inline constexpr std::string_view kTiedWeight = "embed_tokens.weight";

/// A stage's share of a model.
struct ModelShare {
  int stage = 0;
  ModelPart module = nullptr;
};

/// How the columns of a sequence are dealt over `cp` ranks.
CutRule column_rule(const Config& config, int cp);

/// Ranks that are dealt the same samples, and of each other columns.
struct ColumnRanks {
  comm::Group group;  ///< of one: sequences are whole
  CutRule rule = &SequenceCut::contiguous;

  bool cut() const { return group.size() > 1; }
  /// Of a sequence that is one document.
  SequenceCut of(int64_t length) const { return rule({length}, group.size()); }
  /// Columns of the rank that has the most; all, where sequences are whole.
  int64_t most(int64_t length) const;
  /// As loaders take it.
  ColumnShare share() const { return {.rule = rule, .rank = group.rank(), .ranks = group.size()}; }
};

/// What a rank holds of a model, and who holds the rest: what passes through a model need to know of it, in training and in reading. Members are destroyed from
/// the last to the first: what is attached goes before the model it is attached to.
struct CutModel {
  std::shared_ptr<LanguageModel> model;      ///< or what this rank holds of it
  Attachment adapted;                        ///< what learns beside frozen weights
  std::unique_ptr<TensorParallel> tensor;    ///< null where layers are whole
  std::unique_ptr<ExpertParallel> experts;   ///< null where a rank holds all experts of its layers
  std::unique_ptr<ContextParallel> context;  ///< null where sequences are whole
  std::vector<ModelShare> parts;             ///< the model's stages on this rank, in their order; empty where it is whole
  comm::Group pipeline;                      ///< ranks that hold the other stages
  pipeline::Channels channels;               ///< between these
  std::vector<int> rank_of_stage{0};         ///< of that group, for every stage
  StreamShape stream;                        ///< what passes through them
  comm::Group layers;                        ///< ranks that layers are cut over
  ColumnRanks columns;                       ///< ranks that sequences are cut over
  at::Device device = at::kCPU;              ///< where it computes
};

/// Between the ranks that hold stages: groups of their own where the engine matches messages by order alone. Collective over the pipeline.
pipeline::Channels pipeline_channels(const Mesh& mesh, const Axes& stages);

/// The stages that a rank holds, by number; a model that is whole is stage 0.
std::map<int, ModelStage> stages_of(const CutModel& model);

/// As an executor takes them.
std::map<int, pipeline::Stage*> pointers_to(std::map<int, ModelStage>& stages);

/// Of the model's parameters.
at::Device device_of(const LanguageModel& model);

}  // namespace tessera
