#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

namespace c10d {
class Work;
}

/// The collectives, on raw tensors: no gradient flows (see differentiable.h).
///
/// Letters: n ranks, a tensor of S bytes. Each comment gives what a rank sends at least, which is what traffic.h computes and the recorder logs
/// as `sent_bytes`; an engine may take more steps or bytes. Group of one: a copy where there are two tensors, else nothing.
/// Inputs that are only read may have any strides (they are packed first, which costs a copy); what is written must be contiguous, and shapes and dtypes must
/// fit: InternalError otherwise, before anything is sent. Every rank must pass the same shapes and dtypes unless said otherwise.
/// In place: all_gather's `in` may be this rank's part of `out`, and reduce_scatter's `out` this rank's part of `in`; other overlaps are not allowed.
/// Where a peer or a link fails, or the group's timeout passes: CommError with the op, the group, the rank and the seconds waited.
/// Data that is moved and not summed may have any dtype; sums are made in the tensor's own dtype. A NaN on any rank gives NaN, by every Op and backend.
/// Each `_async` form returns at once; tensors must be neither written nor (outputs) read until `wait` has returned.
/// What is written counts as written in place (Tensor::_version), so that autograd, and who keeps results, notice it. By an `_async` form it need not: so
/// memory is filled that graphs know already, as with the parameters that a unit gathers.
namespace tessera::comm {

/// A collective in flight. Owns what it needs, the tensors included. Destroying it without waiting leaves outputs undefined; a send goes on, and keeps its
/// tensor until the peer has it.
class Pending {
 public:
  /// Nothing in flight: done.
  Pending() = default;
  Pending(Pending&&) = default;
  Pending& operator=(Pending&&) = default;

  /// Blocks until the outputs may be read. Throws CommError; further calls do nothing.
  void wait();
  /// Whether `wait` would return at once. Where it holds, `wait` is still due: it finishes outputs and throws errors.
  bool done() const;

  struct State;
  explicit Pending(std::shared_ptr<State> state);

 private:
  std::shared_ptr<State> state_;
};

/// While alive, on this thread, calls with tensors on meta, which have no data, move nothing and tell nobody: for who runs a module's forward for the shapes
/// of what comes out, on one rank by itself, and will run it anew (pipeline::split). Elsewhere, but in a dry world, such a tensor is refused: ConfigError.
class ShapesAlone {
 public:
  ShapesAlone();
  ~ShapesAlone();
  ShapesAlone(const ShapesAlone&) = delete;
  ShapesAlone& operator=(const ShapesAlone&) = delete;

 private:
  bool before_;
};

/// A tensor like at::empty's, in memory that the group's engine can reduce without staging it where the engine has such memory (ranks of one host that share
/// memory), for buffers that are made once and reduced often: gradient buckets. Elsewhere plain memory. Counted by the MemoryTracker alike. Not collective:
/// each rank may have as many as it likes, and free them when it likes. Throws CommError where shared memory is exhausted.
at::Tensor empty(const Group& group, at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// tensor <- op over ranks of tensor, in place. A rank sends 2 S (n-1)/n in 2(n-1) steps (ring: reduce-scatter, then all-gather).
void all_reduce(const Group& group, const at::Tensor& tensor, Op op = Op::Sum);
[[nodiscard]] Pending all_reduce_async(const Group& group, const at::Tensor& tensor, Op op = Op::Sum);

/// Root's tensor <- op over ranks; what the others' tensors hold afterwards is undefined. All but one rank send S in a chain of n-1 steps.
void reduce(const Group& group, const at::Tensor& tensor, int root, Op op = Op::Sum);
[[nodiscard]] Pending reduce_async(const Group& group, const at::Tensor& tensor, int root, Op op = Op::Sum);

/// out [n*k, ...] <- the ranks' in [k, ...] one below the other. S bytes of out: a rank sends S (n-1)/n in n-1 steps.
void all_gather(const Group& group, const at::Tensor& out, const at::Tensor& in);
[[nodiscard]] Pending all_gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in);

/// outs[r] <- rank r's in; any shape, each rank its own, outs[r].numel() being rank r's in.numel(). One all_gather in which every rank's part is
/// padded to the largest, so S = n * largest, and as many bytes of scratch.
void all_gather_uneven(const Group& group, const std::vector<at::Tensor>& outs, const at::Tensor& in);
[[nodiscard]] Pending all_gather_uneven_async(const Group& group, const std::vector<at::Tensor>& outs, const at::Tensor& in);

/// out [k, ...] <- this rank's part of op over ranks of in [n*k, ...]. S bytes of in: a rank sends S (n-1)/n in n-1 steps.
void reduce_scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, Op op = Op::Sum);
[[nodiscard]] Pending reduce_scatter_async(const Group& group, const at::Tensor& out, const at::Tensor& in, Op op = Op::Sum);

/// out <- op over ranks of their ins[this rank]; ins[r] has the elements of rank r's out. One reduce_scatter in which every part is padded to the
/// largest, so S = n * largest, and as many bytes of scratch.
void reduce_scatter_uneven(const Group& group, const at::Tensor& out, const std::vector<at::Tensor>& ins, Op op = Op::Sum);
[[nodiscard]] Pending reduce_scatter_uneven_async(const Group& group, const at::Tensor& out, const std::vector<at::Tensor>& ins, Op op = Op::Sum);

/// Rows of `in` go out, in_splits[r] of them to rank r, and rows come in, out_splits[r] of them from rank r, both in rank order. Empty splits mean
/// equal parts; a rank gives splits, of one of the two at least, where any other rank does. This rank sends the rows for others: S (n-1)/n where the parts are
/// equal, in n-1 steps. Rows may be uneven and zero.
void all_to_all(const Group& group, const at::Tensor& out, const at::Tensor& in, const std::vector<int64_t>& out_splits = {},
                const std::vector<int64_t>& in_splits = {});
[[nodiscard]] Pending all_to_all_async(const Group& group, const at::Tensor& out, const at::Tensor& in, const std::vector<int64_t>& out_splits = {},
                                       const std::vector<int64_t>& in_splits = {});

/// tensor <- root's tensor. All but one rank send S, in a chain of n-1 steps.
void broadcast(const Group& group, const at::Tensor& tensor, int root = 0);
[[nodiscard]] Pending broadcast_async(const Group& group, const at::Tensor& tensor, int root = 0);

/// Root's out [n*k, ...] <- the ranks' in [k, ...]; the others pass an undefined out. All but the root send k.
void gather(const Group& group, const at::Tensor& out, const at::Tensor& in, int root = 0);
[[nodiscard]] Pending gather_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root = 0);

/// out [k, ...] <- this rank's part of root's in [n*k, ...]; the others pass an undefined in. The root sends (n-1) k.
void scatter(const Group& group, const at::Tensor& out, const at::Tensor& in, int root = 0);
[[nodiscard]] Pending scatter_async(const Group& group, const at::Tensor& out, const at::Tensor& in, int root = 0);

/// One tensor to rank `dst`, which must call recv with the same tag, shape and dtype. Tags are 0 to 4194303; an MPI may end sooner, not below 32767, and its
/// engine refuses those above by ConfigError. Sends S. A rank cannot send to itself. Messages stand in no order with collectives, and no collective takes one.
void send(const Group& group, const at::Tensor& tensor, int dst, int tag = 0);
[[nodiscard]] Pending send_async(const Group& group, const at::Tensor& tensor, int dst, int tag = 0);

/// tensor <- what rank `src` sends under `tag`.
void recv(const Group& group, const at::Tensor& tensor, int src, int tag = 0);
[[nodiscard]] Pending recv_async(const Group& group, const at::Tensor& tensor, int src, int tag = 0);

/// Returns once every rank has called it. No data.
void barrier(const Group& group);
[[nodiscard]] Pending barrier_async(const Group& group);

}  // namespace tessera::comm
