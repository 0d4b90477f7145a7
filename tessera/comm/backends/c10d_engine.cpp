#include "tessera/comm/backends/c10d_engine.h"

#include <array>

#include <ATen/ops/empty.h>

#include "tessera/comm/backends/carried.h"
#include "tessera/comm/backends/extremum.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::comm {
namespace {

c10d::ReduceOp reduce_op(const Call& call) {
  using enum c10d::ReduceOp::RedOpType;
  return std::array{SUM, PRODUCT, MIN, MAX}[static_cast<size_t>(call.reduction.value())];
}

}  // namespace

Work C10dEngine::start(const Call& call) {
  last_.store(call.op, std::memory_order_relaxed);
  asked_.fetch_add(1, std::memory_order_relaxed);
  Work work = is_extremum(call) ? ask_in_order(call) : ask(runs_on_streams() ? carried_by_nccl(call) : call);
  return work ? work : completed_work();
}

// c10d knows two kinds of call: one whose end the caller waits for, and one that is done, or in order on the caller's stream, when the method returns; of the
// second ProcessGroupNCCL gives no work (torch 2.8 and later). On the caller's stream nothing else of a group could run beside it, and what the stream stood
// still for would be no wait: on streams of its own such a backend is always asked the first way.
Work C10dEngine::ask(const Call& call) {
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  Tensors in = call.inputs, out = call.outputs;  // c10d may change what it is handed
  const int64_t root = call.peer;
  const auto timeout = call.timeout.value_or(c10d::kUnsetTimeout);
  const bool async = call.async || runs_on_streams();
  switch (call.op) {
    case Operation::AllReduce:
      return backend_->allreduce(out, {.reduceOp = reduce_op(call), .timeout = timeout, .asyncOp = async});
    case Operation::Reduce:
      return backend_->reduce(out, {.reduceOp = reduce_op(call), .rootRank = root, .timeout = timeout, .asyncOp = async});
    case Operation::AllGather:
      return backend_->_allgather_base(out[0], in[0], {.timeout = timeout, .asyncOp = async});
    case Operation::ReduceScatter:
      return backend_->_reduce_scatter_base(out[0], in[0], {.reduceOp = reduce_op(call), .timeout = timeout, .asyncOp = async});
    case Operation::AllToAll: {
      auto from = call.out_splits, to = call.in_splits;
      return backend_->alltoall_base(out[0], in[0], from, to, {.timeout = timeout, .asyncOp = async});
    }
    case Operation::Broadcast:
      return backend_->broadcast(out, {.rootRank = root, .timeout = timeout, .asyncOp = async});
    case Operation::Gather: {
      auto lists = out.empty() ? Lists() : Lists{out};
      return backend_->gather(lists, in, {.rootRank = root, .timeout = timeout, .asyncOp = async});
    }
    case Operation::Scatter: {
      auto lists = in.empty() ? Lists() : Lists{in};
      return backend_->scatter(out, lists, {.rootRank = root, .timeout = timeout, .asyncOp = async});
    }
    case Operation::Send:
      return backend_->send(in, call.peer, call.tag);
    case Operation::Recv:
      return backend_->recv(out, call.peer, call.tag);
    case Operation::Barrier:
      return backend_->barrier({.device_ids = {}, .timeout = timeout, .device = {}, .asyncOp = async});
  }
  throw InternalError("internal error: unknown operation");
}

Work C10dEngine::ask_in_order(const Call& call) {
  Call ordered = call;
  ordered.inputs = {to_ordered(call.inputs[0], *call.reduction)};
  const bool in_place = call.op != Operation::ReduceScatter;
  ordered.outputs = {in_place ? ordered.inputs[0] : at::empty(call.outputs[0].sizes(), ordered.inputs[0].options())};
  Work work = ask(ordered);
  const auto store = [from = ordered.outputs[0], to = call.outputs[0]] {
    const MemoryScope scratch(MemoryCategory::Comm);
    from_ordered(from, to);
  };
  return staged_work({{.work = work ? std::move(work) : completed_work(), .after = store}});
}

// A thread of ProcessGroupNCCL's looks after works and communicators, and keeps what it finds.
std::string C10dEngine::failure() {
  if (!runs_on_streams()) return {};
  const c10d::ErrorType error = backend_->getError();
  if (error == c10d::ErrorType::SUCCESS) return {};
  const char* what = error == c10d::ErrorType::TIMEOUT        ? "a call did not end on the device within comm.timeout_s"
                     : error == c10d::ErrorType::REMOTE_ERROR ? "NCCL failed on another rank"
                                                              : "NCCL lost a peer, a link or its device";
  return detail::concat(what, "; of ", asked_.load(std::memory_order_relaxed), " calls that this rank has asked for, the last was ",
                        to_string(last_.load(std::memory_order_relaxed)));
}

at::Tensor C10dEngine::empty(int64_t elements, const at::TensorOptions& options) {
  return backend_->supportsTensorAlloc(0) ? backend_->allocateTensor(elements, options) : at::Tensor();
}

}  // namespace tessera::comm
