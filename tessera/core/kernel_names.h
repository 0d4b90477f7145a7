#pragma once

/// Fused operators that a run may choose one by one (`run.kernels`, kernels/choice.h), by the names of their functions: X(name). Norms stand for those of a
/// stream that grows, too. Here, since configurations are checked without libtorch.
#define TESSERA_KERNELS(X)                                                                                                                                    \
  X(attention)                                                                                                                                                \
  X(bias_activation) X(choose_experts) X(combine_rows) X(cross_entropy) X(dispatch) X(dropout) X(embedding_gradient) X(fp32_products) X(gather_rows) X(geglu) \
      X(layer_norm) X(linear_cross_entropy) X(rms_norm) X(rope) X(swiglu)
