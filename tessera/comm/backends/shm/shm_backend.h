#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/backends/shm/core/communicator.h"
#include "tessera/comm/backends/shm/core/mailbox.h"
#include "tessera/comm/backends/work_queue.h"

namespace tessera::comm {

/// The c10d face of a group that shares memory. A call whose caller waits for it (asyncOp = false) runs on the caller's thread where nothing is before it;
/// others run in order on a thread of the group. Sends and receives stand in no order with collectives.
class ShmBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit ShmBackend(std::shared_ptr<shm::Session> session);
  /// Waits for what is pending, then leaves the group.
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { session_->set_timeout(timeout); }
  void abort() override { session_->abort(); }
  void shutdown() override { session_->leave(); }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

  /// Buffers that are reduced in place. Ranks of one process read each other's memory anyway.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return arena_ != nullptr; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

 private:
  template <class Body>
  Work run(bool async, Body body);

  std::shared_ptr<shm::Session> session_;
  std::shared_ptr<shm::Arena> arena_;
  shm::Communicator communicator_;
  shm::Mailbox mailbox_;
  Work done_;        // of every call that was finished when it returned
  WorkQueue queue_;  // last: it ends first
};

}  // namespace tessera::comm
