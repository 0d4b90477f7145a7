#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

namespace tessera::pipeline {

/// The two ends of a model that share a parameter.
enum class End { First, Last };

/// A parameter that the first and the last stage both use (an embedding that the head shares), and of which each holds a copy with the same values. Each copy's
/// gradient is one term.
///
/// Where other ranks hold the last stage, sum() makes both gradients the sum of the two, the same bits at both ends, so the same update keeps the copies equal;
/// a norm counts the first stage's alone (nn::counted_once). Where one rank holds both ends (the turn of a V), the last stage's copy follows (nn::set_follows):
/// the first stage's alone has the sum, an optimizer's state, and a place in checkpoints, and follow() hands on what an update has made of it. One tensor for
/// both would need neither, but each stage is sharded and synchronized by itself, in units and at times of its own, to which a gradient has to belong.
///
/// What a rank holds of its copy (what it updates in the parameter's place) is a slice, and the slices of the two ends need not lie alike: sharding cuts
/// each stage by itself. Each rank tells the others once which elements it has; from then on ranks send each other the elements that both have.
///
///   traffic   a rank sends the slice that it holds once a step, in one message to each rank at the other end that has some of it; nothing to itself
///   memory    a slice as it leaves, and one as it comes
class TiedCopies {
 public:
  struct Copy {
    End end;
    at::Tensor tensor;  ///< the parameter, or what is updated in its place; with its slice set
  };

  /// Collective over `ranks`: those that hold stages, with those over which slices are cut. `copies`: this rank's, none in the middle. `last_follows`: one rank
  /// holds both ends.
  TiedCopies(comm::Group ranks, const std::vector<Copy>& copies, bool last_follows);

  /// Once a step, when the gradients have met over the data ranks. Collective over the ranks that have copies.
  void sum();

  /// Behind each update; nothing where both copies are updated. Collective as sum().
  void follow();

 private:
  /// Elements that a copy of ours shares with one at the other end.
  struct Exchange {
    size_t copy;
    int peer;
    std::vector<std::pair<int64_t, int64_t>> runs;  ///< first element of the local slice, and how many
    int64_t numel = 0;
  };
  /// Which tensor of a copy is meant: its values, or its gradient.
  using Which = std::function<at::Tensor(const at::Tensor& tensor)>;

  /// What the ends that send have of `which`, in the order of the exchanges in which this rank receives; undefined where it does not.
  std::vector<at::Tensor> pass(const std::vector<End>& senders, const Which& which) const;

  comm::Group ranks_;
  std::vector<Copy> copies_;
  bool last_follows_;
  std::vector<Exchange> exchanges_;
};

}  // namespace tessera::pipeline
