#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/operation.h"
#include "tessera/core/attachment.h"

namespace c10d {
class Backend;
}

namespace tessera::comm {

class Engine;

/// What makes a group: said once when it is created, and shown to every decorator of its engine.
struct GroupInfo {
  std::string name{};  ///< what messages and records call it: "world", or mesh axes such as "dp_shard+cp"
  int rank = 0;        ///< of this process in the group
  int size = 1;
  std::vector<int> ranks{};              ///< the members' ranks in the world, in group order; empty means 0 .. size - 1
  std::chrono::milliseconds timeout{0};  ///< of each collective; 0 where nothing can wait

  int world_rank(int member) const { return ranks.empty() ? member : ranks[member]; }
};

/// Who makes collectives on an engine while a backward pass runs. An engine has one sequence of collectives, the same on every rank; two who start theirs as
/// gradients come bring an order that depends on which parameters a rank used.
struct BackwardUsers {
  std::atomic<int> synchronizers{0};   ///< wrappers that start reductions as gradients come
  std::atomic<bool> by_graphs{false};  ///< graphs have recorded collectives whose backward makes others: SyncBatchNorm, differentiable collectives
  std::atomic<int64_t> made{0};        ///< how many have been made where a program's order decided which comes next

  /// Whether a synchronizer may start while backward runs. `ordered`: somebody says when the step of each begins; `same_graph`: all ranks use the same
  /// parameters, so that what graphs make comes at the same place among the gradients.
  bool may_start_early(bool ordered, bool same_graph) const { return (ordered || synchronizers <= 1) && (same_graph || !by_graphs); }
};

/// Ranks that communicate: a small value to copy freely. Collectives are free functions on it (collectives.h).
///
/// A group of one is the identity: it has no engine, and every collective on it is a copy or nothing. All members must call the same collectives
/// in the same order. One thread at a time may use a group; different groups may be used by different threads.
class Group {
 public:
  /// The group of one.
  Group();
  static Group self(std::string name = "self");

  /// Throws InternalError where a group of several has no engine. `explain` is asked, when a collective fails, what the world knows of the cause.
  Group(GroupInfo info, std::shared_ptr<Engine> engine, std::function<std::string()> explain = {});
  /// On a backend of libtorch's, or one that is written for it.
  Group(GroupInfo info, c10::intrusive_ptr<c10d::Backend> backend, std::function<std::string()> explain = {});

  int rank() const;
  int size() const;
  const std::string& name() const;
  /// The member's rank in the world. Throws InternalError where `member` is outside the group.
  int world_rank(int member) const;
  std::chrono::milliseconds timeout() const;
  /// The engine with its decorators; null in a group of one.
  const std::shared_ptr<Engine>& engine() const;
  /// Engine::matches_tags; true in a group of one.
  bool matches_tags() const;
  /// Says what this rank is at from now on, between its collectives: "stage 1, forward of micro-batch 5"; empty: nothing in particular. Flight records and
  /// verdicts show it. Costs some nanoseconds.
  void set_place(std::string_view place) const;
  /// Shared by all copies of this group.
  BackwardUsers& in_backward() const;
  /// Counts a synchronizer in in_backward() until the attachment goes.
  [[nodiscard]] Attachment synchronize_in_backward() const;
  /// What the world knows of a failure, as "; rank 3 failed: ..." or nothing. May ask the store, so only on the way to an error.
  std::string explain() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::comm
