#include <algorithm>

#include "tessera/comm/algorithms/families.h"

// Bruck's algorithms buy ceil(log2 n) steps for any n, without the guests that recursive doubling has to fold in. For all_gather they are free: what a rank
// holds always is one run of chunks, if wrapped around. For all_to_all a chunk travels once for each one in its distance, about n/2 log2 n chunks instead of n
// - 1: right where latency rules. Chunks of an all_to_all are named by distance, not by rank, so that all ranks have the same rows and the rotations before and
// after of the paper are but names.
// Pairwise meets one partner a step, so that no rank is sent to by several at once, and adds in the order of distance; direct posts all at once, one latency,
// and leaves the crowd to the network.

namespace tessera::comm::families {

namespace bruck {
namespace {

std::vector<int> wrapped(int begin, int count, int n) {
  auto chunks = range(begin, begin + count);
  for (auto& chunk : chunks) chunk = wrap(chunk, n);
  return chunks;
}

// Of the distances 0 .. n - 1, those with this bit.
std::vector<int> with_bit(int bit, int n) {
  std::vector<int> distances;
  for (int distance = 0; distance < n; ++distance) {
    if (distance & bit) distances.push_back(distance);
  }
  return distances;
}

}  // namespace

// What a rank has grows from its own chunk upwards, and doubles in each step.
Rows all_gather(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int step = 0; step < log2_ceil(n); ++step) {
    const int have = 1 << step, count = std::min(have, n - have);
    rows.push_back({.step = step,
                    .send_to = wrap(rank - have, n),
                    .send = wrapped(rank, count, n),
                    .receive_from = wrap(rank + have, n),
                    .receive = wrapped(rank + have, count, n)});
  }
  return rows;
}

MessagePlanCost all_gather_cost(const MessagePlanRequest& request) { return {log2_ceil(request.ranks), request.ranks - 1}; }

// A chunk goes its distance in jumps of powers of two; chunks of the same distance take each other's place.
Rows all_to_all(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int step = 0; step < log2_ceil(n); ++step) {
    const auto chunks = with_bit(1 << step, n);
    rows.push_back({.step = step, .send_to = wrap(rank + (1 << step), n), .send = chunks, .receive_from = wrap(rank - (1 << step), n), .receive = chunks});
  }
  return rows;
}

// The number of ones in the binary digits of 1 .. n - 1.
MessagePlanCost all_to_all_cost(const MessagePlanRequest& request) {
  int64_t sent = 0;
  for (int64_t bit = 1; bit < request.ranks; bit *= 2) sent += request.ranks / (2 * bit) * bit + std::max<int64_t>(0, request.ranks % (2 * bit) - bit);
  return {log2_ceil(request.ranks), sent};
}

int no_chunks(const MessagePlanRequest&) { return 0; }

// After step k a rank knows of the 2^(k+1) - 1 before it.
Rows barrier(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int step = 0; step < log2_ceil(n); ++step) {
    rows.push_back({.step = step, .send_to = wrap(rank + (1 << step), n), .receive_from = wrap(rank - (1 << step), n)});
  }
  return rows;
}

MessagePlanCost barrier_cost(const MessagePlanRequest& request) { return {log2_ceil(request.ranks), 0}; }

}  // namespace bruck

namespace pairs {

// The owner of a chunk collects it: nobody else adds.
Rows reduce_scatter(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int distance = 1; distance < n; ++distance) {
    const int to = wrap(rank + distance, n);
    rows.push_back({.step = distance - 1, .send_to = to, .send = {to}, .receive_from = wrap(rank - distance, n), .receive = {rank}, .reduce = true});
  }
  return rows;
}

Rows all_to_all(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int distance = 1; distance < n; ++distance) {
    rows.push_back(
        {.step = distance - 1, .send_to = wrap(rank + distance, n), .send = {distance}, .receive_from = wrap(rank - distance, n), .receive = {distance}});
  }
  return rows;
}

MessagePlanCost pairwise_cost(const MessagePlanRequest& request) { return {request.ranks - 1, request.ranks - 1}; }

Rows direct_all_to_all(const MessagePlanRequest& request, int rank) {
  auto rows = all_to_all(request, rank);
  for (auto& row : rows) row.step = 0;
  return rows;
}

Rows direct_scatter(const MessagePlanRequest& request, int rank) {
  const int v = distance_from_root(request, rank);
  Rows rows;
  if (v > 0) rows.push_back({.step = 0, .receive_from = 0, .receive = {v}});
  for (int other = 1; other < request.ranks && v == 0; ++other) rows.push_back({.step = 0, .send_to = other, .send = {other}});
  return from_root(std::move(rows), request);
}

Rows direct_gather(const MessagePlanRequest& request, int rank) { return reversed(direct_scatter(request, rank), 1, false); }

MessagePlanCost direct_cost(const MessagePlanRequest& request) { return {1, request.ranks - 1}; }
MessagePlanCost direct_gather_cost(const MessagePlanRequest&) { return {1, 1}; }

}  // namespace pairs

}  // namespace tessera::comm::families
