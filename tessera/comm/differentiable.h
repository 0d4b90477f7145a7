#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

/// Collectives that autograd follows. Each is named by what it does forward and says what it does backward; every rank must run backward through it,
/// in the same order: x requires grad on all ranks or on none (but for send and recv). Backward is made of these same functions, so gradients of gradients
/// work; those of send and recv are refused (ConfigError). Outputs are new tensors (but for the group of one: the input itself). Backward's records carry the
/// CallSite of forward.
///
/// Which backward is right depends on what the gradient is that arrives at a *replicated* output (every rank holds the same y):
///   Gradient::Replicated   every rank goes on to compute the same loss from y, so each already holds the whole dL/dy;
///   Gradient::Partial      the ranks go on differently (own rows, own features), and dL/dy is the sum of what they hold.
/// In both cases L is counted once: the loss itself if all ranks hold the same, or the sum of the ranks' losses.
namespace tessera::comm::differentiable {

enum class Gradient { Replicated, Partial };

/// y = x on every rank; x is replicated. Backward: all_reduce of the partial dL/dy (Megatron's f, arXiv:1909.08053).
/// Traffic: forward none; backward one all_reduce of x.
at::Tensor copy_to_group(const Group& group, const at::Tensor& x);

/// y = sum over ranks of x. Backward: Replicated: dL/dy itself (Megatron's g); Partial: all_reduce of it.
/// Traffic: forward one all_reduce of x; backward none, or one more.
at::Tensor all_reduce(const Group& group, const at::Tensor& x, Gradient gradient = Gradient::Replicated);

/// y = the ranks' x one after the other along `dim`. Where the parts are uneven, `total` is y's size along dim, dealt by layout's rule (the first
/// total % n ranks hold one more); -1 means equal parts. Backward: Partial: reduce_scatter of dL/dy; Replicated: this rank's part of it.
/// Traffic: forward one all_gather of y; backward one reduce_scatter of y, or none.
at::Tensor all_gather(const Group& group, const at::Tensor& x, int64_t dim = 0, int64_t total = -1, Gradient gradient = Gradient::Partial);

/// y = this rank's part, along `dim` by layout's rule, of the sum over ranks of x. Backward: all_gather of dL/dy.
/// Traffic: forward one reduce_scatter of x; backward one all_gather of x.
at::Tensor reduce_scatter(const Group& group, const at::Tensor& x, int64_t dim = 0);

/// y = this rank's part, along `dim` by layout's rule, of x, which is replicated. Backward: all_gather of dL/dy.
/// Traffic: forward none; backward one all_gather of x.
at::Tensor split(const Group& group, const at::Tensor& x, int64_t dim = 0);

/// y = the rows that the ranks send here, out_splits[r] of them from rank r, while in_splits[r] rows of x go to rank r; empty means equal parts.
/// Backward: all_to_all the other way. Traffic: one all_to_all each way.
at::Tensor all_to_all(const Group& group, const at::Tensor& x, const std::vector<int64_t>& out_splits = {}, const std::vector<int64_t>& in_splits = {});

/// y = root's x on every rank; the others pass an x of the same shape and dtype, which gets a gradient of zeros. Backward: Partial: reduce to the
/// root; Replicated: root takes its own. Traffic: forward one broadcast of x; backward one reduce of x, or none.
at::Tensor broadcast(const Group& group, const at::Tensor& x, int root = 0, Gradient gradient = Gradient::Partial);

/// Root's y [n*k, ...] = the ranks' x [k, ...]; the others get y [0, ...], which they must use in their loss too (its sum is zero) so that their
/// backward runs. Backward: scatter from the root. Traffic: one gather, one scatter, of n*k rows.
at::Tensor gather(const Group& group, const at::Tensor& x, int root = 0);

/// y [k, ...] = this rank's part of root's x [n*k, ...]; the others pass an x of the same shape and dtype, which gets a gradient of zeros.
/// Backward: gather to the root. Traffic: one scatter, one gather, of n*k rows.
at::Tensor scatter(const Group& group, const at::Tensor& x, int root = 0);

/// Sends x to `dst` and returns a zero scalar that stands for it: add it to this rank's loss, and backward receives dL/dx from `dst`.
/// Floats that are sent come back as a gradient, also where x requires none: the receiver, who cannot know, sends it, and one that nobody took would be taken
/// for that of the next message. So add the scalar to a loss of which backward runs wherever the receiver's does, and record graphs (GradMode) on both sides or
/// on neither. What has no gradient at all is for comm::send. Traffic: one send; backward one recv.
at::Tensor send(const Group& group, const at::Tensor& x, int dst, int tag = 0);

/// y = what `src` sends; `like` gives shape, dtype and device and is not read. Backward: sends dL/dy to `src`. Traffic: one recv; backward one send.
at::Tensor recv(const Group& group, const at::Tensor& like, int src, int tag = 0);

/// y = x, once every rank is here; the same in backward. Traffic: one barrier each way.
at::Tensor barrier(const Group& group, const at::Tensor& x);

}  // namespace tessera::comm::differentiable
