#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}

namespace tessera::comm {

/// How the elements of several ranks become one. Averaging is the caller's division: who divides, and by what, is part of a technique.
enum class Op { Sum, Product, Min, Max };

/// What makes a group: said once when it is created, and shown to every decorator of its engine.
struct GroupInfo {
  std::string name{};  ///< what messages and records call it: "world", or mesh axes such as "dp_shard+cp"
  int rank = 0;        ///< of this process in the group
  int size = 1;
  std::vector<int> ranks{};              ///< the members' ranks in the world, in group order; empty means 0 .. size - 1
  std::chrono::milliseconds timeout{0};  ///< of each collective; 0 where nothing can wait
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
  Group(GroupInfo info, c10::intrusive_ptr<c10d::Backend> backend, std::function<std::string()> explain = {});

  int rank() const;
  int size() const;
  const std::string& name() const;
  /// The member's rank in the world. Throws InternalError where `member` is outside the group.
  int world_rank(int member) const;
  std::chrono::milliseconds timeout() const;
  /// The engine with its decorators; null in a group of one.
  c10::intrusive_ptr<c10d::Backend> backend() const;
  /// What the world knows of a failure, as "; rank 3 failed: ..." or nothing. May ask the store, so only on the way to an error.
  std::string explain() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::comm
