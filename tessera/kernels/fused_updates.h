#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// While it lives, libtorch's fused operators for AdamW and SGD (`_fused_adamw_`, `_fused_sgd_`) run loops of ours on a CPU, for what calls them on this
/// thread:
/// - An element's bits depend on its numbers alone. Libtorch's round the elements behind the last whole vector otherwise, so that a weight of which two ranks
///   hold other parts (a tied one on the first and on the last stage of a pipeline, in stage 3) would not stay one weight.
/// - Momentum in 16 bits is right: that of libtorch 2.13 is not (torch._fused_sgd_ of 64 bf16 elements is off by as much as is in the buffer).
/// Of AdamW fp32 and fp64; of SGD fp64, fp32, bf16 and fp16, computed in fp32 where they are narrower; what else is asked for (amsgrad, Nesterov, a scale of
/// gradients, tensors that lie differently or with gaps) stays libtorch's, as do other devices, whose kernels go element by element.
/// Traffic of fp32: AdamW 28 bytes an element, SGD 12, with momentum 20; one pass.
class UpdatesByElement {
 public:
  /// What AdamW of fp32 and fp64 does in the same pass, for which the operator has no argument; whoever asks for it gives tensors that are ours (above). Of
  /// fp32 gradients may then be bf16 or fp16.
  struct Besides {
    double gradient_scale = 1;                        ///< gradients are read times this
    const std::vector<at::Tensor>* copies = nullptr;  ///< of fp32, one for each parameter, or undefined: bf16 or fp16, which follow it (adamw_)
  };

  UpdatesByElement() : UpdatesByElement(Besides{}) {}
  explicit UpdatesByElement(const Besides& besides);
  ~UpdatesByElement();
  UpdatesByElement(const UpdatesByElement&) = delete;
  UpdatesByElement& operator=(const UpdatesByElement&) = delete;

 private:
  const Besides besides_;
  const Besides* former_;
};

}  // namespace tessera::kernels
