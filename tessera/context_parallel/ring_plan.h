#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/nn/attention_tiles.h"

namespace tessera::context {

/// What one place of a ring does while one block of keys and values is with it. Places are numbered round the ring; each sends to the next.
struct RingStep {
  int block = 0;                         ///< of which place
  std::vector<nn::AttentionTile> tiles;  ///< what its queries see of them; none: the block only passes
  bool keys_go_on = false;               ///< to the next place while the step is computed, and the next step's block comes from the place before
  // Backward, which goes through the same steps: gradients of the block's keys and values.
  bool sum_comes = false;    ///< what the places before have summed, from the place before
  bool sum_goes_on = false;  ///< with this place's share, to `sum_to`; for its owner that is the whole of what others add
  int sum_to = -1;           ///< the next place, and in the last step the owner; -1: it goes nowhere
  int own_comes_from = -1;   ///< in the last step: the place that sends the sum of this place's own block; -1: nobody does

  int64_t pairs() const;  ///< of a query and a key that it sees: the work
};

/// The steps of `place` in a ring of columns.size() places, of which each holds queries and keys of its `columns`. Blocks go round by n - 1 hops, and the sums
/// of their gradients by n - 1, the last one home: an owner's own share never travels. Where no place has anything within reach of a block that has come so
/// far, as with a window and one part of the sequence each, the ring ends: after h steps blocks have gone h hops, and their sums h, the last one straight home.
/// Documents, which a dry run does not know, end nothing.
std::vector<RingStep> ring_plan(const std::vector<nn::AttentionColumns>& columns, int place, const nn::AttentionReach& reach);

/// A picture (SVG) of all places' steps: which block is where, how much of it is seen, what is on its way.
std::string ring_picture(const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach, const std::string& title);

}  // namespace tessera::context
