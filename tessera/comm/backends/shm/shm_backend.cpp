#include "tessera/comm/backends/shm/shm_backend.h"

#include <ATen/ops/from_blob.h>

#include "tessera/comm/backends/shm/core/event.h"
#include "tessera/comm/caller_waits.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"

namespace tessera::comm {
namespace {

using shm::Failure;

/// What is reduced, as the core knows it.
struct Reduced {
  void* data;
  size_t count;
  shm::Type type;
  shm::Reduction reduction;
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

shm::Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return shm::Reduction::Sum;
    case c10d::ReduceOp::PRODUCT:
      return shm::Reduction::Product;
    case c10d::ReduceOp::MIN:
      return shm::Reduction::Min;
    case c10d::ReduceOp::MAX:
      return shm::Reduction::Max;
    default:
      throw Failure("shared memory reduces by sum, product, min and max alone");
  }
}

void check_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) [[likely]]
    return;
  throw Failure(detail::concat("shared memory carries CPU tensors, and this one is on ", tensor.device(), "; set comm.backend = auto or nccl"));
}

Reduced reduced(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_host(tensor);
  const auto type = type_of(tensor.scalar_type());
  if (!type)
    throw Failure(detail::concat("shared memory moves ", c10::toString(tensor.scalar_type()), " but does not reduce it; reduce it as bfloat16 or float32"));
  const auto reduction = reduction_of(op);
  auto count = static_cast<size_t>(tensor.numel());
  if (tensor.is_complex()) {
    if (reduction != shm::Reduction::Sum) throw Failure("shared memory reduces complex numbers by sum alone");
    count *= 2;
  }
  return {tensor.data_ptr(), count, *type, reduction};
}

std::byte* bytes_of(const at::Tensor& tensor) {
  check_host(tensor);
  return static_cast<std::byte*>(tensor.data_ptr());
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

ShmBackend::ShmBackend(std::shared_ptr<shm::Session> session)
    : c10d::Backend(session->rank(), session->size()),
      session_(std::move(session)),
      arena_(make_arena(*session_)),
      communicator_(session_, arena_),
      mailbox_(session_),
      done_(completed_work()),
      queue_(shm::wait_in_background) {}

ShmBackend::~ShmBackend() = default;

template <class Body>
ShmBackend::Work ShmBackend::run(bool async, Body body) {
  if (!async && queue_.idle()) {
    body();
    return done_;
  }
  return queue_.run(std::move(body), true);
}

ShmBackend::Work ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto what = reduced(tensors[0], options.reduceOp);
  return run(options.asyncOp, [this, what, tensor = tensors[0]] { communicator_.all_reduce(what.data, what.count, what.type, what.reduction); });
}

ShmBackend::Work ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto what = reduced(tensors[0], options.reduceOp);
  const auto root = static_cast<int>(options.rootRank);
  return run(options.asyncOp, [this, what, root, tensor = tensors[0]] { communicator_.reduce(what.data, what.count, what.type, what.reduction, root); });
}

ShmBackend::Work ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  return run(options.asyncOp, [this, root, data = bytes_of(tensors[0]), tensor = tensors[0]] { communicator_.broadcast(data, tensor.nbytes(), root); });
}

ShmBackend::Work ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return run(options.asyncOp, [this, to = bytes_of(output), from = bytes_of(input), output, input] { communicator_.all_gather(to, from, input.nbytes()); });
}

ShmBackend::Work ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const auto from = reduced(input, options.reduceOp), to = reduced(output, options.reduceOp);
  return run(options.asyncOp, [this, from, to, output, input] { communicator_.reduce_scatter(to.data, from.data, to.count, to.type, to.reduction); });
}

ShmBackend::Work ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions& options) {
  return run(options.asyncOp, [this, output, input, to = bytes_of(output), from = bytes_of(input), outs = split_bytes(output, output_splits, getSize()),
                               ins = split_bytes(input, input_splits, getSize())] { communicator_.all_to_all(to, from, outs, ins); });
}

ShmBackend::Work ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const auto held = outputs.empty() ? Tensors() : outputs[0];
  std::vector<void*> to;
  for (const auto& output : held) to.push_back(bytes_of(output));
  return run(options.asyncOp,
             [this, root, to = std::move(to), held, from = bytes_of(inputs[0]), input = inputs[0]] { communicator_.gather(to, from, input.nbytes(), root); });
}

ShmBackend::Work ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const auto held = inputs.empty() ? Tensors() : inputs[0];
  std::vector<const void*> from;
  for (const auto& input : held) from.push_back(bytes_of(input));
  return run(options.asyncOp, [this, root, from = std::move(from), held, to = bytes_of(outputs[0]), output = outputs[0]] {
    communicator_.scatter(to, from, output.nbytes(), root);
  });
}

ShmBackend::Work ShmBackend::send(Tensors& tensors, int destination, int tag) {
  auto request = mailbox_.send(bytes_of(tensors[0]), tensors[0].nbytes(), destination, tag, owner_of(tensors[0]));
  if (request->done()) return done_;
  if (!CallerWaits::now()) mailbox_.move_on_alone();
  return c10::make_intrusive<MessageWork>(mailbox_, std::move(request), tensors[0]);
}

ShmBackend::Work ShmBackend::recv(Tensors& tensors, int source, int tag) {
  auto request = mailbox_.receive(bytes_of(tensors[0]), tensors[0].nbytes(), source, tag, owner_of(tensors[0]));
  if (!request->done() && !CallerWaits::now()) mailbox_.move_on_alone();
  return c10::make_intrusive<MessageWork>(mailbox_, std::move(request), tensors[0]);
}

ShmBackend::Work ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(options.asyncOp, [this] { communicator_.barrier(); });
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  invariant(arena_ != nullptr, "this group has no shared buffers");
  const auto bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  auto block = std::make_unique<Block>(arena_, bytes == 0 ? nullptr : arena_->allocate(bytes));
  if (bytes == 0) return at::empty({size}, options);
  auto* const data = block->data;
  try {
    count_memory(block.get(), static_cast<int64_t>(bytes));
  } catch (...) {
    arena_->free(data);
    throw;
  }
  auto* const context = block.release();
  return at::for_blob(data, {size}).context(context, free_block).options(options).make_tensor();
}

}  // namespace tessera::comm
