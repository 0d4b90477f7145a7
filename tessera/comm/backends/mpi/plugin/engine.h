#pragma once

#include "tessera/comm/backends/mpi/plugin/work.h"
#include "tessera/comm/engine.h"

namespace tessera::comm::mpi {

/// A group on two communicators of its own: one for collectives and the messages of which they are made, one for callers' messages, so that a tag means nothing
/// but itself. A caller's tag that MPI does not take is refused (lane.h).
///
/// Every call is non-blocking. Sums of bf16 and fp16 are made in fp32 and rounded once (the bytes of fp32 travel); what is only moved travels as elements of
/// its width, whatever the dtype. MPI counts elements in 31 bits: reductions are split, other calls refuse more. Communicators live as long as MPI, since
/// freeing one needs every member.
class MpiEngine : public Engine {
 public:
  /// Collective over the members, who must all be on their way: nothing here heeds a timeout.
  MpiEngine(Runtime& runtime, const GroupInfo& group, c10::intrusive_ptr<c10d::Store> store);

  std::string name() const override { return "mpi"; }
  Work start(const Call& call) override;
  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { soundness_->break_up(); }

 private:
  /// Calls a function of MPI that starts one request.
  template <class Function>
  void ask(const char* name, Order& order, const Function& function);
  void ask_to_send(Order& order, const at::Tensor& tensor, int to, int tag, MPI_Comm communicator);
  void ask_to_receive(Order& order, const at::Tensor& tensor, int from, int tag, MPI_Comm communicator);
  Order order_of(const Call& call);
  void fill(Order& order, const Call& call);
  void reduce(Order& order, const Call& call);
  void reduce_scatter(Order& order, const at::Tensor& output, const at::Tensor& input, Op op);
  void all_gather(Order& order, const at::Tensor& output, const at::Tensor& input);
  void all_to_all(Order& order, const Call& call);
  void gather(Order& order, const Call& call);
  void scatter(Order& order, const Call& call);
  void pass_on(Order& order, const Call& call);  ///< a message

  Runtime& runtime_;
  std::shared_ptr<Soundness> soundness_;
  MPI_Comm collectives_ = MPI_COMM_NULL, messages_ = MPI_COMM_NULL;
  const std::string group_;
  int rank_, size_;
  std::chrono::milliseconds timeout_;
};

}  // namespace tessera::comm::mpi
