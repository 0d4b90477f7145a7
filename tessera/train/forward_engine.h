#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/data/loader.h"
#include "tessera/models/model.h"
#include "tessera/pipeline/executor.h"
#include "tessera/train/cut_model.h"
#include "tessera/train/model_stage.h"

namespace tessera {

/// Forward passes without gradients, in evaluation mode, of a model of which a rank may hold a part: validation, replays, `tessera eval`, generation.
/// Micro-batches follow each other through the stages, and so do passes: none waits for the one before to have left the last stage, unless somebody asks what
/// it gave.
///
/// Collective over the ranks that hold the model's stages, and over those that its layers and sequences are cut over: all are given the same micro-batches, of
/// which each reads what reads() and columns() say. The model has to outlive it. One rank, one thread.
class ForwardEngine {
 public:
  /// Of a model that is whole, but for layers that are cut.
  explicit ForwardEngine(LanguageModel& model);
  explicit ForwardEngine(const CutModel& model);
  ForwardEngine(const ForwardEngine&) = delete;
  ForwardEngine& operator=(const ForwardEngine&) = delete;

  /// The summed loss of each micro-batch, fp32 [micro-batches], as one rank has it bit for bit; 0 on ranks that do not hold the last stage: see share(). Where
  /// sequences are cut, of this rank's columns.
  at::Tensor loss_sums(const std::vector<data::MicroBatch>& micro_batches);

  /// Logits of tokens [B, S], fp32 [B, S, V], on every rank.
  at::Tensor logits(const at::Tensor& tokens);
  /// Of the whole rows of a micro-batch of which this rank has its columns, fp32 [rows, seq_len, V], on every rank.
  at::Tensor logits(const data::MicroBatch& micro);

  /// Every pass of the engine: takes `micro_batches` of `pass` through the stages.
  void run(Pass& pass, int micro_batches);

  /// Gives all ranks of the pipeline what those of the last stage have in `tensor`.
  void share(const at::Tensor& tensor) const;

  data::Reads reads() const { return {.tokens = takes_tokens_, .labels = holds_end(), .padding = model_.config().experts > 0}; }
  bool holds_end() const { return stages_.contains(static_cast<int>(rank_of_stage_.size()) - 1); }
  int end_rank() const { return rank_of_stage_.back(); }       ///< which of ranks() holds the last stage
  const comm::Group& ranks() const { return ranks_.ahead; }    ///< of the pipeline
  const comm::Group& beside() const { return ranks_.beside; }  ///< the same, for what does not go from stage to stage
  const ColumnRanks& columns() const { return columns_; }      ///< over which sequences are cut
  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  LanguageModel& model() const { return model_; }
  at::Device device() const { return device_; }

  /// Micro-batches to be given at once: enough for every stage to have work, few enough to be held.
  size_t in_flight() const;

 private:
  LanguageModel& model_;
  pipeline::Channels ranks_;
  ColumnRanks columns_;
  std::vector<int> rank_of_stage_{0};
  at::Device device_;
  std::map<int, ModelStage> stages_;  ///< of this rank, by number
  bool takes_tokens_ = true;
  std::map<int, std::unique_ptr<pipeline::Executor>> executors_;  ///< by the number of micro-batches
};

}  // namespace tessera
