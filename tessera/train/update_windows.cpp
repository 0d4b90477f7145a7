#include "tessera/train/update_windows.h"

#include "tessera/core/error.h"

namespace tessera {

UpdateWindows::UpdateWindows(const schedules::RankActions& actions) {
  int first = 0;
  for (const schedules::Action& action : actions) {
    if (action.kind != schedules::Kind::Update) continue;
    windows_.emplace_back(first, action.micro_batch);
    first = action.micro_batch + 1;
  }
}

std::vector<double> UpdateWindows::scales(const data::StepBatch& batch) const {
  std::vector<double> scales(batch.micro_batches.size());
  for (const auto& [first, last] : windows_) {
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
  exposed_s_ = 0;
  open();
}

void UpdateWindows::open() {
  synchronizer_->begin_step();
  const auto [first, last] = windows_[current_];
  for (int i = first; i <= last && ran_.contains(i); ++i) {
    synchronizer_->before(ActionKind::Forward, position_of(i));
    synchronizer_->after(ActionKind::Forward, position_of(i));
  }
}

MicroBatchPosition UpdateWindows::position_of(int micro_batch) const {
  const data::MicroBatch& micro = batch_->micro_batches[static_cast<size_t>(micro_batch)];
  return {.index = micro.index, .last = micro_batch == windows_[current_].second, .padding = micro.weight == 0};
}

void UpdateWindows::around(ActionKind kind, int micro_batch, const std::function<void()>& body) {
  const bool announced = micro_batch <= windows_[current_].second;
  if (announced) synchronizer_->before(kind, position_of(micro_batch));
  body();
  if (announced) synchronizer_->after(kind, position_of(micro_batch));
  if (kind == ActionKind::Forward) ran_.insert(micro_batch);
}

void UpdateWindows::update(const std::function<void()>& body) {
  synchronizer_->finish();
  exposed_s_ += synchronizer_->statistics().exposed_s;
  body();
  synchronizer_->after_update();
  if (++current_ < windows_.size()) open();
}

}  // namespace tessera
