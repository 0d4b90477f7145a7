#include "tessera/train/schedule.h"

#include <algorithm>
#include <array>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using enum ActionKind;

Schedule running_ahead(size_t micro_batches, size_t ahead, WeightGradientTime weights) {
  Schedule schedule;
  size_t forwards = 0;
  const auto forward = [&] {
    if (forwards < micro_batches) schedule.push_back({Forward, forwards++});
  };
  while (forwards < std::min(ahead, micro_batches)) forward();
  for (size_t i = 0; i < micro_batches; ++i) {
    forward();
    schedule.push_back({Backward, i});
    if (weights == WeightGradientTime::BehindBackward) schedule.push_back({Weights, i});
  }
  for (size_t i = 0; weights == WeightGradientTime::AtTheEnd && i < micro_batches; ++i) schedule.push_back({Weights, i});
  return schedule;
}

}  // namespace

Schedule one_after_the_other(size_t micro_batches) { return running_ahead(micro_batches, 0, WeightGradientTime::InBackward); }

Schedule one_f_one_b(size_t micro_batches, int stage, int stages, WeightGradientTime weights) {
  invariant(stage >= 0 && stage < stages, "1F1B has no stage ", stage, " of ", stages);
  return running_ahead(micro_batches, static_cast<size_t>(stages - 1 - stage), weights);
}

Schedule all_forward_all_backward(size_t micro_batches) { return running_ahead(micro_batches, micro_batches, WeightGradientTime::InBackward); }

size_t most_alive(const Schedule& schedule) {
  size_t alive = 0, most = 0;
  for (const Action& action : schedule) {
    if (action.kind == Forward) most = std::max(most, ++alive);
    if (action.kind == Backward) --alive;
  }
  return most;
}

void check_schedule(const Schedule& schedule, size_t micro_batches) {
  std::array<size_t, 3> done{};  // of each kind
  const auto count = [&](ActionKind kind) -> size_t& { return done[static_cast<size_t>(kind)]; };
  for (const Action& action : schedule) {
    invariant(action.micro_batch == count(action.kind)++, "a schedule takes micro-batches in their order: ", to_string(schedule));
    invariant(count(Backward) <= count(Forward) && count(Weights) <= count(Backward), "a schedule has an action before what it needs: ", to_string(schedule));
  }
  invariant(count(Forward) == micro_batches && count(Backward) == micro_batches && (count(Weights) == 0 || count(Weights) == micro_batches), "a schedule of ",
            micro_batches, " micro-batches leaves some of them out: ", to_string(schedule));
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (const Action& action : schedule)
    text += (text.empty() ? "" : " ") + std::string(1, "FBW"[static_cast<size_t>(action.kind)]) + std::to_string(action.micro_batch);
  return text;
}

}  // namespace tessera
