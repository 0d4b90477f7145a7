#include "tessera/nn/decisions.h"

#include <algorithm>
#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::nn {

namespace {
const Ambient<Decisions::Replay*> replayed_decisions;
const Ambient<std::vector<std::weak_ptr<Decisions::Made>>> decision_records;
}  // namespace

at::Tensor Decisions::make(const std::function<at::Tensor()>& decide) {
  Replay* const replay = *replayed_decisions;
  const bool again = replay != nullptr && replay->used_ < replay->made_->size();
  const at::Tensor decision = again ? (*replay->made_)[replay->used_++] : decide();
  std::erase_if(*decision_records, [&](const auto& weak) {
    const auto record = weak.lock();
    if (record) record->push_back(decision);
    return record == nullptr;
  });
  return decision;
}

Decisions::Record::Record() : made_(std::make_shared<Made>()) { decision_records->emplace_back(made_); }

void Decisions::Record::end() {
  std::erase_if(*decision_records, [&](const auto& weak) { return weak.expired() || weak.lock() == made_; });
}

Decisions::Replay::Replay(const Record& record)
    : made_(record.made_), outer_(std::exchange(*replayed_decisions, this)), outer_records_(std::exchange(*decision_records, {})) {}

Decisions::Replay::~Replay() {
  *replayed_decisions = outer_;
  *decision_records = std::move(outer_records_);
}

}  // namespace tessera::nn
