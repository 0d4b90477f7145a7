#include "tessera/comm/backends/shm/engine.h"

#include <ATen/ops/from_blob.h>

#include "tessera/comm/backends/shm/core/event.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

// Handing a call to another thread and waking up again takes longer than a small collective. So a call whose caller waits runs on the caller's thread, but only
// where nothing is queued: the ranks' calls meet by their order. Everything else runs in order on the group's thread. Messages pass both by: they are matched
// by peer and tag, and moved by whoever waits (mailbox.h). Complex numbers are summed as twice as many real ones.

namespace tessera::comm {
namespace {

using shm::Failure;

/// What is reduced, as the core knows it.
struct Reduced {
  void* data;
  size_t count;
  shm::Type type;
  Op reduction;
};

std::optional<shm::Type> type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return shm::Type::Float;
    case at::kDouble:
    case at::kComplexDouble:
      return shm::Type::Double;
    case at::kHalf:
    case at::kComplexHalf:
      return shm::Type::Half;
    case at::kBFloat16:
      return shm::Type::BFloat16;
    case at::kChar:
      return shm::Type::Int8;
    case at::kShort:
      return shm::Type::Int16;
    case at::kInt:
      return shm::Type::Int32;
    case at::kLong:
      return shm::Type::Int64;
    case at::kByte:
      return shm::Type::UInt8;
    case at::kBool:
      return shm::Type::Bool;
    default:
      return std::nullopt;
  }
}

void check_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) [[likely]]
    return;
  throw Failure(detail::concat("shared memory carries CPU tensors, and this one is on ", tensor.device(), "; set comm.backend = auto or nccl"));
}

Reduced reduced(const at::Tensor& tensor, Op op) {
  check_host(tensor);
  const auto type = type_of(tensor.scalar_type());
  if (!type)
    throw Failure(detail::concat("shared memory moves ", c10::toString(tensor.scalar_type()), " but does not reduce it; reduce it as bfloat16 or float32"));
  auto count = static_cast<size_t>(tensor.numel());
  if (tensor.is_complex()) {
    if (op != Op::Sum) throw Failure("shared memory reduces complex numbers by sum alone");
    count *= 2;
  }
  return {tensor.data_ptr(), count, *type, op};
}

std::byte* bytes_of(const at::Tensor& tensor) {
  check_host(tensor);
  return static_cast<std::byte*>(tensor.data_ptr());
}

template <class Pointer>
std::vector<Pointer> pointers(const std::vector<at::Tensor>& tensors) {
  std::vector<Pointer> data;
  for (const auto& tensor : tensors) data.push_back(bytes_of(tensor));
  return data;
}

// Bytes to or from each rank: equal rows where there are no splits.
std::vector<size_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks) {
  if (splits.empty()) return std::vector<size_t>(static_cast<size_t>(ranks), tensor.nbytes() / static_cast<size_t>(ranks));
  const auto row = tensor.size(0) == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(tensor.size(0));
  std::vector<size_t> bytes;
  for (const auto rows : splits) bytes.push_back(static_cast<size_t>(rows) * row);
  return bytes;
}

/// Keeps the tensor whether or not anybody still waits: a receive that was dropped is written all the same.
std::shared_ptr<const void> owner_of(const at::Tensor& tensor) { return std::make_shared<const at::Tensor>(tensor); }

/// A send or receive under way.
class MessageWork : public c10d::Work {
 public:
  MessageWork(shm::Mailbox& mailbox, shm::Mailbox::Pointer request, at::Tensor tensor)
      : mailbox_(mailbox), request_(std::move(request)), tensor_(std::move(tensor)) {}

  bool isCompleted() override { return request_->done(); }
  bool isSuccess() const override { return request_->done() && !request_->error(); }
  std::exception_ptr exception() const override { return request_->done() ? request_->error() : nullptr; }
  bool wait(std::chrono::milliseconds) override {
    mailbox_.wait(request_);
    return true;
  }

 private:
  shm::Mailbox& mailbox_;
  shm::Mailbox::Pointer request_;
  at::Tensor tensor_;
};

std::shared_ptr<shm::Arena> make_arena(const shm::Session& session) {
  if (session.one_process() || !session.peers_read_files()) return nullptr;
  try {
    return std::make_shared<shm::Arena>(session);
  } catch (const Failure&) {  // a limit on address space, say: buffers are plain memory then, and staged
    return nullptr;
  }
}

/// A tensor's hold on its part of the arena.
struct Block {
  std::shared_ptr<shm::Arena> arena;
  std::byte* data;
};

void free_block(void* context) {
  uncount_memory(context);
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->arena->free(block->data);
}

}  // namespace

ShmEngine::ShmEngine(std::shared_ptr<shm::Session> session)
    : session_(std::move(session)),
      arena_(make_arena(*session_)),
      communicator_(session_, arena_),
      mailbox_(session_),
      done_(completed_work()),
      queue_(shm::wait_in_background) {}

template <class Body>
Work ShmEngine::run(const Call& call, Body body) {
  if (!call.async && queue_.idle()) {
    body();
    return done_;
  }
  return queue_.run([body = std::move(body), tensors = std::pair(call.inputs, call.outputs)] { body(); }, true);
}

Work ShmEngine::start(const Call& call) {
  const int root = call.peer;
  switch (call.op) {
    case Operation::AllReduce: {
      const auto what = reduced(call.outputs[0], *call.reduction);
      return run(call, [this, what] { communicator_.all_reduce(what.data, what.count, what.type, what.reduction); });
    }
    case Operation::Reduce: {
      const auto what = reduced(call.outputs[0], *call.reduction);
      return run(call, [this, what, root] { communicator_.reduce(what.data, what.count, what.type, what.reduction, root); });
    }
    case Operation::ReduceScatter: {
      const auto from = reduced(call.inputs[0], *call.reduction), to = reduced(call.outputs[0], *call.reduction);
      return run(call, [this, from, to] { communicator_.reduce_scatter(to.data, from.data, to.count, to.type, to.reduction); });
    }
    case Operation::Broadcast:
      return run(call, [this, root, data = bytes_of(call.outputs[0]), bytes = call.outputs[0].nbytes()] { communicator_.broadcast(data, bytes, root); });
    case Operation::AllGather:
      return run(call, [this, to = bytes_of(call.outputs[0]), from = bytes_of(call.inputs[0]), bytes = call.inputs[0].nbytes()] {
        communicator_.all_gather(to, from, bytes);
      });
    case Operation::AllToAll:
      return run(call,
                 [this, to = bytes_of(call.outputs[0]), from = bytes_of(call.inputs[0]), outs = split_bytes(call.outputs[0], call.out_splits, session_->size()),
                  ins = split_bytes(call.inputs[0], call.in_splits, session_->size())] { communicator_.all_to_all(to, from, outs, ins); });
    case Operation::Gather:
      return run(call, [this, root, to = pointers<void*>(call.outputs), from = bytes_of(call.inputs[0]), bytes = call.inputs[0].nbytes()] {
        communicator_.gather(to, from, bytes, root);
      });
    case Operation::Scatter:
      return run(call, [this, root, from = pointers<const void*>(call.inputs), to = bytes_of(call.outputs[0]), bytes = call.outputs[0].nbytes()] {
        communicator_.scatter(to, from, bytes, root);
      });
    case Operation::Send:
    case Operation::Recv:
      return pass_on(call);
    case Operation::Barrier:
      return run(call, [this] { communicator_.barrier(); });
  }
  throw InternalError("internal error: unknown operation");
}

Work ShmEngine::pass_on(const Call& call) {
  const auto& tensor = call.tensor();
  auto* const data = bytes_of(tensor);
  auto request = call.op == Operation::Send ? mailbox_.send(data, tensor.nbytes(), call.peer, call.tag, owner_of(tensor))
                                            : mailbox_.receive(data, tensor.nbytes(), call.peer, call.tag, owner_of(tensor));
  if (request->done() && call.op == Operation::Send) return done_;
  if (!request->done() && call.async) mailbox_.move_on_alone();
  return c10::make_intrusive<MessageWork>(mailbox_, std::move(request), tensor);
}

at::Tensor ShmEngine::empty(int64_t elements, const at::TensorOptions& options) {
  const auto bytes = static_cast<size_t>(elements) * options.dtype().itemsize();
  if (!arena_ || bytes == 0) return {};
  auto* const data = arena_->allocate(bytes);
  if (data == nullptr) return {};  // plain memory, then, which is staged
  auto block = std::make_unique<Block>(arena_, data);
  try {
    count_memory(block.get(), static_cast<int64_t>(bytes));
  } catch (...) {
    arena_->free(data);
    throw;
  }
  auto* const context = block.release();
  return at::for_blob(data, {elements}).context(context, free_block).options(options).make_tensor();
}

}  // namespace tessera::comm
