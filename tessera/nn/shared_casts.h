#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// While alive, a parameter that this thread's layers cast to the type of their products is cast once for all micro-batches that are in flight: backward needs
/// the copy, and each would keep one of its own. Rank 0 of p stages under 1F1B holds p micro-batches, and so 2 p bytes a parameter in place of 2. The copy goes
/// when the last of them is done, so one micro-batch after the other holds what it did without.
///
/// Values must not change while a copy is alive: an update between, as in asynchronous pipelines, is for a scope of its own. What counts its writes
/// (Tensor::_version) is noticed. Scopes do not nest: the inner one counts.
class ShareCasts {
 public:
  ShareCasts();
  ~ShareCasts();
  ShareCasts(const ShareCasts&) = delete;
  ShareCasts& operator=(const ShareCasts&) = delete;
};

/// A parameter, or what stands for it (nn::in_use), in `dtype`, itself where it has that type: a layer's cast of its weight. The same bits within a scope and
/// without, forward and backward.
at::Tensor cast_weight(const at::Tensor& used, at::ScalarType dtype);

}  // namespace tessera::nn
