#include "tessera/comm/collectives.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/exposed_time.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/leave_in_order.h"
#include "tessera/comm/tags.h"
#include "tessera/comm/uncounted_writes.h"
#include "tessera/comm/waiting.h"
#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/memory_events.h"

// Each call passes here once: what cannot be right is refused with names before an engine sees it. Inputs are packed where they have to be; outputs are never
// copied, so they have to be contiguous. Engines know equal parts alone: uneven ones are padded to the largest and cut after, at the price of a copy.

namespace tessera::comm {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

namespace {
thread_local int leaving = 0;
}

LeaveInOrder::LeaveInOrder() { ++leaving; }
LeaveInOrder::~LeaveInOrder() { --leaving; }
bool LeaveInOrder::now() { return leaving > 0; }

namespace {
thread_local bool shapes_alone = false;
}

ShapesAlone::ShapesAlone() : before_(std::exchange(shapes_alone, true)) {}
ShapesAlone::~ShapesAlone() { shapes_alone = before_; }

struct Pending::State {
  std::string_view name;  // of the collective, in errors
  Group group;
  Call call;                       // its tensors live until the engine is done with them
  std::function<void()> finish{};  // unpacks outputs
  Clock::time_point begin = Clock::now();
  Work work{};            // until it is waited for
  int64_t in_flight = 0;  ///< its number, where somebody listened when it started

  ~State() {
    if (!work || !LeaveInOrder::now()) return;
    try {
      work->synchronize();
    } catch (...) {  // an engine that was aborted
    }
  }
};

namespace {

[[noreturn]] void fail(std::string_view name, const Group& group, Clock::time_point begin, const std::string& cause) {
  const auto waited = seconds_since(begin);
  std::string who = detail::concat("rank ", group.rank(), " of ", group.size());
  if (group.world_rank(group.rank()) != group.rank()) who += detail::concat(" (rank ", group.world_rank(group.rank()), " of the world)");
  throw CommError(detail::concat(name, " of group ", group.name(), ", ", who, ": ", cause, "; waited ", waited, group.explain()));
}

// Throws what is being handled, in the words of the collective.
[[noreturn]] void fail(std::string_view name, const Group& group, Clock::time_point begin) {
  try {
    throw;
  } catch (const Error&) {
    throw;  // ours already: a decorator's words
  } catch (const c10::OutOfMemoryError&) {
    throw;  // of this rank alone, and no fault of the link
  } catch (...) {
    fail(name, group, begin, message_of(std::current_exception()));
  }
}

// While alive on a thread: whoever starts a collective on it waits for it at once, so that an engine may run it there and wakes no thread to make progress
// behind the caller's back.
thread_local bool caller_waits = false;
thread_local bool counts_writes = true;

class Now {
 public:
  Now() : before_(std::exchange(caller_waits, true)) {}
  ~Now() { caller_waits = before_; }
  Now(const Now&) = delete;
  Now& operator=(const Now&) = delete;

  void wait(Pending pending) const { pending.wait(); }

 private:
  Waiting waiting_;  // all of it, so that what is started and waited for inside reads no clock
  bool before_;
};

std::vector<int64_t> storages_of(const Tensors& tensors) {
  std::vector<int64_t> numbers;
  for (const at::Tensor& tensor : tensors) {
    if (const int64_t number = storage_number(tensor).number; number != 0) numbers.push_back(number);
  }
  return numbers;
}

// To who listens; returns the call's number.
int64_t say_started(EventStream& listener, const Group& group, const Call& call) {
  const int64_t number = listener.number_in_flight();
  Event event{.what = event_of(call, {.name = group.name(), .rank = group.rank(), .size = group.size()}),
              .reads = storages_of(call.inputs),
              .writes = storages_of(call.outputs)};
  event.writes.push_back(number);
  listener.add(std::move(event));
  return number;
}

void say_waited(EventStream& listener, const Call& call, int64_t in_flight) {
  listener.add({.what = WaitEvent{}, .reads = {in_flight}, .writes = storages_of(call.outputs)});
}

// Of truth values a sum is "or" and a product "and": the largest and the smallest of their bytes. An engine that added the bytes would make a third value.
void reduce_as_bytes(Call& call) {
  if (!call.reduction || call.tensor().scalar_type() != at::kBool) return;
  const std::vector<at::Tensor> given = call.inputs;
  for (at::Tensor& input : call.inputs) input = input.view(at::kByte);
  for (at::Tensor& output : call.outputs) {  // one that is its own input stays that: engines ask
    const auto own = std::ranges::find_if(given, [&](const at::Tensor& input) { return input.is_same(output); });
    output = own == given.end() ? output.view(at::kByte) : call.inputs[static_cast<size_t>(own - given.begin())];
  }
  call.asked = call.reduction;
  if (call.reduction == Op::Sum) call.reduction = Op::Max;
  if (call.reduction == Op::Product) call.reduction = Op::Min;
}

// Engines write memory, which no counter of libtorch's sees. A tensor of inference has none.
void count_write(const at::Tensor& tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) impl->bump_version();
}

// Hands a call to the engine.
Pending start(const Group& group, Call call, std::string_view name = {}, std::function<void()> finish = {}) {
  if (call.tensor().defined() && call.tensor().is_meta() && group.engine()->moves_data()) {
    require(shapes_alone, name.empty() ? to_string(call.op) : name, " of group ", group.name(), ", rank ", group.rank(), " of ", group.size(),
            ": was given a tensor on meta, which has no data to send; in a forward that pipeline::split records, put the collective into a module of its own, "
            "declared with TESSERA_MODULE, whose calls run anew in each pass");
    if (finish) finish();
    return {};
  }
  reduce_as_bytes(call);
  call.async = !caller_waits;
  if (name.empty()) name = to_string(call.op);
  auto state = std::make_shared<Pending::State>(Pending::State{.name = name, .group = group, .call = std::move(call), .finish = std::move(finish)});
  const Waiting waiting;
  const at::NoGradGuard no_grad;                    // the engine writes into leaves, too
  const MemoryScope scratch(MemoryCategory::Comm);  // its own tensors
  try {
    state->work = group.engine()->start(state->call);
  } catch (...) {
    fail(name, group, state->begin);
  }
  if (caller_waits && counts_writes) std::ranges::for_each(state->call.outputs, count_write);
  // Last: what decorators and the engine take for the call is part of its start, and whoever reads the list finds where that ends (plan/rehearsal.cpp).
  if (EventStream* const listener = EventStream::current()) state->in_flight = say_started(*listener, group, state->call);
  return Pending(std::move(state));
}

// What the engine may read: rows one after the other, the values themselves, outside of autograd.
at::Tensor packed(const at::Tensor& tensor) {
  const MemoryScope scratch(MemoryCategory::Comm);
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? detail::concat(tensor.sizes(), " ", c10::toString(tensor.scalar_type()), " on ", tensor.device()) : "undefined";
}

// The checks below build their texts only where they fail: they are on the way of every collective.
void check_output(const char* op, const Group& group, const at::Tensor& tensor) {
  const bool lazy = tensor.defined() && (tensor.is_conj() || tensor.is_neg());
  if (tensor.defined() && tensor.is_contiguous() && !lazy) return;
  invariant(false, op, " of group ", group.name(),
            lazy ? " writes a view that is conjugated or negated (conj, imag): " : " writes a tensor that is not contiguous: ", describe(tensor),
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

void check_dtypes(const char* op, const Group& group, const Tensors& tensors, const at::Tensor& like) {
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    if (tensors[rank].scalar_type() == like.scalar_type()) continue;
    invariant(false, op, " of group ", group.name(), ": rank ", rank, "'s part is ", describe(tensors[rank]), " where this rank has ", describe(like));
  }
}

void check_count(const char* op, const Group& group, const Tensors& tensors) {
  invariant(static_cast<int>(tensors.size()) == group.size(), op, " of group ", group.name(), " of ", group.size(), " gets ", tensors.size(), " tensors");
  for (const auto& tensor : tensors) check_input(op, group, tensor);
}

void check_peer(const char* op, const Group& group, int peer) {
  invariant(peer >= 0 && peer < group.size(), op, " of group ", group.name(), ": rank ", peer, " is not one of its ", group.size());
}

void check_tag(const char* op, const Group& group, int tag) {
  invariant(tag >= 0 && tag < kEndOfTags, op, " of group ", group.name(), ": tag ", tag, " is not one of 0 to ", kEndOfTags - 1,
            "; those above are of the messages of which collectives are made");
}

// A group of one: a copy, and nothing to wait for.
Pending at_once(const at::Tensor& out, const at::Tensor& in, const std::function<void()>& finish = {}) {
  const at::NoGradGuard no_grad;
  if (out.numel() > 0 && !out.is_same(in)) out.view(-1).copy_(in.reshape(-1));
  if (finish) finish();
  return {};
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

// What ranks give is what they get: equal parts of one size, or rows of one size, and of a rank's own as many as it expects. No rows have no size.
void check_rows(const char* op, const Group& group, const at::Tensor& out, const std::vector<int64_t>& out_splits, const at::Tensor& in,
                const std::vector<int64_t>& in_splits) {
  const bool splits = !out_splits.empty() || !in_splits.empty(), moves = in.numel() > 0 && out.numel() > 0;
  const auto row = [](const at::Tensor& tensor) { return tensor.dim() == 0 ? 1 : c10::multiply_integers(tensor.sizes().slice(1)); };
  const auto own = [&](const at::Tensor& tensor, const std::vector<int64_t>& parts) {
    if (!parts.empty()) return parts[static_cast<size_t>(group.rank())];
    return (tensor.dim() == 0 ? 1 : tensor.size(0)) / group.size();
  };
  const bool fit = splits ? !moves || row(out) == row(in) : out.numel() == in.numel();
  invariant(fit && out.scalar_type() == in.scalar_type(), op, " of group ", group.name(), " of ", group.size(), ": ", splits ? "rows" : "equal parts", " of ",
            describe(in), " do not fit ", describe(out));
  const int64_t given = own(in, in_splits), expected = own(out, out_splits);
  invariant(!splits || given == expected, op, " of group ", group.name(), ": rank ", group.rank(), " gives itself ", given, " rows and expects ", expected);
}

}  // namespace

UncountedWrites::UncountedWrites() : before_(std::exchange(counts_writes, false)) {}
UncountedWrites::~UncountedWrites() { counts_writes = before_; }

Pending::Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

bool Pending::done() const {
  if (!state_) return true;
  const bool over = state_->work->isCompleted();
  if (over && state_->call.op == Operation::Send) state_->in_flight = 0;  // who asked before it waits is held up by nobody: no wait to tell of
  return over;
}

void Pending::wait() {
  if (!state_) return;
  const auto state = std::exchange(state_, nullptr);
  const Work work = std::exchange(state->work, {});
  const Waiting waiting;
  const at::NoGradGuard no_grad;
  bool completed = false;
  try {
    const at::Tensor& tensor = state->call.tensor();
    const StreamWait stands_still(tensor.defined() ? tensor.device() : at::Device(at::kCPU));
    completed = work->wait();
  } catch (...) {
    fail(state->name, state->group, state->begin);
  }
  if (!completed) fail(state->name, state->group, state->begin, "aborted");
  if (EventStream* const listener = state->in_flight == 0 ? nullptr : EventStream::current()) say_waited(*listener, state->call, state->in_flight);
  if (state->finish) state->finish();
}

Pending all_reduce_async(const Group& group, const at::Tensor& tensor, Op op) {
  check_output("all_reduce", group, tensor);
  if (group.size() == 1) return {};
  const auto own = tensor.detach();
  return start(group, {.op = Operation::AllReduce, .inputs = {own}, .outputs = {own}, .reduction = op});
}

Pending reduce_async(const Group& group, const at::Tensor& tensor, int root, Op op) {
  check_output("reduce", group, tensor);
  check_peer("reduce", group, root);
  if (group.size() == 1) return {};
  const auto own = tensor.detach();
  return start(group, {.op = Operation::Reduce, .inputs = {own}, .outputs = {own}, .peer = root, .reduction = op});
}

namespace {

Pending start_all_gather(const char* name, const Group& group, const at::Tensor& out, const at::Tensor& in, std::function<void()> finish = {}) {
  check_input(name, group, in);
  check_output(name, group, out);
  check_sizes(name, group, out, in, group.size());
  if (group.size() == 1) return at_once(out, in, finish);
  return start(group, {.op = Operation::AllGather, .inputs = {packed(in)}, .outputs = {out.detach()}}, name, std::move(finish));
}

Pending start_reduce_scatter(const char* name, const Group& group, const at::Tensor& out, const at::Tensor& in, Op op, std::function<void()> finish = {}) {
  check_input(name, group, in);
  check_output(name, group, out);
  check_sizes(name, group, in, out, group.size());
  if (group.size() == 1) return at_once(out, in, finish);
  return start(group, {.op = Operation::ReduceScatter, .inputs = {packed(in)}, .outputs = {out.detach()}, .reduction = op}, name, std::move(finish));
}

}  // namespace

Pending all_gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in) { return start_all_gather("all_gather", group, out, in); }

Pending all_gather_uneven_async(const Group& group, const Tensors& outs, const at::Tensor& in) {
  check_input("all_gather_uneven", group, in);
  check_count("all_gather_uneven", group, outs);
  check_sizes("all_gather_uneven", group, outs[group.rank()], in, 1);
  check_dtypes("all_gather_uneven", group, outs, in);
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
  check_dtypes("reduce_scatter_uneven", group, ins, out);
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
  check_rows("all_to_all", group, out, out_splits, in, in_splits);
  if (group.size() == 1) return at_once(out, in);
  return start(group, {.op = Operation::AllToAll, .inputs = {packed(in)}, .outputs = {out.detach()}, .in_splits = in_splits, .out_splits = out_splits});
}

Pending broadcast_async(const Group& group, const at::Tensor& tensor, int root) {
  check_output("broadcast", group, tensor);
  check_peer("broadcast", group, root);
  if (group.size() == 1) return {};
  const auto own = tensor.detach();
  return start(group, {.op = Operation::Broadcast, .inputs = {own}, .outputs = {own}, .peer = root});
}

Pending gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  check_input("gather", group, in);
  check_peer("gather", group, root);
  const bool receives = group.rank() == root;
  if (receives) {
    check_output("gather", group, out);
    check_sizes("gather", group, out, in, group.size());
  }
  if (group.size() == 1) return at_once(out, in);
  auto to = receives ? equal_parts(out.detach(), in, group.size()) : Tensors();
  return start(group, {.op = Operation::Gather, .inputs = {packed(in)}, .outputs = std::move(to), .peer = root});
}

Pending scatter_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) {
  check_output("scatter", group, out);
  check_peer("scatter", group, root);
  const bool sends = group.rank() == root;
  if (sends) {
    check_input("scatter", group, in);
    check_sizes("scatter", group, in, out, group.size());
  }
  if (group.size() == 1) return at_once(out, in);
  auto from = sends ? equal_parts(packed(in), out, group.size()) : Tensors();
  return start(group, {.op = Operation::Scatter, .inputs = std::move(from), .outputs = {out.detach()}, .peer = root});
}

Pending send_async(const Group& group, const at::Tensor& tensor, int dst, int tag) {
  check_input("send", group, tensor);
  check_peer("send", group, dst);
  check_tag("send", group, tag);
  invariant(dst != group.rank(), "send of group ", group.name(), ": rank ", dst, " sends to itself");
  return start(group, {.op = Operation::Send, .inputs = {packed(tensor)}, .peer = dst, .tag = tag});
}

Pending recv_async(const Group& group, const at::Tensor& tensor, int src, int tag) {
  check_output("recv", group, tensor);
  check_peer("recv", group, src);
  check_tag("recv", group, tag);
  invariant(src != group.rank(), "recv of group ", group.name(), ": rank ", src, " receives from itself");
  return start(group, {.op = Operation::Recv, .outputs = {tensor.detach()}, .peer = src, .tag = tag});
}

Pending barrier_async(const Group& group) { return group.size() == 1 ? Pending() : start(group, {.op = Operation::Barrier}); }

at::Tensor empty(const Group& group, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const MemoryLabel label(MemoryLabel::current().empty() ? CallSite::current() : std::string_view());
  at::Tensor flat;
  const auto begin = Clock::now();
  try {
    if (group.engine() && options.device().is_cpu()) flat = group.engine()->empty(c10::multiply_integers(sizes), options);
  } catch (...) {
    fail("empty", group, begin);
  }
  return flat.defined() ? flat.view(sizes) : at::empty(sizes, options);
}

void all_reduce(const Group& group, const at::Tensor& tensor, Op op) { Now().wait(all_reduce_async(group, tensor, op)); }
void reduce(const Group& group, const at::Tensor& tensor, int root, Op op) { Now().wait(reduce_async(group, tensor, root, op)); }
void all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in) { Now().wait(all_gather_async(group, out, in)); }
void all_gather_uneven(const Group& group, const Tensors& outs, const at::Tensor& in) { Now().wait(all_gather_uneven_async(group, outs, in)); }
void reduce_scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, Op op) { Now().wait(reduce_scatter_async(group, out, in, op)); }
void reduce_scatter_uneven(const Group& group, const at::Tensor& out, const Tensors& ins, Op op) {
  Now().wait(reduce_scatter_uneven_async(group, out, ins, op));
}
void all_to_all(const Group& group, const at::Tensor& out, const at::Tensor& in, const std::vector<int64_t>& out_splits,
                const std::vector<int64_t>& in_splits) {
  Now().wait(all_to_all_async(group, out, in, out_splits, in_splits));
}
void broadcast(const Group& group, const at::Tensor& tensor, int root) { Now().wait(broadcast_async(group, tensor, root)); }
void gather(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) { Now().wait(gather_async(group, out, in, root)); }
void scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, int root) { Now().wait(scatter_async(group, out, in, root)); }
void send(const Group& group, const at::Tensor& tensor, int dst, int tag) { Now().wait(send_async(group, tensor, dst, tag)); }
void recv(const Group& group, const at::Tensor& tensor, int src, int tag) { Now().wait(recv_async(group, tensor, src, tag)); }
void barrier(const Group& group) { Now().wait(barrier_async(group)); }

}  // namespace tessera::comm
