#pragma once

#include <filesystem>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/group.h"
#include "tessera/config/config.h"

namespace tessera::checkpoint {

/// Collective over `group`: rank 0 writes the logical tensors, put together from every rank's slices, under Hugging Face names and shapes where the family has
/// them, else under ours: so adapters, and what is there of a tensor of theirs of which, beside adapters, a part is not. A target whose tensor is undefined (a
/// parameter that got no gradient) is written as zeros. Slices are named as our parameters. Memory on rank 0: one Hugging Face tensor at a time. Traffic: each
/// stored element at most once, to rank 0. Where rank 0 fails, all ranks throw.
void dump(const std::filesystem::path& file, const ModelConfig& model, const std::vector<SlicedTensor>& tensors, const comm::Group& group);

}  // namespace tessera::checkpoint
