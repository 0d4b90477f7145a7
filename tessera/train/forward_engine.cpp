#include "tessera/train/forward_engine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/pipeline/schedules/forwards.h"
#include "tessera/train/batch_feed.h"
#include "tessera/train/evaluation_mode.h"

namespace tessera {
namespace {

class LogitsPass final : public Pass {
 public:
  explicit LogitsPass(const data::MicroBatch& micro) : micro_(micro) {}

  Size size(int /*micro_batch*/) const override { return {.rows = micro_.rows, .seq_len = micro_.seq_len, .columns = micro_.columns(), .cut = micro_.cut}; }
  at::Tensor run(int /*micro_batch*/, const Compute& compute) override {
    const auto given = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
    return compute({.tokens = micro_.tokens,
                    .positions = given(micro_.places.defined() ? micro_.places : micro_.positions),
                    .document_ids = given(micro_.document_ids),
                    .padding = micro_.padding,
                    .padding_size = micro_.padding_size()});
  }
  at::Tensor finish(int /*micro_batch*/, const at::Tensor& given) override {
    logits = given.to(at::kFloat);
    return {};
  }

  at::Tensor logits;

 private:
  const data::MicroBatch& micro_;
};

/// The whole of what each rank has some columns of: [B, columns, V] -> [B, S, V] on every rank.
at::Tensor gather_columns(const ColumnRanks& ranks, const SequenceCut& cut, int64_t length, const at::Tensor& own) {
  const comm::CallSite site("context_parallel.logits");
  int64_t most = 0;
  for (int rank = 0; rank < cut.ranks(); ++rank) most = std::max(most, cut.columns(rank));
  const at::Tensor padded = at::zeros({own.size(0), most, own.size(2)}, own.options());
  padded.narrow(1, 0, own.size(1)).copy_(own);
  const at::Tensor all = at::empty({cut.ranks(), own.size(0), most, own.size(2)}, own.options());
  comm::all_gather(ranks.group, all, padded);
  at::Tensor whole = at::empty({own.size(0), length, own.size(2)}, own.options());
  for (int rank = 0; rank < cut.ranks(); ++rank) whole.index_copy_(1, cut.positions(rank, own.device()), all[rank].narrow(1, 0, cut.columns(rank)));
  return whole;
}

}  // namespace

ForwardEngine::ForwardEngine(LanguageModel& model) : model_(model), device_(device_of(model)) { stages_.emplace(0, ModelStage(model)); }

ForwardEngine::ForwardEngine(const CutModel& model)
    : model_(*model.model),
      ranks_(model.parts.empty() ? pipeline::Channels() : model.channels),
      columns_(model.columns),
      rank_of_stage_(model.rank_of_stage),
      device_(model.device),
      stages_(stages_of(model)),
      takes_tokens_(stages_.contains(0)) {}

size_t ForwardEngine::in_flight() const {
  // A rank goes on as soon as the next one has taken what it made, so more than a few would lie there without making any rank faster.
  constexpr int kForEachRank = 4;
  return ranks_.size() == 1 ? 1 : static_cast<size_t>(kForEachRank * ranks_.size());
}

void ForwardEngine::run(Pass& pass, int micro_batches) {
  const EvaluationMode mode(model_);
  const at::NoGradGuard no_grad;
  for (auto& [number, stage] : stages_) stage.begin(pass);
  auto& executor = executors_[micro_batches];
  if (!executor) {
    executor = std::make_unique<pipeline::Executor>(schedules::forwards(rank_of_stage_, ranks_.size(), micro_batches),
                                                    pipeline::chain(static_cast<int>(rank_of_stage_.size())), pointers_to(stages_),
                                                    pipeline::ExecutorOptions{.ranks = ranks_, .device = device_, .around = {}});
  }
  executor->run();
}

at::Tensor ForwardEngine::loss_sums(const std::vector<data::MicroBatch>& given) {
  std::vector<data::MicroBatch> micro_batches = given;
  move_to(micro_batches, device_);
  LossPass pass;
  pass.begin(micro_batches);
  run(pass, static_cast<int>(micro_batches.size()));
  if (holds_end()) return at::stack(pass.losses());
  return at::zeros({static_cast<int64_t>(micro_batches.size())}, at::TensorOptions(at::kFloat).device(device_));
}

at::Tensor ForwardEngine::logits(const at::Tensor& given) {
  data::MicroBatch micro{.tokens = given.to(device_), .rows = given.size(0), .seq_len = given.size(1)};
  if (columns_.cut()) {
    micro.cut = std::make_shared<const SequenceCut>(columns_.of(micro.seq_len));
    micro.positions = micro.cut->positions(columns_.group.rank(), device_);
    micro.tokens = micro.tokens.index_select(1, micro.positions);
  }
  return logits(micro);
}

at::Tensor ForwardEngine::logits(const data::MicroBatch& given) {
  std::vector<data::MicroBatch> here{given};
  move_to(here, device_);
  const data::MicroBatch& micro = here.front();
  LogitsPass pass(micro);
  run(pass, 1);
  const at::Tensor logits = holds_end() ? pass.logits.contiguous()
                                        : at::empty({micro.rows, micro.columns(), model_.config().vocab_size}, at::TensorOptions(at::kFloat).device(device_));
  share(logits);
  return columns_.cut() ? gather_columns(columns_, *micro.cut, micro.seq_len, logits) : logits;
}

void ForwardEngine::share(const at::Tensor& tensor) const {
  const comm::CallSite site("pipeline.end");
  comm::broadcast(ranks_.ahead, tensor, end_rank());
}

}  // namespace tessera
