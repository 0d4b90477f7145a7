#include "tessera/comm/backends/mpi/plugin/engine.h"

#include <algorithm>
#include <limits>

#include <ATen/ops/empty.h>

#include "tessera/comm/backends/extremum.h"
#include "tessera/comm/backends/mpi/plugin/datatype.h"
#include "tessera/comm/backends/mpi/plugin/lane.h"
#include "tessera/core/error.h"

// A rank that blocks inside MPI heeds no timeout and hears of no failure: every call starts a request and returns. gather and scatter are messages, for the
// root's tensors lie anywhere and MPI's own want one buffer.

namespace tessera::comm::mpi {
namespace {

constexpr int64_t kMostAtOnce = int64_t{1} << 30;  ///< elements of one reduction

int count_of(int64_t elements) {
  if (elements > std::numeric_limits<int>::max()) {
    throw std::runtime_error(detail::concat("MPI moves at most 2147483647 elements between two ranks, not ", elements, "; use another comm.backend"));
  }
  return static_cast<int>(elements);
}

// What MPI works on: integers for minima and maxima of numbers; sixteen bits in thirty-two; or the tensor itself.
at::Tensor reducible(const at::Tensor& tensor, Op op) {
  if (is_extremum(tensor.scalar_type(), op)) return to_ordered(tensor, op);
  return tensor.is_floating_point() && tensor.element_size() == 2 ? tensor.to(at::kFloat) : tensor;
}

std::function<void()> copy_back(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_same(from)) return {};
  if (to.is_floating_point() && !from.is_floating_point()) return [to, from] { from_ordered(from, to); };
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

MpiEngine::MpiEngine(Runtime& runtime, const GroupInfo& group, c10::intrusive_ptr<c10d::Store> store)
    : runtime_(runtime),
      soundness_(std::make_shared<Soundness>(runtime, std::move(store), group.rank)),
      group_(group.name),
      rank_(group.rank),
      size_(group.size),
      timeout_(group.timeout) {
  std::vector<int> ranks;
  for (int member = 0; member < group.size; ++member) ranks.push_back(group.world_rank(member));
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
void MpiEngine::ask(const char* name, Order& order, const Function& function) {
  const auto lock = runtime_.lock();
  check(function(&order.requests.emplace_back(MPI_REQUEST_NULL)), name);
}

void MpiEngine::ask_to_send(Order& order, const at::Tensor& tensor, int to, int tag, MPI_Comm communicator) {
  const int count = count_of(tensor.numel());
  const auto type = moved_type(tensor.element_size());
  order.tensors.push_back(tensor);
  ask("MPI_Isend", order, [&](MPI_Request* request) { return MPI_Isend(tensor.data_ptr(), count, type, to, tag, communicator, request); });
}

void MpiEngine::ask_to_receive(Order& order, const at::Tensor& tensor, int from, int tag, MPI_Comm communicator) {
  const int count = count_of(tensor.numel());
  const auto type = moved_type(tensor.element_size());
  order.tensors.push_back(tensor);
  ask("MPI_Irecv", order, [&](MPI_Request* request) { return MPI_Irecv(tensor.data_ptr(), count, type, from, tag, communicator, request); });
}

Work MpiEngine::start(const Call& call) {
  auto work = c10::make_intrusive<MpiWork>(soundness_, order_of(call), call.timeout.value_or(timeout_));
  if ((call.async || call.is_message()) && !work->isCompleted()) Progress::shared().add(work);
  return work;
}

Order MpiEngine::order_of(const Call& call) {
  Order order;
  try {
    fill(order, call);
  } catch (...) {
    const bool begun = std::ranges::any_of(order.requests, [](MPI_Request request) { return request != MPI_REQUEST_NULL; });
    if (begun) {  // of what goes on, MPI owns the tensors
      runtime_.give_up();
      Progress::shared().keep(std::move(order));
    }
    throw;
  }
  return order;
}

void MpiEngine::fill(Order& order, const Call& call) {
  switch (call.op) {
    case Operation::AllReduce:
    case Operation::Reduce:
      reduce(order, call);
      break;
    case Operation::Broadcast: {
      const auto& tensor = call.outputs[0];
      const auto type = moved_type(tensor.element_size());
      order.tensors = {tensor};
      for_each_part(tensor, [&](void* data, int count) {
        ask("MPI_Ibcast", order, [&](MPI_Request* request) { return MPI_Ibcast(data, count, type, call.peer, collectives_, request); });
      });
      break;
    }
    case Operation::AllGather:
      all_gather(order, call.outputs[0], call.inputs[0]);
      break;
    case Operation::ReduceScatter:
      reduce_scatter(order, call.outputs[0], call.inputs[0], *call.reduction);
      break;
    case Operation::AllToAll:
      all_to_all(order, call);
      break;
    case Operation::Gather:
      gather(order, call);
      break;
    case Operation::Scatter:
      scatter(order, call);
      break;
    case Operation::Send:
    case Operation::Recv:
      pass_on(order, call);
      break;
    case Operation::Barrier:
      ask("MPI_Ibarrier", order, [&](MPI_Request* request) { return MPI_Ibarrier(collectives_, request); });
      break;
  }
}

void MpiEngine::reduce(Order& order, const Call& call) {
  const auto& tensor = call.outputs[0];
  const auto whole = reducible(tensor, *call.reduction);
  const auto type = reduced_type(whole.scalar_type());
  const auto op = op_of(*call.reduction);
  const bool all = call.op == Operation::AllReduce, receives = all || rank_ == call.peer;
  order.tensors = {tensor, whole};
  if (receives) order.unpack = copy_back(tensor, whole);
  for_each_part(whole, [&](void* data, int count) {
    const void* from = receives ? MPI_IN_PLACE : data;
    ask(all ? "MPI_Iallreduce" : "MPI_Ireduce", order, [&](MPI_Request* request) {
      return all ? MPI_Iallreduce(from, data, count, type, op, collectives_, request)
                 : MPI_Ireduce(from, data, count, type, op, call.peer, collectives_, request);
    });
  });
}

void MpiEngine::all_gather(Order& order, const at::Tensor& output, const at::Tensor& input) {
  const int count = count_of(input.numel());
  const auto type = moved_type(input.element_size());
  order.tensors = {output, input};
  const auto* const own = static_cast<std::byte*>(output.data_ptr()) + static_cast<size_t>(rank_) * input.nbytes();
  const void* const from = input.data_ptr() == own ? MPI_IN_PLACE : input.data_ptr();
  ask("MPI_Iallgather", order, [&](MPI_Request* request) { return MPI_Iallgather(from, count, type, output.data_ptr(), count, type, collectives_, request); });
}

void MpiEngine::reduce_scatter(Order& order, const at::Tensor& output, const at::Tensor& input, Op op) {
  const auto from = reducible(input, op);
  const bool direct = from.is_same(input) && !output.is_alias_of(input);  // MPI's buffers may not overlap
  const auto to = direct ? output : at::empty(output.sizes(), from.options());
  const auto type = reduced_type(from.scalar_type());
  order.tensors = {output, to, input, from};
  order.unpack = copy_back(output, to);
  const int count = count_of(to.numel());
  ask("MPI_Ireduce_scatter_block", order,
      [&](MPI_Request* request) { return MPI_Ireduce_scatter_block(from.data_ptr(), to.data_ptr(), count, type, op_of(op), collectives_, request); });
}

void MpiEngine::all_to_all(Order& order, const Call& call) {
  const auto &input = call.inputs[0], &output = call.outputs[0];
  const auto deals = std::make_shared<std::pair<Deal, Deal>>(Deal(input, call.in_splits, size_), Deal(output, call.out_splits, size_));
  const auto& [in, out] = *deals;
  const auto type = moved_type(input.element_size());
  order.tensors = {output, input};
  order.arguments = deals;
  ask("MPI_Ialltoallv", order, [&, &in = in, &out = out](MPI_Request* request) {
    return MPI_Ialltoallv(input.data_ptr(), in.counts.data(), in.offsets.data(), type, output.data_ptr(), out.counts.data(), out.offsets.data(), type,
                          collectives_, request);
  });
}

void MpiEngine::pass_on(Order& order, const Call& call) {
  const auto lane = lane_of(call, group_, runtime_.most_tag());
  const auto communicator = lane.of_collectives ? collectives_ : messages_;
  if (call.op == Operation::Send) return ask_to_send(order, call.inputs[0], call.peer, lane.tag, communicator);
  ask_to_receive(order, call.outputs[0], call.peer, lane.tag, communicator);
}

void MpiEngine::gather(Order& order, const Call& call) {
  const auto& input = call.inputs[0];
  if (rank_ != call.peer) return ask_to_send(order, input, call.peer, kRootedTag, collectives_);
  for (int rank = 0; rank < size_; ++rank) {
    auto output = call.outputs[rank];
    if (rank == rank_) {
      output.copy_(input);
    } else {
      ask_to_receive(order, output, rank, kRootedTag, collectives_);
    }
  }
}

void MpiEngine::scatter(Order& order, const Call& call) {
  auto output = call.outputs[0];
  if (rank_ != call.peer) return ask_to_receive(order, output, call.peer, kRootedTag, collectives_);
  for (int rank = 0; rank < size_; ++rank) {
    const auto& input = call.inputs[rank];
    if (rank == rank_) {
      output.copy_(input);
    } else {
      ask_to_send(order, input, rank, kRootedTag, collectives_);
    }
  }
}

}  // namespace tessera::comm::mpi
