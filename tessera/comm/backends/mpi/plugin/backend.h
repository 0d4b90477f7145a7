#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/backends/mpi/plugin/work.h"
#include "tessera/comm/group.h"

namespace tessera::comm::mpi {

/// A group on two communicators of its own: one for collectives, one for messages, so that a tag means nothing but itself.
///
/// Every call is non-blocking. Sums of bf16 and fp16 are made in fp32 and rounded once (the bytes of fp32 travel); what is only moved travels as elements of
/// its width, whatever the dtype. MPI counts elements in 31 bits: reductions are split, other calls refuse more. Communicators live as long as MPI, since
/// freeing one needs every member.
class MpiBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// Collective over the members, who must all be on their way: nothing here heeds a timeout.
  MpiBackend(Runtime& runtime, const GroupInfo& group, c10::intrusive_ptr<c10d::Store> store);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { soundness_->break_up(); }
  void shutdown() override {}

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

 private:
  /// Calls a function of MPI that starts one request.
  template <class Function>
  void ask(const char* name, Order& order, const Function& function);
  void ask_to_send(Order& order, const at::Tensor& tensor, int to, int tag, MPI_Comm communicator);
  void ask_to_receive(Order& order, const at::Tensor& tensor, int from, int tag, MPI_Comm communicator);
  template <class Options>
  Work start(Order order, const Options& options);
  Work start(Order order, std::chrono::milliseconds timeout, bool async);

  Runtime& runtime_;
  std::shared_ptr<Soundness> soundness_;
  MPI_Comm collectives_ = MPI_COMM_NULL, messages_ = MPI_COMM_NULL;
  std::chrono::milliseconds timeout_;
};

}  // namespace tessera::comm::mpi
