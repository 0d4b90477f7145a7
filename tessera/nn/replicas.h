#pragma once

#include <torch/nn/module.h>

#include "tessera/comm/group.h"

namespace tessera {

/// What makes the replicas of a model equal before the first step.
enum class ReplicaStart {
  Check,      ///< compare hashes of all parameters and refuse a difference by parameter and rank
  Broadcast,  ///< rank 0's parameters replace the others'
  Trust,      ///< nothing: whoever made them vouches
};

/// When buffers (BatchNorm's running statistics, tables) are taken from rank 0.
enum class BufferBroadcast { Never, AtStart, EachStep };

/// Applies `start` to the parameters of `module` over `group`. Throws ConfigError: modules of other structure, or parameters of other values, by rank and name.
/// Traffic: Check one all-gather of 3 words per rank (a word per parameter more where it finds a difference); Broadcast every parameter once.
void equalize_replicas(torch::nn::Module& module, const comm::Group& group, ReplicaStart start);

/// Broadcasts the buffers of `module` from rank 0, one message per dtype.
void broadcast_buffers(torch::nn::Module& module, const comm::Group& group);

}  // namespace tessera
