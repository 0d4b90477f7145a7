#pragma once

#include <vector>

#include "tessera/pipeline/schedules/schedule.h"

/// What actions bring about and wait for: the one place that knows the dependences of a pipeline.
namespace tessera::schedules::detail {

/// Something that happens once in a step, told by a kind that cannot be taken apart: a full backward brings BackwardInput and BackwardWeight about.
struct Event {
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = 0;
  bool operator==(const Event&) const = default;
};

/// A few events, without an allocation.
class Events {
 public:
  void add(Kind kind, int stage, int micro_batch) { items_[size_++] = {kind, stage, micro_batch}; }
  const Event* begin() const { return items_; }
  const Event* end() const { return items_ + size_; }

 private:
  Event items_[5];
  int size_ = 0;
};

/// What is there once the action is done. Nothing for those without a micro-batch, and for Update.
Events brings(const Action& action);

/// What has to be there before it begins: what its own rank did, and what came from other stages: on their ranks (`through_messages` false), or received on
/// this one. An update waits for the gradients of its micro-batch.
Events needs(const Schedule& schedule, const Action& action, bool through_messages);

/// Numbers for events, from 0: whatever is known of an event lies in a vector of `size()`.
class EventIndex {
 public:
  explicit EventIndex(const Schedule& schedule) : stages_(schedule.stages()), micro_batches_(schedule.micro_batches) {}
  size_t size() const { return 8 * static_cast<size_t>(stages_) * micro_batches_; }
  size_t operator()(const Event& event) const { return (static_cast<size_t>(event.kind) * stages_ + event.stage) * micro_batches_ + event.micro_batch; }

 private:
  int stages_, micro_batches_;
};

/// The rank at the other end of a send or a receive.
int peer(const Schedule& schedule, const Action& message);
/// The receive that belongs to a send.
Action receive_of(const Action& send);

}  // namespace tessera::schedules::detail
