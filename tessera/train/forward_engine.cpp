#include "tessera/train/forward_engine.h"

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
  /// `positions`: of the tokens in sequences of `seq_len`; undefined: they are whole.
  LogitsPass(at::Tensor tokens, const at::Tensor& positions, int64_t seq_len) : tokens_(std::move(tokens)), seq_len_(seq_len) {
    if (positions.defined()) positions_ = positions;
  }

  Size size(int /*micro_batch*/) const override { return {.rows = tokens_.size(0), .seq_len = seq_len_, .columns = tokens_.size(1)}; }
  at::Tensor run(int /*micro_batch*/, const Compute& compute) override { return compute({.tokens = tokens_, .positions = positions_}); }
  at::Tensor finish(int /*micro_batch*/, const at::Tensor& given) override {
    logits = given.to(at::kFloat);
    return {};
  }

  at::Tensor logits;

 private:
  at::Tensor tokens_;
  std::optional<at::Tensor> positions_;
  int64_t seq_len_;
};

/// The whole of what each rank has some columns of: [B, columns, V] -> [B, S, V] on every rank.
at::Tensor gather_columns(const ColumnRanks& ranks, int64_t length, const at::Tensor& own) {
  const comm::CallSite site("context_parallel.logits");
  const SequenceCut cut = ranks.of(length);
  const int64_t most = ranks.most(length);
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
  const at::Tensor tokens = given.to(device_);
  const int64_t length = tokens.size(1);
  const at::Tensor positions = columns_.cut() ? columns_.of(length).positions(columns_.group.rank(), tokens.device()) : at::Tensor();
  const at::Tensor read = positions.defined() ? tokens.index_select(1, positions) : tokens;
  LogitsPass pass(read, positions, length);
  run(pass, 1);
  const at::Tensor logits = holds_end() ? pass.logits.contiguous()
                                        : at::empty({read.size(0), read.size(1), model_.config().vocab_size}, at::TensorOptions(at::kFloat).device(device_));
  share(logits);
  return columns_.cut() ? gather_columns(columns_, length, logits) : logits;
}

void ForwardEngine::share(const at::Tensor& tensor) const {
  const comm::CallSite site("pipeline.end");
  comm::broadcast(ranks_.ahead, tensor, end_rank());
}

}  // namespace tessera
