#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// One call of an engine, in our words.
struct Call {
  std::string_view op;                ///< all_reduce, reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, scatter, send, recv, barrier
  std::vector<at::Tensor> inputs{};   ///< what this rank gives
  std::vector<at::Tensor> outputs{};  ///< what this rank gets; the same tensor where the op works in place
  std::vector<int64_t> whole{};       ///< shape of the whole: the reduced tensor, the gathered result, what is scattered or dealt; {0} for barrier
  int peer = -1;                      ///< root, destination or source, in the group; -1 where there is none
  int tag = 0;
  std::vector<int64_t> in_splits{};   ///< rows to each rank (all_to_all); empty means equal parts
  std::vector<int64_t> out_splits{};  ///< rows from each rank (all_to_all); empty means equal parts
  std::optional<Op> reduction{};      ///< of the ops that reduce
  bool async = true;                  ///< false: the caller waits at once (c10d's asyncOp)

  /// Of what moves; Undefined for barrier.
  c10::ScalarType dtype() const;
};

/// A c10d backend around another one: every collective becomes one virtual call, which sees what is asked and decides whether, when and how often
/// the inner engine does it. Tracing, checking, fault injection and recording are subclasses of a few lines.
class DecoratedBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Forward = std::function<Work()>;

  /// `inner` may be null for a decorator that never forwards.
  DecoratedBackend(const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> inner);

  const std::string getBackendName() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options = {}) override;
  Work reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options = {}) override;
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options = {}) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = {}) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options = {}) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options = {}) override;
  Work gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options = {}) override;
  Work scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ScatterOptions& options = {}) override;
  Work send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  Work recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  Work barrier(const c10d::BarrierOptions& options = {}) override;

 protected:
  /// Does the call, or not: `forward` hands it to the inner engine.
  virtual Work call(const Call& call, const Forward& forward) = 0;

  const GroupInfo& group() const { return group_; }
  const c10::intrusive_ptr<c10d::Backend>& inner() const { return inner_; }

 private:
  GroupInfo group_;
  c10::intrusive_ptr<c10d::Backend> inner_;
};

/// The engine's reduction in our words; nothing for one that Op has no name for.
std::optional<Op> op_of(const c10d::ReduceOp& op);

/// Work that was done when it was made. Keeps `scratch` alive for as long as its caller keeps it.
c10::intrusive_ptr<c10d::Work> completed_work(at::Tensor scratch = {});

/// A part of a call: what the engine does, and what follows once it is done.
struct WorkStage {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> after{};  ///< on the thread that waits; may throw
};

/// Stages as one work: `wait` waits for each in order and does what follows it, once. Done when all of the engine's parts are.
c10::intrusive_ptr<c10d::Work> staged_work(std::vector<WorkStage> stages);

}  // namespace tessera::comm
