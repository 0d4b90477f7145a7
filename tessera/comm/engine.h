#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/call.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

/// A call in flight. Used of it: wait, isCompleted and exception.
using Work = c10::intrusive_ptr<c10d::Work>;

/// What carries out the calls of one group. Decorators are engines around an engine; libtorch's backends, and a user's, are engines by C10dEngine
/// (backends/c10d_engine.h). Calls come from one thread at a time, except that send and recv may come from one thread while another posts its own.
class Engine {
 public:
  virtual ~Engine() = default;

  /// What "auto" took: shm, gloo, two_level, shm+nccl, ...
  virtual std::string name() const = 0;

  /// Starts a call, which is copied where it is needed for longer. Its tensors are contiguous; in_splits and out_splits fit them.
  virtual Work start(const Call& call) = 0;

  /// Whether calls move data: a dry world's engine only tells of them.
  virtual bool moves_data() const { return true; }

  /// Whether messages between two ranks meet by their tags, whatever their order. False: by their order alone, those of both directions together, each once
  /// the one before is done (NCCL): two ranks that both post a receive first wait for each other.
  virtual bool matches_tags() const { return true; }

  /// Of each call from now on.
  virtual void set_timeout(std::chrono::milliseconds) {}
  /// Ends with an error what waits here and at the peers, from any thread.
  virtual void abort() {}
  /// Leaves the group.
  virtual void shutdown() {}
  /// Whether calls may fail with nobody who waits to be told: work of a device, behind which the host goes on. Then failure() has to be asked.
  virtual bool fails_unseen() const { return false; }
  /// What the engine found out by itself of such a failure, after which nothing of this group can be relied on; empty: nothing. Asked several times a second,
  /// from another thread than calls come from; waits for nobody.
  virtual std::string failure() { return {}; }
  /// What this rank is at from now on ("stage 1, forward of micro-batch 5"), for whoever records; empty: nothing in particular. Not copied for longer than the
  /// call.
  virtual void set_place(std::string_view /*place*/) {}

  /// Says that somebody's messages between the ranks ended in their midst: what was sent and not taken is still on its way, and whoever sends the like next
  /// would take it for its own. For good; the first `what` stays.
  void leave_messages(std::string what) {
    if (left_messages_.empty()) left_messages_ = std::move(what);
  }
  const std::string& left_messages() const { return left_messages_; }  ///< empty: nothing is

  /// A tensor of so many elements in memory that the engine sums in place; undefined where it has no such memory.
  virtual at::Tensor empty(int64_t /*elements*/, const at::TensorOptions& /*options*/) { return {}; }

 private:
  std::string left_messages_;
};

/// Work that was done when it was made. Keeps `scratch` alive for as long as its caller keeps it.
Work completed_work(at::Tensor scratch = {});

/// A part of a call: what the engine does, and what follows once it is done.
struct WorkStage {
  Work work;
  std::function<void()> after{};  ///< on the thread that waits; may throw
};

/// Stages as one work: `wait` waits for each in order and does what follows it, once. Done when all of the engine's parts are.
Work staged_work(std::vector<WorkStage> stages);

}  // namespace tessera::comm
