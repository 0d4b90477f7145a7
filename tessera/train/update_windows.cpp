#include "tessera/train/update_windows.h"

#include "tessera/core/error.h"

namespace tessera {

UpdateWindows::UpdateWindows(const schedules::RankActions& actions, std::function<void()> met) : met_(std::move(met)) {
  using schedules::Kind;
  int first = 0;
  for (size_t i = 0; i < actions.size(); ++i) {
    const schedules::Action& action = actions[i];
    if (action.kind != Kind::Update) continue;
    const bool behind = i > 0 && actions[i - 1].kind == Kind::Backward && actions[i - 1].micro_batch == action.micro_batch;
    windows_.push_back({.first = first, .last = action.micro_batch, .late = !behind});
    first = action.micro_batch + 1;
  }
}

std::vector<double> UpdateWindows::scales(const data::StepBatch& batch) const {
  std::vector<double> scales(batch.micro_batches.size());
  for (const auto& [first, last, late] : windows_) {
    int64_t tokens = 0;
    for (int i = first; i <= last; ++i) tokens += batch.micro_batches[static_cast<size_t>(i)].global_valid_tokens;
    for (int i = first; i <= last; ++i) scales[static_cast<size_t>(i)] = 1.0 / static_cast<double>(tokens);
  }
  return scales;
}

void UpdateWindows::begin(GradientSynchronizer& synchronizer, const data::StepBatch& batch) {
  synchronizer_ = &synchronizer;
  batch_ = &batch;
  current_ = 0;
  ran_.clear();
  waiting_.clear();  // of a step that ended in its midst
  exposed_ = {};
  open();
}

void UpdateWindows::open() {
  synchronizer_->begin_step();
  const auto& [first, last, late] = windows_[current_];
  for (int i = first; i <= last && ran_.contains(i); ++i) {
    synchronizer_->before(ActionKind::Forward, position_of(i));
    synchronizer_->after(ActionKind::Forward, position_of(i));
  }
}

MicroBatchPosition UpdateWindows::position_of(int micro_batch) const {
  const data::MicroBatch& micro = batch_->micro_batches[static_cast<size_t>(micro_batch)];
  return {.index = micro.index, .last = micro_batch == windows_[current_].last, .padding = micro.weight == 0};
}

void UpdateWindows::around(ActionKind kind, int micro_batch, const std::function<void()>& body) {
  const bool announced = current_ < windows_.size() && micro_batch <= windows_[current_].last;
  if (announced) synchronizer_->before(kind, position_of(micro_batch));
  body();
  if (announced) synchronizer_->after(kind, position_of(micro_batch));
  if (kind == ActionKind::Forward) ran_.insert(micro_batch);
  if (announced && kind == ActionKind::Backward && micro_batch == windows_[current_].last) close();
}

void UpdateWindows::close() {
  synchronizer_->finish();
  exposed_ += synchronizer_->statistics().exposed;
  met_();
  if (!windows_[current_].late) return;
  // Of memory that somebody holds gradients in, a synchronizer of whole weights makes no further use.
  auto& aside = waiting_.emplace_back();
  for (const auto& parameter : synchronizer_->updated()) aside.push_back(parameter.tensor.grad());
  go_on();
}

void UpdateWindows::go_on() {
  if (++current_ < windows_.size()) open();
}

std::vector<at::Tensor> UpdateWindows::exchange(std::vector<at::Tensor> gradients) const {
  const auto parameters = synchronizer_->updated();
  for (size_t i = 0; i < parameters.size(); ++i) std::swap(parameters[i].tensor.mutable_grad(), gradients[i]);
  return gradients;
}

void UpdateWindows::update(const std::function<void()>& body) {
  if (waiting_.empty()) {
    body();
    synchronizer_->after_update();
    return go_on();
  }
  std::vector<at::Tensor> of_the_next = exchange(std::move(waiting_.front()));
  waiting_.pop_front();
  body();  // of whole weights: the synchronizer, which is in its next step, has nothing to bring together
  exchange(std::move(of_the_next));
}

}  // namespace tessera
