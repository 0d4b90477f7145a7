#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/activation.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/dispatch.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/vocabulary_parts.h"

/// Every fused operator as a plain composition of ATen operators that autograd differentiates. What `run.kernels = "reference"` runs and what tests compare
/// with.
namespace tessera::kernels::reference {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, std::optional<at::ScalarType> out_dtype = std::nullopt);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      std::optional<at::ScalarType> out_dtype = std::nullopt);
at::Tensor bias_activation(const at::Tensor& x, const at::Tensor& bias, Activation activation);
void add_embedding_gradient_(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row);
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels, const CrossEntropyOptions& options = {});
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                std::optional<at::ScalarType> compute_dtype = std::nullopt, const CrossEntropyOptions& options = {},
                                VocabularyParts* parts = nullptr);
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale = std::nullopt);
at::Tensor choose_experts(const at::Tensor& scores, int64_t k);
Dispatch dispatch(const at::Tensor& chosen, int64_t experts, int64_t capacity, int64_t places);
at::Tensor gather_rows(const at::Tensor& x, const Dispatch& where);
at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& where);
at::Tensor dropout(const at::Tensor& x, double p, uint64_t key, const at::Tensor& rows, FeatureBlock features = {});

}  // namespace tessera::kernels::reference
