#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// What makes the replicas of a model equal before the first step.
enum class ReplicaStart {
  Check,      ///< compare hashes of all parameters and refuse a difference by parameter and rank
  Broadcast,  ///< rank 0's parameters replace the others'
  Trust,      ///< nothing: whoever made them vouches
};

/// When buffers (BatchNorm's running statistics, tables) are taken from rank 0: whatever each rank's own batches made of them, every rank goes on with rank
/// 0's.
enum class BufferBroadcast {
  Never,
  AtStart,   ///< once: for buffers that no step changes
  EachStep,  ///< at the start, and when a step is complete, so that evaluation and checkpoints between steps find the same on all ranks
};

/// Applies `start` to the parameters of `module`, those in `only`, over `group`. Throws ConfigError, in the name of `technique`: modules of other structure, or
/// parameters of other values, by rank and name.
/// Returns whether the parameters lie in memory alike (strides) on all of its ranks, as far as that was asked: not under Trust, which says yes.
/// Traffic: Check one all-gather of 3 words per rank (a word per parameter more where it finds a difference); Broadcast every parameter once; both two words
/// more where they do not lie alike.
bool equalize_replicas(torch::nn::Module& module, const comm::Group& group, ReplicaStart start, const nn::ParameterFilter& only = {},
                       const std::string& technique = "data parallelism");

/// Throws ConfigError, by name and rank, where one of `parameters` is another one on some rank. `reason`: what may be the cause, and the way out; unset:
/// weights that were loaded on some ranks alone, behind the wrapping and before the first step. Traffic: as Check.
void compare_replicas(const std::vector<nn::NamedParameter>& parameters, const comm::Group& group, const std::string& technique,
                      const std::string& reason = {});

/// Of the names, shapes and dtypes of what broadcast_buffers brings: the same on ranks whose messages fit each other.
uint64_t hash_of_buffers(const torch::nn::Module& module);

/// Throws ConfigError, by the first name that differs, where hash_of_buffers is another on some rank of `groups`, taken one after the other (of each rank of
/// the first, its peers in the second): to all their ranks alike. `found`: the ranks know that there is one, and a module without buffers has to say so, too.
/// Traffic: an all-gather of 3 words in each group.
void require_same_buffers(const torch::nn::Module& module, const std::vector<comm::Group>& groups, bool found = false);

/// Broadcasts the buffers of `module`, of the same names, shapes and dtypes on every rank, from rank 0, one message per dtype. One that becomes another by that
/// counts as written in place (a graph that still holds it refuses its backward pass), but for the running statistics (running_mean, running_var,
/// num_batches_tracked) of a module that trains, by which nothing is differentiated then. Throws ConfigError, by name, for one that is not dense.
void broadcast_buffers(torch::nn::Module& module, const comm::Group& group);

}  // namespace tessera
