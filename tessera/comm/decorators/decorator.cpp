#include "tessera/comm/decorators/decorator.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

class CompletedWork : public c10d::Work {
 public:
  explicit CompletedWork(at::Tensor scratch) : scratch_(std::move(scratch)) { finish(); }

 private:
  at::Tensor scratch_;
};

class StagedWork : public c10d::Work {
 public:
  explicit StagedWork(std::vector<WorkStage> stages) : stages_(std::move(stages)) {}

  bool isCompleted() override {
    return std::all_of(stages_.begin() + static_cast<std::ptrdiff_t>(done_), stages_.end(), [](const WorkStage& stage) { return stage.work->isCompleted(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    for (; done_ < stages_.size(); ++done_) {
      const auto& stage = stages_[done_];
      if (!stage.work->wait(timeout)) return false;
      if (stage.after) stage.after();
    }
    return true;
  }

 private:
  std::vector<WorkStage> stages_;
  size_t done_ = 0;
};

// Shape of `ranks` parts one below the other.
std::vector<int64_t> stacked(const at::Tensor& part, int ranks) {
  if (part.dim() == 0) return {ranks};
  auto shape = part.sizes().vec();
  shape[0] *= ranks;
  return shape;
}

Op our_op(const c10d::ReduceOp& op) {
  const auto ours = op_of(op);
  invariant(ours.has_value(), "a reduction that Op has no name for");
  return *ours;
}

}  // namespace

std::optional<Op> op_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return Op::Sum;
    case c10d::ReduceOp::PRODUCT:
      return Op::Product;
    case c10d::ReduceOp::MIN:
      return Op::Min;
    case c10d::ReduceOp::MAX:
      return Op::Max;
    default:
      return std::nullopt;
  }
}

c10::ScalarType Call::dtype() const {
  const auto& moved = inputs.empty() ? outputs : inputs;
  return moved.empty() ? c10::ScalarType::Undefined : moved[0].scalar_type();
}

c10::intrusive_ptr<c10d::Work> completed_work(at::Tensor scratch) { return c10::make_intrusive<CompletedWork>(std::move(scratch)); }
c10::intrusive_ptr<c10d::Work> staged_work(std::vector<WorkStage> stages) { return c10::make_intrusive<StagedWork>(std::move(stages)); }

DecoratedBackend::DecoratedBackend(const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> inner)
    : c10d::Backend(group.rank, group.size), group_(group), inner_(std::move(inner)) {}

const std::string DecoratedBackend::getBackendName() const { return inner_ ? inner_->getBackendName() : "record"; }

void DecoratedBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (inner_) inner_->setTimeout(timeout);
}

void DecoratedBackend::abort() {
  if (inner_) inner_->abort();
}

void DecoratedBackend::shutdown() {
  if (inner_) inner_->shutdown();
}

bool DecoratedBackend::supportsTensorAlloc(c10::DeviceIndex device) { return inner_ && inner_->supportsTensorAlloc(device); }

at::Tensor DecoratedBackend::allocateTensor(long size, at::TensorOptions options) { return inner_->allocateTensor(size, std::move(options)); }

DecoratedBackend::Work DecoratedBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return call({.op = "all_reduce",
               .inputs = tensors,
               .outputs = tensors,
               .whole = tensors[0].sizes().vec(),
               .reduction = our_op(options.reduceOp),
               .async = options.asyncOp},
              [&] { return inner_->allreduce(tensors, options); });
}

DecoratedBackend::Work DecoratedBackend::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  return call({.op = "reduce",
               .inputs = tensors,
               .outputs = tensors,
               .whole = tensors[0].sizes().vec(),
               .peer = static_cast<int>(options.rootRank),
               .reduction = our_op(options.reduceOp),
               .async = options.asyncOp},
              [&] { return inner_->reduce(tensors, options); });
}

DecoratedBackend::Work DecoratedBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  return call({.op = "broadcast",
               .inputs = tensors,
               .outputs = tensors,
               .whole = tensors[0].sizes().vec(),
               .peer = static_cast<int>(options.rootRank),
               .async = options.asyncOp},
              [&] { return inner_->broadcast(tensors, options); });
}

DecoratedBackend::Work DecoratedBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return call({.op = "all_gather", .inputs = {input}, .outputs = {output}, .whole = output.sizes().vec(), .async = options.asyncOp},
              [&] { return inner_->_allgather_base(output, input, options); });
}

DecoratedBackend::Work DecoratedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return call({.op = "reduce_scatter",
               .inputs = {input},
               .outputs = {output},
               .whole = input.sizes().vec(),
               .reduction = our_op(options.reduceOp),
               .async = options.asyncOp},
              [&] { return inner_->_reduce_scatter_base(output, input, options); });
}

DecoratedBackend::Work DecoratedBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return call({.op = "all_to_all",
               .inputs = {input},
               .outputs = {output},
               .whole = input.sizes().vec(),
               .in_splits = input_splits,
               .out_splits = output_splits,
               .async = options.asyncOp},
              [&] { return inner_->alltoall_base(output, input, output_splits, input_splits, options); });
}

DecoratedBackend::Work DecoratedBackend::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                                const c10d::GatherOptions& options) {
  return call({.op = "gather",
               .inputs = inputs,
               .outputs = outputs.empty() ? std::vector<at::Tensor>{} : outputs[0],
               .whole = stacked(inputs[0], getSize()),
               .peer = static_cast<int>(options.rootRank),
               .async = options.asyncOp},
              [&] { return inner_->gather(outputs, inputs, options); });
}

DecoratedBackend::Work DecoratedBackend::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                                 const c10d::ScatterOptions& options) {
  return call({.op = "scatter",
               .inputs = inputs.empty() ? std::vector<at::Tensor>{} : inputs[0],
               .outputs = outputs,
               .whole = stacked(outputs[0], getSize()),
               .peer = static_cast<int>(options.rootRank),
               .async = options.asyncOp},
              [&] { return inner_->scatter(outputs, inputs, options); });
}

DecoratedBackend::Work DecoratedBackend::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return call({.op = "send", .inputs = tensors, .whole = tensors[0].sizes().vec(), .peer = destination, .tag = tag},
              [&] { return inner_->send(tensors, destination, tag); });
}

DecoratedBackend::Work DecoratedBackend::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return call({.op = "recv", .outputs = tensors, .whole = tensors[0].sizes().vec(), .peer = source, .tag = tag},
              [&] { return inner_->recv(tensors, source, tag); });
}

DecoratedBackend::Work DecoratedBackend::barrier(const c10d::BarrierOptions& options) {
  return call({.op = "barrier", .whole = {0}, .async = options.asyncOp}, [&] { return inner_->barrier(options); });
}

}  // namespace tessera::comm
