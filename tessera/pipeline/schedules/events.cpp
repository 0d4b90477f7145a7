#include "tessera/pipeline/schedules/events.h"

#include "tessera/core/error.h"

namespace tessera::schedules::detail {

using enum Kind;

Events brings(const Action& action) {
  Events events;
  switch (action.kind) {
    case Backward:
      events.add(BackwardInput, action.stage, action.micro_batch);
      events.add(BackwardWeight, action.stage, action.micro_batch);
      break;
    case Overlap:
      events.add(Forward, action.stage, action.micro_batch);
      events.add(BackwardInput, action.backward_stage, action.backward_micro_batch);
      events.add(BackwardWeight, action.backward_stage, action.backward_micro_batch);
      break;
    default:
      if (action.has_micro_batch() && action.kind != Update) events.add(action.kind, action.stage, action.micro_batch);
  }
  return events;
}

namespace {

void add_input(Events& events, const Schedule& schedule, int stage, int micro_batch, bool through_messages) {
  if (schedule.is_first(stage)) return;
  const bool received = through_messages && !schedule.same_rank(stage, stage - 1);
  received ? events.add(ReceiveForward, stage, micro_batch) : events.add(Forward, stage - 1, micro_batch);
}

void add_backward(Events& events, const Schedule& schedule, int stage, int micro_batch, bool through_messages) {
  events.add(Forward, stage, micro_batch);
  if (schedule.is_last(stage)) return;
  const bool received = through_messages && !schedule.same_rank(stage, stage + 1);
  received ? events.add(ReceiveBackward, stage, micro_batch) : events.add(BackwardInput, stage + 1, micro_batch);
}

}  // namespace

Events needs(const Schedule& schedule, const Action& action, bool through_messages) {
  Events events;
  const int stage = action.stage, micro_batch = action.micro_batch;
  switch (action.kind) {
    case Forward:
      add_input(events, schedule, stage, micro_batch, through_messages);
      break;
    case Backward:
    case BackwardInput:
      add_backward(events, schedule, stage, micro_batch, through_messages);
      break;
    case BackwardWeight:
      events.add(BackwardInput, stage, micro_batch);
      break;
    case Overlap:
      add_input(events, schedule, stage, micro_batch, through_messages);
      add_backward(events, schedule, action.backward_stage, action.backward_micro_batch, through_messages);
      break;
    case SendForward:
      events.add(Forward, stage, micro_batch);
      break;
    case SendBackward:
      events.add(BackwardInput, stage, micro_batch);
      break;
    case ReceiveForward:
      events.add(SendForward, stage - 1, micro_batch);
      break;
    case ReceiveBackward:
      events.add(SendBackward, stage + 1, micro_batch);
      break;
    case Update:
      events.add(BackwardWeight, stage, micro_batch);
      break;
    case Unshard:
    case Reshard:
    case ReduceGrad:
      break;
  }
  return events;
}

int peer(const Schedule& schedule, const Action& message) {
  const bool behind = message.kind == SendForward || message.kind == ReceiveBackward;
  return schedule.rank_of[message.stage + (behind ? 1 : -1)];
}

Action receive_of(const Action& send) {
  invariant(send.sends(), "no send: ", to_string(send));
  const bool forward = send.kind == SendForward;
  return {.kind = forward ? ReceiveForward : ReceiveBackward, .stage = send.stage + (forward ? 1 : -1), .micro_batch = send.micro_batch};
}

}  // namespace tessera::schedules::detail
