#include "tessera/comm/algorithms/simulate.h"

#include <algorithm>
#include <map>

#include "tessera/core/error.h"

// Numbers would prove little: they may be equal by chance, and floats hide another order. So ranks hold symbols: each contribution is a leaf, a sum is a node
// that is found again by its two operands (hash-consing), and two ranks hold the same number exactly where they made the same additions. Operands are taken as
// a set, for floating-point addition commutes bit by bit and does not associate. Sends of a step read what was held before it, as they do where everything is
// posted at once.

namespace tessera::comm {
namespace {

// Sums as expressions: equal numbers mean the same additions, whichever operand stood first.
class Expressions {
 public:
  explicit Expressions(int ranks) : ranks_(ranks) {}

  // What a rank brought along; `part` tells apart what it brought for several.
  int leaf(int rank, int part) { return find({-1 - rank, part}, {rank}); }

  int sum(int a, int b) {
    const auto key = std::minmax(a, b);
    std::vector<int> both;
    std::merge(nodes_[a].ranks.begin(), nodes_[a].ranks.end(), nodes_[b].ranks.begin(), nodes_[b].ranks.end(), std::back_inserter(both));
    const auto twice = std::adjacent_find(both.begin(), both.end());
    invariant(twice == both.end(), "rank ", twice == both.end() ? 0 : *twice, " is added twice");
    return find({key.first, key.second}, std::move(both));
  }

  bool complete(int node) const { return static_cast<int>(nodes_[node].ranks.size()) == ranks_; }
  std::string text(int node, bool outermost = true) const {
    const auto [a, b] = nodes_[node].operands;
    if (a < 0) return std::to_string(-1 - a);
    const auto inside = text(a, false) + "+" + text(b, false);
    return outermost ? inside : "(" + inside + ")";
  }

 private:
  struct Node {
    std::pair<int, int> operands;
    std::vector<int> ranks;  // that are in it, sorted
  };

  int find(std::pair<int, int> operands, std::vector<int> ranks) {
    const auto [place, is_new] = numbers_.emplace(operands, static_cast<int>(nodes_.size()));
    if (is_new) nodes_.push_back({operands, std::move(ranks)});
    return place->second;
  }

  int ranks_;
  std::vector<Node> nodes_;
  std::map<std::pair<int, int>, int> numbers_;
};

constexpr int kNothing = -1;

class Run {
 public:
  Run(const MessagePlan& plan, int64_t elements)
      : plan_(plan), op_(plan.request.op), n_(plan.request.ranks), expressions_(n_), held_(n_, std::vector<int>(plan.chunks, kNothing)) {
    for (int chunk = 0; chunk < plan.chunks; ++chunk) sizes_.push_back(chunk_extent(plan.request, plan.chunks, elements, chunk).second);
    for (int rank = 0; rank < n_; ++rank) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk) held_[rank][chunk] = begins_with(rank, chunk);
      known_.push_back({rank});
    }
    result_.sent_elements.assign(n_, 0);
    result_.messages.assign(n_, 0);
  }

  Simulation operator()() {
    std::vector<size_t> next(n_, 0);
    for (int step = 0; std::any_of(next.begin(), next.end(), [&, rank = 0](size_t at) mutable { return at < plan_.rows[rank++].size(); }); ++step) {
      std::vector<std::vector<const Transfer*>> rows(n_);
      for (int rank = 0; rank < n_; ++rank) {
        const auto& all = plan_.rows[rank];
        for (; next[rank] < all.size() && all[next[rank]].step <= step; ++next[rank]) {
          invariant(all[next[rank]].step == step, "rank ", rank, ": the rows are not in the order of their steps");
          rows[rank].push_back(&all[next[rank]]);
        }
      }
      run_step(step, rows);
    }
    check_end();
    return std::move(result_);
  }

 private:
  struct Message {
    const std::vector<int>* chunks;
    std::vector<int> contents;
  };

  int begins_with(int rank, int chunk) {
    if (op_ == "all_to_all") return expressions_.leaf(rank, (rank + chunk) % n_);
    if (op_ == "all_gather" || op_ == "gather") return rank == chunk ? expressions_.leaf(rank, 0) : kNothing;
    if (op_ == "broadcast" || op_ == "scatter") return rank == plan_.request.root ? expressions_.leaf(rank, chunk) : kNothing;
    return expressions_.leaf(rank, chunk);
  }

  void run_step(int step, const std::vector<std::vector<const Transfer*>>& rows) {
    std::map<std::pair<int, int>, std::vector<Message>> sent;  // by sender and receiver
    auto known = known_;
    for (int rank = 0; rank < n_; ++rank) {
      for (const auto* row : rows[rank]) {
        if (row->send_to < 0) continue;
        invariant(row->send_to != rank && row->send_to < n_, "step ", step, ": rank ", rank, " sends to ", row->send_to);
        sent[{rank, row->send_to}].push_back(post(step, rank, *row));
        result_.steps = step + 1;
      }
    }
    for (int rank = 0; rank < n_; ++rank) {
      std::map<int, bool> touched;  // chunks received in this step; whether added
      for (const auto* row : rows[rank]) {
        if (row->receive_from < 0) continue;
        auto& queue = sent[{row->receive_from, rank}];
        invariant(!queue.empty(), "step ", step, ": rank ", rank, " receives from ", row->receive_from, ", which sends nothing to it");
        invariant(*queue.front().chunks == row->receive, "step ", step, ": rank ", rank, " expects other chunks than rank ", row->receive_from, " sends");
        take(step, rank, *row, queue.front(), touched);
        if (op_ == "barrier") known[rank].insert(known[rank].end(), known_[row->receive_from].begin(), known_[row->receive_from].end());
        queue.erase(queue.begin());
      }
      std::sort(known[rank].begin(), known[rank].end());
      known[rank].erase(std::unique(known[rank].begin(), known[rank].end()), known[rank].end());
    }
    for (const auto& [ends, left] : sent) invariant(left.empty(), "step ", step, ": rank ", ends.second, " does not receive what rank ", ends.first, " sends");
    known_ = std::move(known);
  }

  // Contents are those before the step: receives come after all posts.
  Message post(int step, int rank, const Transfer& row) {
    Message message{&row.send, {}};
    for (const int chunk : row.send) {
      invariant(chunk >= 0 && chunk < plan_.chunks && held_[rank][chunk] != kNothing, "step ", step, ": rank ", rank, " sends chunk ", chunk,
                ", which it does not hold");
      message.contents.push_back(held_[rank][chunk]);
      result_.sent_elements[rank] += sizes_[chunk];
    }
    ++result_.messages[rank];
    return message;
  }

  void take(int step, int rank, const Transfer& row, const Message& message, std::map<int, bool>& touched) {
    invariant(!row.reduce || reduces(op_), "step ", step, ": rank ", rank, " adds, in an op that does not");
    for (size_t i = 0; i < row.receive.size(); ++i) {
      const int chunk = row.receive[i];
      const auto [place, first] = touched.emplace(chunk, row.reduce);
      invariant(first || (row.reduce && place->second), "step ", step, ": rank ", rank, " receives chunk ", chunk, " twice");
      auto& held = held_[rank][chunk];
      invariant(!row.reduce || held != kNothing, "step ", step, ": rank ", rank, " adds to chunk ", chunk, ", which it does not hold");
      held = row.reduce ? expressions_.sum(held, message.contents[i]) : message.contents[i];
    }
  }

  void check_end() {
    if (op_ == "barrier") {
      for (int rank = 0; rank < n_; ++rank) invariant(static_cast<int>(known_[rank].size()) == n_, "rank ", rank, " leaves the barrier before all have come");
    }
    for (int chunk = 0; chunk < plan_.chunks; ++chunk) {
      int sum = kNothing;
      for (int rank = 0; rank < n_; ++rank) {
        if (!promised(rank, chunk)) continue;
        const int held = held_[rank][chunk];
        invariant(held != kNothing, "rank ", rank, " ends without chunk ", chunk);
        if (!reduces(op_)) {
          invariant(held == expected(rank, chunk), "rank ", rank, " ends with other data in chunk ", chunk, " than it should");
          continue;
        }
        invariant(expressions_.complete(held), "rank ", rank, " ends with an incomplete sum in chunk ", chunk, ": ", expressions_.text(held));
        invariant(sum == kNothing || sum == held, "rank ", rank, " ends with another order of sums in chunk ", chunk, ": ", expressions_.text(held));
        sum = held;
      }
      if (sum != kNothing) result_.order_of_sums.push_back(expressions_.text(sum));
    }
  }

  bool promised(int rank, int chunk) const {
    if (op_ == "reduce" || op_ == "gather") return rank == plan_.request.root;
    if (op_ == "reduce_scatter" || op_ == "scatter") return rank == chunk;
    return true;
  }

  // Of the ops that only move data.
  int expected(int rank, int chunk) {
    if (op_ == "all_to_all") return expressions_.leaf((rank - chunk + n_) % n_, rank);
    if (op_ == "all_gather" || op_ == "gather") return expressions_.leaf(chunk, 0);
    return expressions_.leaf(plan_.request.root, chunk);
  }

  const MessagePlan& plan_;
  const std::string& op_;
  int n_;
  Expressions expressions_;
  std::vector<std::vector<int>> held_;   // of each rank and chunk
  std::vector<std::vector<int>> known_;  // ranks that each rank has heard of
  std::vector<int64_t> sizes_;
  Simulation result_;
};

}  // namespace

int64_t Simulation::most_sent() const { return sent_elements.empty() ? 0 : *std::max_element(sent_elements.begin(), sent_elements.end()); }

Simulation simulate(const MessagePlan& plan, int64_t elements) { return Run(plan, elements)(); }

}  // namespace tessera::comm
