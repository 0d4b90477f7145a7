#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// Says of a parameter whose memory is kept (keep_memory) that it lies on the host beside the device that computes with it, or does so no more.
void keep_beside(const at::Tensor& parameter, bool beside = true);
bool is_kept_beside(const at::Tensor& parameter);

/// Of a parameter that a program has given data of another shape, which its keeper takes in (the whole of a slice): it is again what it was known to be.
void restore_known(const at::Tensor& parameter);

/// Whether a program has given it data of its shape (set_data, torch::load, Module::to) since it was first spoken of, or since that was forgotten. A keeper
/// that takes in what was given says so. What a checkpoint has filled in place is this rank's own, and was not given.
bool was_given(const at::Tensor& parameter);
void note_given(const at::Tensor& parameter);
void note_loaded(const at::Tensor& parameter);
void forget_given(const at::Tensor& parameter);
/// How often either has happened: what is known of the values is of those before where it is another number.
int64_t times_given(const at::Tensor& parameter);

/// Says of a part that the whole which it was cut out of was this part over and over, so that every rank has it without being sent it.
void note_alike_at_cut(const at::Tensor& part);
/// Whether that was said, and the part is still that one, of whatever type: by some of its values.
bool is_as_alike_at_cut(const at::Tensor& part);

/// Tells those who watch operators that the parameter is about to be written, or its own memory read, past libtorch (a kernel that goes by pointers is an
/// operator to nobody): fully_shard lets go of what it has gathered, and ends a forward that nobody goes back through. A copy onto itself, which moves nothing
/// and counts as a version.
void announce_write(const at::Tensor& parameter);

/// A sharded parameter that is shown whole, behind a forward that recorded gradients, is shown as the part that this rank holds (announce_write); of any other
/// nothing is done. For who asks a parameter for its shape or memory between steps: optimizers, loads.
void show_part(const at::Tensor& parameter);

}  // namespace tessera::nn
