#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/layout/slice.h"
#include "tessera/pipeline/channels.h"

namespace tessera::pipeline {

/// Copies of one parameter that several stages use (an embedding that the head shares), each on ranks of its own, with the same values. Each copy's gradient is
/// one term.
///
/// sum() makes all gradients the sum of the terms, added from the last holder's to the first one's, the same bits on each; so the same update keeps the copies
/// equal. Whoever takes a norm counts the first holder's alone. Where one rank holds the first stage and the last (the turn of a V) and each is sharded and
/// synchronized by itself, in units and at times of its own, to which a gradient has to belong, the last copy follows (nn::set_follows): the first one alone
/// has the sum, an optimizer's state, and a place in checkpoints, and follow() hands on what an update has made of it.
///
/// What a rank holds of its copy (what it updates in the parameter's place) is a slice, and the slices of two holders need not lie alike: sharding cuts each
/// stage by itself. Each rank tells the others once which elements it has; from then on ranks send each other the elements that both have.
///
///   traffic   a rank sends the slice that it holds once a step to each other holder, in one message to each of its ranks that has some of it; nothing to
///             itself. Once 264 bytes a rank and holder
///   memory    a slice as it leaves, and one as it comes of each other holder; one more where parts lie at different offsets
class TiedCopies {
 public:
  struct Copy {
    int holder;         ///< which of those that share the parameter: 0 the first stage's
    at::Tensor tensor;  ///< the parameter, or what is updated in its place; with its slice set
  };

  /// What `rank` has of the copy of `holder`; nothing where that is none of its.
  using Answer = std::function<std::optional<Slice>(int rank, int holder)>;

  /// Collective over `ranks`: those that hold stages, with those over which slices are cut. `copies`: this rank's, none where its stages do not use the
  /// parameter. `last_follows`: of two holders, each on the same ranks as the other. `answer`: for a dry run, where nobody answers, what the ranks would.
  TiedCopies(Channels ranks, int holders, std::vector<Copy> copies, bool last_follows = false, const Answer& answer = {});

  /// Throws ConfigError, on every rank, unless each element of a copy lies on one rank of each other holder: where slices are cut over more ranks than these,
  /// or replicas are among them.
  void check_complete(const std::string& name) const;

  /// What `rank` exchanges for its copies: of each message, or of what stays on it (below zero), the elements and their runs. Ranks of which that is equal move
  /// and hold as much.
  std::vector<int64_t> exchanged_by(int rank) const;

  /// Once a step, when the gradients have met over the data ranks. Collective over the ranks that have copies.
  void sum();

  /// The same in two moments, for steps that update in their midst: start_sum() sends the terms of this rank's copies as they are, finish_sum() receives those
  /// of the others and adds to what the gradients are then. Sums are finished in the order in which they were started, several may be under way. `ranks` has to
  /// be of their own: messages are in no order with the schedule's.
  void start_sum();
  void finish_sum();

  /// Behind each update; nothing where all copies are updated. Collective as sum().
  void follow();

 private:
  /// First element and how many: of the logical tensor, or of a local one.
  using Runs = std::vector<std::pair<int64_t, int64_t>>;
  /// Elements that a copy of ours shares with one of another holder.
  struct Exchange {
    size_t copy;
    int peer, holder;  ///< which rank, and whose copy it has
    Runs runs;         ///< of our local slice, in the order of the logical tensor
    int64_t numel = 0;
  };
  /// On their way, by exchange; undefined where nothing is.
  struct Messages {
    std::vector<at::Tensor> leaving, coming;
    std::vector<comm::Pending> pending;
  };
  /// Which tensor of a copy is meant: its values, or its gradient.
  using Which = std::function<at::Tensor(const at::Tensor& tensor)>;

  Runs shared_runs(int rank, int own, int peer, int other) const;
  bool has_terms() const;
  bool gives(int holder) const { return !last_follows_ || holder == 1; }
  void pack(Messages& messages, const std::function<bool(int holder)>& giving, const Which& which) const;
  void make_room(Messages& messages, const std::function<bool(int holder)>& giving, const Which& which) const;
  void post(Messages& messages, bool sends, bool receives) const;
  void wait(Messages& messages) const;
  at::Tensor from(const Messages& messages, size_t copy, int holder) const;
  void add(const Messages& messages) const;

  Channels ranks_;
  int holders_;
  std::vector<Copy> copies_;
  bool last_follows_;
  int64_t late_updates_ = 0;  ///< of the first copy, that the last has followed
  at::Tensor table_;          ///< of each rank and holder, which elements
  std::vector<Exchange> exchanges_;
  std::deque<Messages> under_way_;
};

}  // namespace tessera::pipeline
