#include "tessera/comm/backends/mpi/plugin/backend.h"

#include <limits>

#include <ATen/ops/empty.h>

#include "tessera/comm/backends/mpi/plugin/datatype.h"
#include "tessera/core/error.h"

namespace tessera::comm::mpi {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kMostAtOnce = int64_t{1} << 30;  ///< elements of one reduction
constexpr int kTag = 0;                            ///< of the messages that make up gather and scatter; MPI keeps those of one sender in order

int count_of(int64_t elements) {
  if (elements > std::numeric_limits<int>::max()) {
    throw std::runtime_error(detail::concat("MPI moves at most 2147483647 elements between two ranks, not ", elements, "; use another comm.backend"));
  }
  return static_cast<int>(elements);
}

// Sixteen bits are summed in thirty-two: the copy that MPI works on, or the tensor itself.
at::Tensor summed(const at::Tensor& tensor) { return tensor.is_floating_point() && tensor.element_size() == 2 ? tensor.to(at::kFloat) : tensor; }

std::function<void()> copy_back(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_same(from)) return {};
  return [to, from] { to.copy_(from); };
}

// A tensor in parts that MPI can count; one, of nothing, where it is empty.
template <class Visit>
void for_each_part(const at::Tensor& tensor, const Visit& visit) {
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  for (int64_t begin = 0; begin < std::max<int64_t>(tensor.numel(), 1); begin += kMostAtOnce) {
    visit(data + begin * tensor.element_size(), static_cast<int>(std::min(kMostAtOnce, tensor.numel() - begin)));
  }
}

// Counts and displacements of all_to_all, in elements.
struct Deal {
  std::vector<int> counts, offsets;

  Deal(const at::Tensor& tensor, const std::vector<int64_t>& rows, int ranks) {
    const int64_t all_rows = tensor.dim() == 0 ? 1 : tensor.size(0), row = all_rows == 0 ? 0 : tensor.numel() / all_rows;
    count_of(tensor.numel());
    for (int rank = 0, offset = 0; rank < ranks; ++rank) {
      counts.push_back(static_cast<int>(rows.empty() ? tensor.numel() / ranks : rows[rank] * row));
      offsets.push_back(offset);
      offset += counts.back();
    }
  }
};

MPI_Comm communicator_of(MPI_Group members, int tag) {
  MPI_Comm communicator = MPI_COMM_NULL;
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &communicator), "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return communicator;
}

}  // namespace

MpiBackend::MpiBackend(Runtime& runtime, const GroupInfo& group, c10::intrusive_ptr<c10d::Store> store)
    : Backend(group.rank, group.size),
      runtime_(runtime),
      soundness_(std::make_shared<Soundness>(runtime, std::move(store), group.rank)),
      timeout_(group.timeout) {
  std::vector<int> ranks = group.ranks;
  for (int rank = 0; group.ranks.empty() && rank < group.size; ++rank) ranks.push_back(rank);
  const auto lock = runtime_.lock();
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, group.size, ranks.data(), &members), "MPI_Group_incl");
  collectives_ = communicator_of(members, 1);
  messages_ = communicator_of(members, 2);
  MPI_Group_free(&members);
  MPI_Group_free(&world);
}

template <class Function>
void MpiBackend::ask(const char* name, Order& order, const Function& function) {
  const auto lock = runtime_.lock();
  check(function(&order.requests.emplace_back(MPI_REQUEST_NULL)), name);
}

void MpiBackend::ask_to_send(Order& order, const at::Tensor& tensor, int to, int tag, MPI_Comm communicator) {
  const int count = count_of(tensor.numel());
  const auto type = moved_type(tensor.element_size());
  order.tensors.push_back(tensor);
  ask("MPI_Isend", order, [&](MPI_Request* request) { return MPI_Isend(tensor.data_ptr(), count, type, to, tag, communicator, request); });
}

void MpiBackend::ask_to_receive(Order& order, const at::Tensor& tensor, int from, int tag, MPI_Comm communicator) {
  const int count = count_of(tensor.numel());
  const auto type = moved_type(tensor.element_size());
  order.tensors.push_back(tensor);
  ask("MPI_Irecv", order, [&](MPI_Request* request) { return MPI_Irecv(tensor.data_ptr(), count, type, from, tag, communicator, request); });
}

template <class Options>
MpiBackend::Work MpiBackend::start(Order order, const Options& options) {
  return start(std::move(order), options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout, options.asyncOp);
}

MpiBackend::Work MpiBackend::start(Order order, std::chrono::milliseconds timeout, bool async) {
  auto work = c10::make_intrusive<MpiWork>(soundness_, std::move(order), timeout);
  if (async && !work->isCompleted()) Progress::shared().add(work);
  return work;
}

MpiBackend::Work MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto whole = summed(tensors[0]);
  const auto type = reduced_type(whole.scalar_type());
  const auto op = op_of(options.reduceOp);
  Order order{.tensors = {tensors[0], whole}, .unpack = copy_back(tensors[0], whole)};
  for_each_part(whole, [&](void* data, int count) {
    ask("MPI_Iallreduce", order, [&](MPI_Request* request) { return MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op, collectives_, request); });
  });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto whole = summed(tensors[0]);
  const auto type = reduced_type(whole.scalar_type());
  const auto op = op_of(options.reduceOp);
  const int root = static_cast<int>(options.rootRank);
  const bool receives = getRank() == root;
  Order order{.tensors = {tensors[0], whole}};
  if (receives) order.unpack = copy_back(tensors[0], whole);
  for_each_part(whole, [&](void* data, int count) {
    const void* from = receives ? MPI_IN_PLACE : data;
    ask("MPI_Ireduce", order, [&](MPI_Request* request) { return MPI_Ireduce(from, data, count, type, op, root, collectives_, request); });
  });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = tensors[0];
  const auto type = moved_type(tensor.element_size());
  const int root = static_cast<int>(options.rootRank);
  Order order{.tensors = {tensor}};
  for_each_part(tensor, [&](void* data, int count) {
    ask("MPI_Ibcast", order, [&](MPI_Request* request) { return MPI_Ibcast(data, count, type, root, collectives_, request); });
  });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  const int count = count_of(input.numel());
  const auto type = moved_type(input.element_size());
  Order order{.tensors = {output, input}};
  const auto* const own = static_cast<std::byte*>(output.data_ptr()) + static_cast<size_t>(getRank()) * input.nbytes();
  const void* const from = input.data_ptr() == own ? MPI_IN_PLACE : input.data_ptr();
  ask("MPI_Iallgather", order, [&](MPI_Request* request) { return MPI_Iallgather(from, count, type, output.data_ptr(), count, type, collectives_, request); });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const auto from = summed(input);
  const bool direct = from.is_same(input) && !output.is_alias_of(input);  // MPI's buffers may not overlap
  const auto to = direct ? output : at::empty(output.sizes(), from.options());
  const auto type = reduced_type(from.scalar_type());
  const auto op = op_of(options.reduceOp);
  Order order{.tensors = {output, to, input, from}, .unpack = copy_back(output, to)};
  const int count = count_of(to.numel());
  ask("MPI_Ireduce_scatter_block", order,
      [&](MPI_Request* request) { return MPI_Ireduce_scatter_block(from.data_ptr(), to.data_ptr(), count, type, op, collectives_, request); });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions& options) {
  const auto deals = std::make_shared<std::pair<Deal, Deal>>(Deal(input, input_splits, getSize()), Deal(output, output_splits, getSize()));
  const auto& [in, out] = *deals;
  const auto type = moved_type(input.element_size());
  Order order{.tensors = {output, input}, .arguments = deals};
  ask("MPI_Ialltoallv", order, [&, &in = in, &out = out](MPI_Request* request) {
    return MPI_Ialltoallv(input.data_ptr(), in.counts.data(), in.offsets.data(), type, output.data_ptr(), out.counts.data(), out.offsets.data(), type,
                          collectives_, request);
  });
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Order order;
  if (getRank() != root) {
    ask_to_send(order, inputs[0], root, kTag, collectives_);
    return start(std::move(order), options);
  }
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto& output = outputs[0][rank];
    if (rank == root) {
      output.copy_(inputs[0]);
    } else {
      ask_to_receive(order, output, rank, kTag, collectives_);
    }
  }
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Order order;
  if (getRank() != root) {
    ask_to_receive(order, outputs[0], root, kTag, collectives_);
    return start(std::move(order), options);
  }
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto& input = inputs[0][rank];
    if (rank == root) {
      outputs[0].copy_(input);
    } else {
      ask_to_send(order, input, rank, kTag, collectives_);
    }
  }
  return start(std::move(order), options);
}

MpiBackend::Work MpiBackend::send(Tensors& tensors, int destination, int tag) {
  Order order;
  ask_to_send(order, tensors[0], destination, tag, messages_);
  return start(std::move(order), timeout_, /*async=*/true);
}

MpiBackend::Work MpiBackend::recv(Tensors& tensors, int source, int tag) {
  Order order;
  ask_to_receive(order, tensors[0], source, tag, messages_);
  return start(std::move(order), timeout_, /*async=*/true);
}

MpiBackend::Work MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Order order;
  ask("MPI_Ibarrier", order, [&](MPI_Request* request) { return MPI_Ibarrier(collectives_, request); });
  return start(std::move(order), options);
}

}  // namespace tessera::comm::mpi
