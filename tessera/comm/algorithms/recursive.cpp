#include <algorithm>

#include "tessera/comm/algorithms/families.h"

// In step k a rank exchanges with the one whose position differs in bit k: data of n ranks cannot meet in fewer steps. Both partners add the same two terms,
// and addition commutes, so all ranks get the same bits. Where halves are dealt (halving, gathering) the bits are taken in the order in which what a rank holds
// stays one run of chunks: a message is one piece of memory. That needs a power of two. The other ranks are folded in: a guest hands its part to its neighbor
// before and gets the result after, which is two steps more. Neighbors and not the last ranks are paired, so that what a position answers for, its guest
// included, is a run of ranks too.

namespace tessera::comm::families::recursive {
namespace {

// How n ranks become p: of the first 2 (n - p), each even one (the guest) leaves its part to the next odd one (its host) and waits.
struct Fold {
  explicit Fold(int ranks) : n(ranks), p(1 << log2_floor(ranks)), guests(n - p) {}

  bool is_guest(int rank) const { return rank < 2 * guests && rank % 2 == 0; }
  bool is_host(int rank) const { return rank < 2 * guests && rank % 2 == 1; }
  int position(int rank) const { return rank < 2 * guests ? rank / 2 : rank - guests; }  // among the p
  int rank_at(int position) const { return position < guests ? 2 * position + 1 : position + guests; }
  int before() const { return guests > 0 ? 1 : 0; }  // steps
  int levels() const { return log2_floor(p); }

  // What the ranks at these positions answer for, guests included: contiguous.
  std::vector<int> ranks_at(int begin, int end) const {
    const int first = begin < guests ? 2 * begin : begin + guests;
    return range(first, end - 1 < guests ? 2 * end : end + guests);
  }

  int n, p, guests;
};

// A guest's two rows and its host's: `given` goes before, `returned` comes back after step `last`.
void receive_guest(const Fold& fold, int rank, const std::vector<int>& given, bool reduce, Rows& rows) {
  if (fold.is_guest(rank)) rows.push_back({.step = 0, .send_to = rank + 1, .send = given});
  if (fold.is_host(rank)) rows.push_back({.step = 0, .receive_from = rank - 1, .receive = given, .reduce = reduce});
}

void return_to_guest(const Fold& fold, int rank, const std::vector<int>& returned, int step, Rows& rows) {
  if (fold.is_guest(rank)) rows.push_back({.step = step, .receive_from = rank + 1, .receive = returned});
  if (fold.is_host(rank)) rows.push_back({.step = step, .send_to = rank - 1, .send = returned});
}

std::vector<int> without(std::vector<int> chunks, int chunk) {
  std::erase(chunks, chunk);
  return chunks;
}

}  // namespace

int one_chunk(const MessagePlanRequest&) { return 1; }

Rows doubling_all_reduce(const MessagePlanRequest& request, int rank) {
  const Fold fold(request.ranks);
  Rows rows;
  receive_guest(fold, rank, {0}, true, rows);
  for (int level = 0; level < fold.levels() && !fold.is_guest(rank); ++level) {
    const int partner = fold.rank_at(fold.position(rank) ^ (1 << level));
    rows.push_back({.step = fold.before() + level, .send_to = partner, .send = {0}, .receive_from = partner, .receive = {0}, .reduce = true});
  }
  return_to_guest(fold, rank, {0}, fold.before() + fold.levels(), rows);
  return rows;
}

MessagePlanCost doubling_all_reduce_cost(const MessagePlanRequest& request) {
  const Fold fold(request.ranks);
  return {fold.levels() + 2 * fold.before(), fold.levels() + fold.before()};
}

int halving_chunks(const MessagePlanRequest& request) { return Fold(request.ranks).p; }

// Rabenseifner's: halves of halves are reduced until each of p positions owns its chunk, then the way back gathers them.
Rows halving_doubling(const MessagePlanRequest& request, int rank) {
  const Fold fold(request.ranks);
  const auto all = range(0, fold.p);
  Rows rows;
  receive_guest(fold, rank, all, true, rows);
  for (int level = 0; level < 2 * fold.levels() && !fold.is_guest(rank); ++level) {
    const bool halving = level < fold.levels();
    const int distance = halving ? fold.p >> (level + 1) : 1 << (level - fold.levels());
    const int position = fold.position(rank), mine = position / distance * distance, theirs = mine ^ distance;
    const auto my_block = range(mine, mine + distance), their_block = range(theirs, theirs + distance);
    const int partner = fold.rank_at(position ^ distance);
    rows.push_back({.step = fold.before() + level,
                    .send_to = partner,
                    .send = halving ? their_block : my_block,
                    .receive_from = partner,
                    .receive = halving ? my_block : their_block,
                    .reduce = halving});
  }
  return_to_guest(fold, rank, all, fold.before() + 2 * fold.levels(), rows);
  return rows;
}

MessagePlanCost halving_doubling_cost(const MessagePlanRequest& request) {
  const Fold fold(request.ranks);
  return {2 * fold.levels() + 2 * fold.before(), 2 * (fold.p - 1) + (fold.guests > 0 ? fold.p : 0)};
}

Rows doubling_all_gather(const MessagePlanRequest& request, int rank) {
  const Fold fold(request.ranks);
  Rows rows;
  receive_guest(fold, rank, {rank / 2 * 2}, false, rows);
  for (int level = 0; level < fold.levels() && !fold.is_guest(rank); ++level) {
    const int distance = 1 << level, position = fold.position(rank), mine = position / distance * distance, theirs = mine ^ distance;
    const int partner = fold.rank_at(position ^ distance);
    rows.push_back({.step = fold.before() + level,
                    .send_to = partner,
                    .send = fold.ranks_at(mine, mine + distance),
                    .receive_from = partner,
                    .receive = fold.ranks_at(theirs, theirs + distance)});
  }
  return_to_guest(fold, rank, without(range(0, fold.n), rank / 2 * 2), fold.before() + fold.levels(), rows);
  return rows;
}

// Most is sent at position 0, whose blocks hold the most guests.
MessagePlanCost doubling_all_gather_cost(const MessagePlanRequest& request) {
  const Fold fold(request.ranks);
  int64_t sent = fold.guests > 0 ? fold.n - 1 : 0;
  for (int level = 0; level < fold.levels(); ++level) sent += (1 << level) + std::min(1 << level, fold.guests);
  return {fold.levels() + 2 * fold.before(), sent};
}

Rows halving_reduce_scatter(const MessagePlanRequest& request, int rank) {
  const Fold fold(request.ranks);
  Rows rows;
  receive_guest(fold, rank, range(0, fold.n), true, rows);
  for (int level = 0; level < fold.levels() && !fold.is_guest(rank); ++level) {
    const int distance = fold.p >> (level + 1), position = fold.position(rank), mine = position / distance * distance, theirs = mine ^ distance;
    const int partner = fold.rank_at(position ^ distance);
    rows.push_back({.step = fold.before() + level,
                    .send_to = partner,
                    .send = fold.ranks_at(theirs, theirs + distance),
                    .receive_from = partner,
                    .receive = fold.ranks_at(mine, mine + distance),
                    .reduce = true});
  }
  return_to_guest(fold, rank, {rank / 2 * 2}, fold.before() + fold.levels(), rows);
  return rows;
}

MessagePlanCost halving_reduce_scatter_cost(const MessagePlanRequest& request) {
  const Fold fold(request.ranks);
  return {fold.levels() + 2 * fold.before(), fold.guests > 0 ? fold.n : fold.n - 1};
}

}  // namespace tessera::comm::families::recursive
