#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

/// Products of groups of rows with a weight each, block by block of at most 64 x 64 sums in fp32, which stay in cache until they are rounded. The blocks
/// themselves are multiplied by oneDNN, as libtorch offers it (at::native::cpublas::brgemm): a block's program is made once for its shape, where a product of
/// a group would have one made for each number of rows that a group ever has, which takes longer than the product.
///
/// Bits of a row depend on that row and its weight, those of a weight's gradient on its group's rows alone: not on where they lie, nor on threads.
namespace tessera::kernels {

/// Whether `tensor` is multiplied so: fp32 and bf16 on a CPU with AVX-512 (bf16: and its products), and in a dry run that stands for it.
bool multiplies_blocks(const at::Tensor& tensor);

/// Of group e, sizes[e] rows behind those of the groups before: rows x weight[e]^T (`transposed`, weight [E, O, I], rows [N, I]) or rows x weight[e]
/// (rows [N, O]); rows behind the groups are zero. Scratch while it runs, of each thread: 64 columns of a weight, and a block.
at::Tensor multiply_groups(const at::Tensor& rows, const at::Tensor& weight, bool transposed, const std::vector<int64_t>& sizes);

/// left^T right of each group's rows: left [N, O], right [N, I] -> [E, O, I]. Scratch: a copy of right, and of each thread 64 columns of left.
at::Tensor multiply_within_groups(const at::Tensor& left, const at::Tensor& right, const std::vector<int64_t>& sizes);

}  // namespace tessera::kernels
