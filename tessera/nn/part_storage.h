#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace tessera::nn {

/// A storage of its own over the memory of `part`, a contiguous piece of a flat buffer, which lives on for as long as this one does. So it can be told who
/// else holds that piece, and what they hold can be taken apart from it. Autograd, and whoever resizes, sees a tensor like any other.
at::Storage part_storage(const at::Tensor& part);

/// What is in `storage` moves, with its values of now, to memory of its own: aliases that a program keeps (data(), detach()) keep what they have when the piece
/// of the buffer gets other values. Where nobody but the caller holds it there is nothing to move.
void leave_to_aliases(const at::Storage& storage, const at::Tensor& part);

/// A tensor of its own, as far as autograd knows, that shows `part` through `storage`, which was made over it.
at::Tensor shown_through(const at::Storage& storage, const at::Tensor& part);

}  // namespace tessera::nn
