#include "tessera/comm/collectives.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/comm/call_site.h"
#include "tessera/comm/caller_waits.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"

namespace tessera::comm {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

struct Pending::State {
  const char* op;
  Group group;
  Clock::time_point start = Clock::now();
  Tensors tensors;                 // alive until the engine is done with them
  std::function<void()> finish{};  // unpacks outputs
  Work work{};
};

namespace {

[[noreturn]] void fail(const char* op, const Group& group, Clock::time_point start, const std::string& cause) {
  const auto waited = seconds_since(start);
  std::string who = detail::concat("rank ", group.rank(), " of ", group.size());
  if (group.world_rank(group.rank()) != group.rank()) who += detail::concat(" (rank ", group.world_rank(group.rank()), " of the world)");
  throw CommError(detail::concat(op, " of group ", group.name(), ", ", who, ": ", cause, "; waited ", waited, group.explain()));
}

template <class Body>
auto guarded(const char* op, const Group& group, Clock::time_point start, Body body) {
  try {
    return body();
  } catch (const Error&) {
    throw;  // ours already: a decorator's verdict
  } catch (const c10::OutOfMemoryError&) {
    throw;  // of this rank alone, and no fault of the link
  } catch (...) {
    fail(op, group, start, message_of(std::current_exception()));
  }
}

// What c10d calls asyncOp: an engine may run the others on this thread.
bool goes_on() { return !CallerWaits::now(); }

// Hands a collective to the engine. `start` gets the engine and returns its work.
template <class Start>
Pending launch(const char* op, const Group& group, Tensors tensors, Start start, std::function<void()> finish = {}) {
  auto state = std::make_shared<Pending::State>(Pending::State{.op = op, .group = group, .tensors = std::move(tensors), .finish = std::move(finish)});
  const Waiting waiting;
  const at::NoGradGuard no_grad;                    // the engine writes into leaves, too
  const MemoryScope scratch(MemoryCategory::Comm);  // its own tensors
  state->work = guarded(op, group, state->start, [&] { return start(*group.backend()); });
  return Pending(std::move(state));
}

// What the engine may read: rows one after the other, outside of autograd.
at::Tensor packed(const at::Tensor& tensor) {
  const MemoryScope scratch(MemoryCategory::Comm);
  return tensor.detach().contiguous();
}

// A group of one: nothing to wait for.
Pending at_once(const std::function<void()>& copy, const std::function<void()>& finish = {}) {
  const at::NoGradGuard no_grad;
  copy();
  if (finish) finish();
  return {};
}

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? detail::concat(tensor.sizes(), " ", c10::toString(tensor.scalar_type()), " on ", tensor.device()) : "undefined";
}

// The checks below build their texts only where they fail: they are on the way of every collective.
void check_output(const char* op, const Group& group, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_contiguous()) return;
  invariant(false, op, " of group ", group.name(), " writes a tensor that is not contiguous: ", describe(tensor),
            tensor.defined() ? detail::concat(" with strides ", tensor.strides()) : "");
}

void check_input(const char* op, const Group& group, const at::Tensor& tensor) {
  invariant(tensor.defined(), op, " of group ", group.name(), " reads an undefined tensor");
}

// `whole` is `parts` times `part`.
void check_sizes(const char* op, const Group& group, const at::Tensor& whole, const at::Tensor& part, int parts) {
  if (whole.numel() == part.numel() * parts && whole.scalar_type() == part.scalar_type()) return;
  invariant(false, op, " of group ", group.name(), " of ", group.size(), ": ", describe(whole), " is not ", parts, " times ", describe(part));
}

void check_count(const char* op, const Group& group, const Tensors& tensors) {
  invariant(static_cast<int>(tensors.size()) == group.size(), op, " of group ", group.name(), " of ", group.size(), " gets ", tensors.size(), " tensors");
  for (const auto& tensor : tensors) check_input(op, group, tensor);
}

void check_peer(const char* op, const Group& group, int peer) {
  invariant(peer >= 0 && peer < group.size(), op, " of group ", group.name(), ": rank ", peer, " is not one of its ", group.size());
}

void copy_unless_same(const at::Tensor& out, const at::Tensor& in) {
  if (out.numel() == 0 || out.is_same(in)) return;
  out.view(-1).copy_(in.reshape(-1));
}

c10d::ReduceOp engine_op(Op op) {
  switch (op) {
    case Op::Sum:
      return c10d::ReduceOp::SUM;
    case Op::Product:
      return c10d::ReduceOp::PRODUCT;
    case Op::Min:
      return c10d::ReduceOp::MIN;
    case Op::Max:
      return c10d::ReduceOp::MAX;
  }
  throw InternalError("internal error: unknown reduction");
}

// Views of equal parts, as the engine's gather and scatter want them.
Tensors equal_parts(const at::Tensor& whole, const at::Tensor& like, int parts) {
  Tensors views;
  const auto flat = whole.view(-1);
  for (int part = 0; part < parts; ++part) views.push_back(flat.narrow(0, part * like.numel(), like.numel()).view(like.sizes()));
  return views;
}

int64_t largest(const Tensors& tensors) {
  int64_t most = 0;
  for (const auto& tensor : tensors) most = std::max(most, tensor.numel());
  return most;
}

void check_splits(const char* op, const Group& group, const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    invariant(rows % group.size() == 0, op, " of group ", group.name(), ": ", rows, " rows cannot be dealt equally over ", group.size(), " ranks; give splits");
    return;
  }
  const auto sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  invariant(static_cast<int>(splits.size()) == group.size() && sum == rows && *std::min_element(splits.begin(), splits.end()) >= 0, op, " of group ",
            group.name(), " of ", group.size(), ": splits ", c10::IntArrayRef(splits), " do not deal ", rows, " rows");
}

}  // namespace

Pending::Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

bool Pending::done() const { return !state_ || state_->work->isCompleted(); }

void Pending::wait() {
  if (!state_) return;
  const auto state = std::move(state_);
  state_.reset();
  const Waiting waiting;
  const at::NoGradGuard no_grad;
  const bool completed = guarded(state->op, state->group, state->start, [&] { return state->work->wait(); });
  if (!completed) fail(state->op, state->group, state->start, "aborted");
  if (state->finish) state->finish();
}

Pending all_reduce_async(const Group& group, const at::Tensor& tensor, Op op) {
  check_output("all_reduce", group, tensor);
  if (group.size() == 1) return {};
  return launch("all_reduce", group, {tensor}, [&](c10d::Backend& engine) {
    Tensors tensors{tensor.detach()};
    return engine.allreduce(tensors, {.reduceOp = engine_op(op), .asyncOp = goes_on()});
  });
}

Pending reduce_async(const Group& group, const at::Tensor& tensor, int root, Op op) {
  check_output("reduce", group, tensor);
  check_peer("reduce", group, root);
  if (group.size() == 1) return {};
  return launch("reduce", group, {tensor}, [&](c10d::Backend& engine) {
    Tensors tensors{tensor.detach()};
    return engine.reduce(tensors, {.reduceOp = engine_op(op), .rootRank = root, .asyncOp = goes_on()});
  });
}

namespace {

Pending start_all_gather(const char* op, const Group& group, const at::Tensor& out, const at::Tensor& in, std::function<void()> finish = {}) {
  check_input(op, group, in);
  check_output(op, group, out);
  check_sizes(op, group, out, in, group.size());
  if (group.size() == 1) return at_once([&] { copy_unless_same(out, in); }, finish);
  auto to = out.detach(), from = packed(in);
  return launch(op, group, {to, from}, [&](c10d::Backend& engine) { return engine._allgather_base(to, from, {.asyncOp = goes_on()}); }, std::move(finish));
}

Pending start_reduce_scatter(const char* name, const Group& group, const at::Tensor& out, const at::Tensor& in, Op op, std::function<void()> finish = {}) {
  check_input(name, group, in);
  check_output(name, group, out);
  check_sizes(name, group, in, out, group.size());
  if (group.size() == 1) return at_once([&] { copy_unless_same(out, in); }, finish);
  auto to = out.detach(), from = packed(in);
  return launch(
      name, group, {to, from}, [&](c10d::Backend& engine) { return engine._reduce_scatter_base(to, from, {.reduceOp = engine_op(op), .asyncOp = goes_on()}); },
      std::move(finish));
}

}  // namespace

Pending all_gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in) { return start_all_gather("all_gather", group, out, in); }

Pending all_gather_uneven_async(const Group& group, const Tensors& outs, const at::Tensor& in) {
  check_input("all_gather_uneven", group, in);
  check_count("all_gather_uneven", group, outs);
  check_sizes("all_gather_uneven", group, outs[group.rank()], in, 1);
  const at::NoGradGuard no_grad;
  const MemoryScope scratch(MemoryCategory::Comm);
  const auto most = largest(outs);
  const auto padded = at::empty({most}, in.options());
  padded.narrow(0, 0, in.numel()).copy_(in.reshape(-1));
  const auto gathered = at::empty({most * group.size()}, in.options());
  return start_all_gather("all_gather_uneven", group, gathered, padded, [gathered, outs, most] {
    for (size_t rank = 0; rank < outs.size(); ++rank) outs[rank].copy_(gathered.narrow(0, rank * most, outs[rank].numel()).view(outs[rank].sizes()));
  });
}

Pending reduce_scatter_async(const Group& group, const at::Tensor& out, const at::Tensor& in, Op op) {
  return start_reduce_scatter("reduce_scatter", group, out, in, op);
}

Pending reduce_scatter_uneven_async(const Group& group, const at::Tensor& out, const Tensors& ins, Op op) {
  check_count("reduce_scatter_uneven", group, ins);
  check_sizes("reduce_scatter_uneven", group, ins[group.rank()], out, 1);
  const at::NoGradGuard no_grad;
  const MemoryScope scratch(MemoryCategory::Comm);
  const auto most = largest(ins);
  const auto padded = at::zeros({most * group.size()}, out.options());  // padding is summed too: garbage could be slow denormals
  for (size_t rank = 0; rank < ins.size(); ++rank) padded.narrow(0, rank * most, ins[rank].numel()).copy_(ins[rank].reshape(-1));
  const auto mine = at::empty({most}, out.options());
  return start_reduce_scatter("reduce_scatter_uneven", group, mine, padded, op, [out, mine] { out.copy_(mine.narrow(0, 0, out.numel()).view(out.sizes())); });
}

Pending all_to_all_async(const Group& group, const at::Tensor& out, const at::Tensor& in, const std::vector<int64_t>& out_splits,
                         const std::vector<int64_t>& in_splits) {
  check_input("all_to_all", group, in);
  check_output("all_to_all", group, out);
  check_splits("all_to_all", group, out, out_splits);
  check_splits("all_to_all", group, in, in_splits);
  if (group.size() == 1) return at_once([&] { copy_unless_same(out, in); });
  auto to = out.detach(), from = packed(in);
  auto to_splits = out_splits, from_splits = in_splits;
  return launch("all_to_all", group, {to, from},
                [&](c10d::Backend& engine) { return engine.alltoall_base(to, from, to_splits, from_splits, {.asyncOp = goes_on()}); });
}

Pending broadcast_async(const Group& group, const at::Tensor& tensor, int root) {
  check_output("broadcast", group, tensor);
  check_peer("broadcast", group, root);
  if (group.size() == 1) return {};
  return launch("broadcast", group, {tensor}, [&](c10d::Backend& engine) {
    Tensors tensors{tensor.detach()};
    return engine.broadcast(tensors, {.rootRank = root, .asyncOp = goes_on()});
  });
}

Pending gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  check_input("gather", group, in);
  check_peer("gather", group, root);
  const bool receives = group.rank() == root;
  if (receives) {
    check_output("gather", group, out);
    check_sizes("gather", group, out, in, group.size());
  }
  if (group.size() == 1) return at_once([&] { copy_unless_same(out, in); });
  Tensors from{packed(in)};
  return launch("gather", group, {out, from[0]}, [&](c10d::Backend& engine) {
    std::vector<Tensors> to;
    if (receives) to.push_back(equal_parts(out.detach(), in, group.size()));
    return engine.gather(to, from, {.rootRank = root, .asyncOp = goes_on()});
  });
}

Pending scatter_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  check_output("scatter", group, out);
  check_peer("scatter", group, root);
  const bool sends = group.rank() == root;
  if (sends) {
    check_input("scatter", group, in);
    check_sizes("scatter", group, in, out, group.size());
  }
  if (group.size() == 1) return at_once([&] { copy_unless_same(out, in); });
  const auto whole = sends ? packed(in) : at::Tensor();
  return launch("scatter", group, {out, whole}, [&](c10d::Backend& engine) {
    std::vector<Tensors> from;
    if (sends) from.push_back(equal_parts(whole, out, group.size()));
    Tensors to{out.detach()};
    return engine.scatter(to, from, {.rootRank = root, .asyncOp = goes_on()});
  });
}

Pending send_async(const Group& group, const at::Tensor& tensor, int dst, int tag) {
  check_input("send", group, tensor);
  check_peer("send", group, dst);
  invariant(dst != group.rank(), "send of group ", group.name(), ": rank ", dst, " sends to itself");
  const auto from = packed(tensor);
  return launch("send", group, {from}, [&](c10d::Backend& engine) {
    Tensors tensors{from};
    return engine.send(tensors, dst, tag);
  });
}

Pending recv_async(const Group& group, const at::Tensor& tensor, int src, int tag) {
  check_output("recv", group, tensor);
  check_peer("recv", group, src);
  invariant(src != group.rank(), "recv of group ", group.name(), ": rank ", src, " receives from itself");
  return launch("recv", group, {tensor}, [&](c10d::Backend& engine) {
    Tensors tensors{tensor.detach()};
    return engine.recv(tensors, src, tag);
  });
}

Pending barrier_async(const Group& group) {
  if (group.size() == 1) return {};
  return launch("barrier", group, {}, [](c10d::Backend& engine) { return engine.barrier({.asyncOp = goes_on()}); });
}

at::Tensor empty(const Group& group, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto engine = group.backend();
  const MemoryLabel label(MemoryLabel::current().empty() ? CallSite::current() : std::string_view());
  if (!engine || !options.device().is_cpu() || !engine->supportsTensorAlloc(0)) return at::empty(sizes, options);
  return guarded("empty", group, Clock::now(), [&] { return engine->allocateTensor(c10::multiply_integers(sizes), options); }).view(sizes);
}

namespace {

template <class Start>
void now(const Start& start) {
  const CallerWaits waits;
  start().wait();
}

}  // namespace

void all_reduce(const Group& group, const at::Tensor& tensor, Op op) {
  now([&] { return all_reduce_async(group, tensor, op); });
}
void reduce(const Group& group, const at::Tensor& tensor, int root, Op op) {
  now([&] { return reduce_async(group, tensor, root, op); });
}
void all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in) {
  now([&] { return all_gather_async(group, out, in); });
}
void all_gather_uneven(const Group& group, const Tensors& outs, const at::Tensor& in) {
  now([&] { return all_gather_uneven_async(group, outs, in); });
}
void reduce_scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, Op op) {
  now([&] { return reduce_scatter_async(group, out, in, op); });
}
void reduce_scatter_uneven(const Group& group, const at::Tensor& out, const Tensors& ins, Op op) {
  now([&] { return reduce_scatter_uneven_async(group, out, ins, op); });
}
void all_to_all(const Group& group, const at::Tensor& out, const at::Tensor& in, const std::vector<int64_t>& out_splits,
                const std::vector<int64_t>& in_splits) {
  now([&] { return all_to_all_async(group, out, in, out_splits, in_splits); });
}
void broadcast(const Group& group, const at::Tensor& tensor, int root) {
  now([&] { return broadcast_async(group, tensor, root); });
}
void gather(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  now([&] { return gather_async(group, out, in, root); });
}
void scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  now([&] { return scatter_async(group, out, in, root); });
}
void send(const Group& group, const at::Tensor& tensor, int dst, int tag) {
  now([&] { return send_async(group, tensor, dst, tag); });
}
void recv(const Group& group, const at::Tensor& tensor, int src, int tag) {
  now([&] { return recv_async(group, tensor, src, tag); });
}
void barrier(const Group& group) {
  now([&] { return barrier_async(group); });
}

}  // namespace tessera::comm
