#pragma once

#include <memory>
#include <vector>

#include "tessera/nn/interceptor.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/convert.h"

/// The two linear layers of Megatron-LM (arXiv:1909.08053), as interceptors of nn::Linear.
namespace tessera::tensor_parallel {

/// Cuts the layer's parameters for this rank. `shares`: of the output features (column-wise) or of the input features (row-wise), one a rank.
void cut_columns(nn::LinearImpl& linear, const FeatureShare& share);
void cut_rows(nn::LinearImpl& linear, const FeatureShare& share);

/// y [..., O/t] = x [..., I] weight[part]^T + bias[part]; no communication of its own but that of its layouts (convert.h), or,
/// where the context has Overlap, that of overlap.h, which goes on during the product.
std::shared_ptr<nn::Interceptor> column_parallel(std::shared_ptr<Context> context, const ColumnParallel& style, std::vector<FeatureShare> shares);

/// y [..., O] = sum over ranks of x [..., I/t] weight[:, part]^T, then the bias.
std::shared_ptr<nn::Interceptor> row_parallel(std::shared_ptr<Context> context, const RowParallel& style, std::vector<FeatureShare> shares);

}  // namespace tessera::tensor_parallel
