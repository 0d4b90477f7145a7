// A schedule for measured costs and a limit of activations (arXiv:2401.10241, section 3), by list scheduling: ranks are followed through time, and one that is
// free takes a backward, a forward or the gradient of some weights as a policy says. No policy is best for all costs, so a grid of them is simulated, ZB-H1 and
// ZB-H2 among them, and the order with the shortest span wins.

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Policy {
  double ahead = 2;       ///< forwards that may run ahead of a rank's backwards, for each rank behind it
  int more_ahead = 0;     ///< and for every rank
  bool in_turns = false;  ///< a forward follows a backward where both could run; otherwise backwards go first
  double patience = 0;    ///< how much of its own cost a gradient of weights has to fit into, before what is known to arrive
  double lag = 0;         ///< how many gradients of weights a rank leaves for later, for each rank before it
  int lazy_first = 0;     ///< that many first micro-batches leave as many as there is memory for: backwards return early
  int lazy_last = 0;      ///< that many last ones too: their gradients of weights fill the end, where forwards are lacking
};

/// What a rank has done and what has reached it.
struct RankState {
  double free = 0;
  std::vector<double> input, gradient;  ///< when they arrive, per micro-batch; kNever as long as nobody knows
  int forwards = 0, backwards = 0, weights = 0;
  int weights_in_a_row = 0;
  bool last_was_forward = false;
};

class ListScheduling {
 public:
  ListScheduling(int ranks, int micro_batches, const Costs& costs, const MemoryLimit& limit, const Policy& policy)
      : costs_(costs), policy_(policy), limit_(limit), micro_batches_(micro_batches), ranks_(ranks), lists_(ranks, detail::ListBuilder(micro_batches)) {
    for (auto& rank : ranks_) {
      rank.input.assign(micro_batches, kNever);
      rank.gradient.assign(micro_batches, kNever);
    }
    ranks_.front().input.assign(micro_batches, 0);
  }

  std::vector<RankActions> run() {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) wake(rank, 0);
    while (!wakes_.empty()) {
      const auto [time, rank] = wakes_.top();
      wakes_.pop();
      if (time >= ranks_[rank].free) decide(rank, time);
    }
    std::vector<RankActions> actions;
    for (auto& list : lists_) actions.push_back(list.actions());
    return actions;
  }

 private:
  void wake(int rank, double time) { wakes_.emplace(std::max(time, ranks_[rank].free), rank); }

  double cost(Kind kind, int rank) const { return duration({.kind = kind, .stage = rank}, costs_); }

  int most_ahead(int rank) const {
    const double ahead = policy_.ahead * static_cast<double>(ranks_.size() - 1 - rank) + policy_.more_ahead;
    return 1 + static_cast<int>(std::min<double>(ahead, micro_batches_));
  }

  void decide(int rank, double now) {
    RankState& state = ranks_[rank];
    const int left = state.backwards - state.weights;
    const double held = state.forwards - state.backwards + limit_.kept * left;
    const bool room = held + 1 <= limit_.micro_batches + 1e-9 && state.forwards - state.backwards < most_ahead(rank);
    const double forward = state.forwards < micro_batches_ && room ? state.input[state.forwards] : kNever;
    const double backward = state.backwards < micro_batches_ ? state.gradient[state.backwards] : kNever;
    const bool lazy = state.backwards <= policy_.lazy_first || state.backwards > micro_batches_ - policy_.lazy_last;
    // Two for each backward at most: what was left in the first phase is not made good in one go, for which all others would wait.
    if (!lazy && left > static_cast<int>(policy_.lag * rank) && state.weights_in_a_row < 2) return run_weights(rank, now);
    const bool forward_first = policy_.in_turns && !state.last_was_forward;
    if (backward <= now && !(forward_first && forward <= now)) return run_backward(rank, now);
    if (forward <= now) return run_forward(rank, now);
    const double next = std::min(forward, backward);
    if (left > 0 && next - now >= policy_.patience * cost(Kind::BackwardWeight, rank)) return run_weights(rank, now);
    if (next < kNever) wake(rank, next);
  }

  double occupy(int rank, double now, double seconds) {
    ranks_[rank].free = now + seconds;
    wake(rank, ranks_[rank].free);
    return ranks_[rank].free;
  }

  void run_forward(int rank, double now) {
    const int micro_batch = ranks_[rank].forwards++;
    ranks_[rank].last_was_forward = true;
    lists_[rank].forward(rank);
    const double end = occupy(rank, now, cost(Kind::Forward, rank));
    if (rank + 1 == static_cast<int>(ranks_.size())) {
      arrive(rank, ranks_[rank].gradient[micro_batch], end);
    } else {
      arrive(rank + 1, ranks_[rank + 1].input[micro_batch], end + costs_.communication);
    }
  }

  void run_backward(int rank, double now) {
    const int micro_batch = ranks_[rank].backwards++;
    ranks_[rank].last_was_forward = false;
    ranks_[rank].weights_in_a_row = 0;
    lists_[rank].backward_input(rank);
    const double end = occupy(rank, now, cost(Kind::BackwardInput, rank));
    if (rank > 0) arrive(rank - 1, ranks_[rank - 1].gradient[micro_batch], end + costs_.communication);
  }

  void run_weights(int rank, double now) {
    ++ranks_[rank].weights;
    ++ranks_[rank].weights_in_a_row;
    lists_[rank].weights();
    occupy(rank, now, cost(Kind::BackwardWeight, rank));
  }

  void arrive(int rank, double& slot, double time) {
    slot = time;
    wake(rank, time);
  }

  const Costs& costs_;
  const Policy& policy_;
  MemoryLimit limit_;
  int micro_batches_;
  std::vector<RankState> ranks_;
  std::vector<detail::ListBuilder> lists_;
  std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>> wakes_;
};

/// The best schedule seen so far, by the span of its longest rank, then by its makespan.
class Best {
 public:
  explicit Best(const Costs& costs) : costs_(costs) {}

  bool offer(Schedule schedule) {
    const auto measures = measure(schedule, simulate(schedule, costs_));
    const auto price = std::pair(measures.span_bubble_rate, measures.makespan);
    if (!schedule_.actions.empty() && price >= price_) return false;
    schedule_ = std::move(schedule);
    price_ = price;
    return true;
  }
  const Schedule& schedule() const { return schedule_; }

 private:
  const Costs& costs_;
  Schedule schedule_;
  std::pair<double, double> price_;
};

}  // namespace

Schedule automatic(int ranks, int micro_batches, const Costs& costs, const MemoryLimit& limit, const char* name) {
  detail::check_counts(name, ranks, micro_batches);
  require_of("memory_limit", limit.micro_batches >= 1, name, ": memory_limit = ", limit.micro_batches,
             ": a rank holds at least one micro-batch; take 1 or more");
  require_of("kept", limit.kept > 0 && limit.kept <= 1, name, ": kept = ", limit.kept, ": a share of a micro-batch's activations, more than 0 and at most 1");
  for (const size_t stages : {costs.scale.size(), costs.stages.size()})
    require(stages == 0 || stages == static_cast<size_t>(ranks), name, ": costs of ", stages, " stages for ", ranks,
            " ranks, which have one stage each; give costs of ", ranks, " stages, such as those of a run with pipeline.virtual_stages = 1");
  Best best(costs);
  if (limit.micro_batches >= std::min(ranks, micro_batches)) best.offer(zb_h1(ranks, micro_batches));
  if (limit.micro_batches >= std::min(2 * ranks - 1, micro_batches)) best.offer(zb_h2(ranks, micro_batches));
  Policy policy;
  const auto try_policy = [&] {
    Schedule schedule{.name = "", .micro_batches = micro_batches, .rank_of = loop_placement(ranks, 1), .actions = {}};
    schedule.actions = ListScheduling(ranks, micro_batches, costs, limit, policy).run();
    return best.offer(std::move(schedule));
  };
  // One number of the policy after the other, each kept at its best.
  const auto settle = [&](auto& number, std::initializer_list<std::remove_reference_t<decltype(number)>> values) {
    auto kept = number;
    for (const auto value : values) {
      number = value;
      if (try_policy()) kept = value;
    }
    number = kept;
  };
  for (int round = 0; round < 2; ++round) {
    settle(policy.ahead, {1.0, 1.5, 2.0, 3.0, 1e9});
    settle(policy.lazy_last, {0, ranks / 2, ranks, ranks * 3 / 2, ranks * 2, ranks * 3, micro_batches});
    settle(policy.lazy_first, {0, ranks / 2, ranks, ranks * 3 / 2, ranks * 2, ranks * 3});
    settle(policy.lag, {0.0, 0.5, 1.0, 2.0});
    settle(policy.more_ahead, {0, 1, 2});
    settle(policy.in_turns, {false, true});
    settle(policy.patience, {0.0, 0.5, 1.0});
  }
  Schedule schedule = best.schedule();
  schedule.name = name;
  return schedule;
}

}  // namespace tessera::schedules
