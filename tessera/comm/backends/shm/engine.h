#pragma once

#include "tessera/comm/backends/shm/core/communicator.h"
#include "tessera/comm/backends/shm/core/mailbox.h"
#include "tessera/comm/backends/work_queue.h"
#include "tessera/comm/engine.h"

namespace tessera::comm {

/// The engine of a group that shares memory. A call whose caller waits for it runs on the caller's thread where nothing is before it; others run in order on a
/// thread of the group. Sends and receives stand in no order with collectives.
class ShmEngine : public Engine {
 public:
  /// Its end waits for what is pending, then leaves the group.
  explicit ShmEngine(std::shared_ptr<shm::Session> session);

  std::string name() const override { return "shm"; }
  Work start(const Call& call) override;
  void set_timeout(std::chrono::milliseconds timeout) override { session_->set_timeout(timeout); }
  void abort() override { session_->abort(); }
  void shutdown() override { session_->leave(); }
  /// Buffers that are reduced in place. Ranks of one process read each other's memory anyway, and have none.
  at::Tensor empty(int64_t elements, const at::TensorOptions& options) override;

 private:
  template <class Body>
  Work run(const Call& call, Body body);
  Work pass_on(const Call& call);

  std::shared_ptr<shm::Session> session_;
  std::shared_ptr<shm::Arena> arena_;
  shm::Communicator communicator_;
  shm::Mailbox mailbox_;
  Work done_;        // of every call that was finished when it returned
  WorkQueue queue_;  // last: it ends first
};

}  // namespace tessera::comm
