#pragma once

#include <list>
#include <map>
#include <utility>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules::detail {

/// Writes one rank's list where every kind of action takes the micro-batches of a stage in their order, as in every schedule here: only kind and stage need to
/// be said. Micro-batches beyond the last are left out, so that an order made for more of them serves fewer too.
class ListBuilder {
 public:
  explicit ListBuilder(int micro_batches) : micro_batches_(micro_batches) {}

  void forward(int stage) { add(Kind::Forward, stage, forwards_[stage]++); }
  void backward(int stage) { add(Kind::Backward, stage, backwards_[stage]++); }
  void backward_input(int stage) {
    const int micro_batch = backwards_[stage]++;
    add(Kind::BackwardInput, stage, micro_batch);
    pending_.emplace_back(stage, micro_batch);
  }
  /// The oldest gradient of weights that is left, if any: of any stage, or of one.
  void weights() {
    if (!pending_.empty()) weights(pending_.begin());
  }
  void weights(int stage) {
    for (auto it = pending_.begin(); it != pending_.end(); ++it) {
      if (it->first == stage) return weights(it);
    }
  }
  void all_weights() {
    while (!pending_.empty()) weights();
  }
  /// A forward and a backward that run together.
  void overlap(int forward_stage, int backward_stage) {
    actions_.push_back({.kind = Kind::Overlap,
                        .stage = forward_stage,
                        .micro_batch = forwards_[forward_stage]++,
                        .backward_stage = backward_stage,
                        .backward_micro_batch = backwards_[backward_stage]++});
  }

  /// How many are done, those left out among them.
  int forwards(int stage) { return forwards_[stage]; }
  int backwards(int stage) { return backwards_[stage]; }
  const RankActions& actions() const { return actions_; }

 private:
  using Pending = std::list<std::pair<int, int>>;  // stage, micro-batch

  void add(Kind kind, int stage, int micro_batch) {
    if (micro_batch < micro_batches_) actions_.push_back({.kind = kind, .stage = stage, .micro_batch = micro_batch});
  }
  void weights(Pending::iterator it) {
    add(Kind::BackwardWeight, it->first, it->second);
    pending_.erase(it);
  }

  int micro_batches_;
  std::map<int, int> forwards_, backwards_;
  Pending pending_;
  RankActions actions_;
};

/// Throws ConfigError for a number of ranks, micro-batches or chunks below 1, or more of them than anybody draws.
void check_counts(const char* name, int ranks, int micro_batches, int chunks = 1);

}  // namespace tessera::schedules::detail
