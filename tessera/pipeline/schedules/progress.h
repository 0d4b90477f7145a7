#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/events.h"

namespace tessera::schedules::detail {

/// Ranks that carry out their lists without time: each goes on as far as it can, until all are at their ends or nobody moves.
class Progress {
 public:
  Progress(const Schedule& schedule, Messages messages);

  /// What keeps the ranks from their ends, if anything does.
  std::optional<Problem> run();

 private:
  using Pair = std::pair<int, int>;
  /// Sends and receives between two ranks, as each of the two began them.
  struct Line {
    std::vector<Event> begun[2];
    size_t completed = 0;
  };

  bool at_end(int rank) const { return position_[rank] == schedule_.actions[rank].size(); }
  const Action& current(int rank) const { return schedule_.actions[rank][position_[rank]]; }
  bool is_there(const Event& event) const { return there_[index_(event)]; }
  std::optional<Event> missing(const Action& action) const;
  bool advance(int rank);
  bool meet(int rank);
  void post(int rank, const Action& message);
  void finish(int rank);
  std::optional<Problem> out_of_order() const;
  int waits_for(int rank, const Event& missing) const;
  Problem circle(int rank) const;

  const Schedule& schedule_;
  Messages messages_;
  bool through_messages_;
  EventIndex index_;
  std::vector<bool> there_;
  std::vector<size_t> position_;
  std::map<Pair, Line> lines_;
};

}  // namespace tessera::schedules::detail
