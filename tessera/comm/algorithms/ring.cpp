#include <algorithm>

#include "tessera/comm/algorithms/families.h"

// Every rank sends to one neighbor and hears from the other, so all links of a ring are busy all the time and no byte is sent twice: nothing moves less data.
// The price are n - 1 steps each way, each a latency. A chunk's sum is made in the order of the ring, beginning behind its owner, and then handed around, so
// that all ranks have its bits. For one root the ring is cut open to a chain, through which segments follow one another.

namespace tessera::comm::families {

namespace ring {

int chunks(const MessagePlanRequest& request) { return request.ranks; }

// A chunk starts with its owner's successor and collects its way around, so that it ends with its owner.
Rows reduce_scatter(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int step = 0; step < n - 1; ++step) {
    rows.push_back({.step = step,
                    .send_to = wrap(rank + 1, n),
                    .send = {wrap(rank - 1 - step, n)},
                    .receive_from = wrap(rank - 1, n),
                    .receive = {wrap(rank - 2 - step, n)},
                    .reduce = true});
  }
  return rows;
}

Rows all_gather(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks;
  Rows rows;
  for (int step = 0; step < n - 1; ++step) {
    rows.push_back(
        {.step = step, .send_to = wrap(rank + 1, n), .send = {wrap(rank - step, n)}, .receive_from = wrap(rank - 1, n), .receive = {wrap(rank - 1 - step, n)}});
  }
  return rows;
}

Rows all_reduce(const MessagePlanRequest& request, int rank) { return then(reduce_scatter(request, rank), request.ranks - 1, all_gather(request, rank)); }

MessagePlanCost one_pass_cost(const MessagePlanRequest& request) { return {request.ranks - 1, request.ranks - 1}; }
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request) { return {2 * (request.ranks - 1), 2 * (request.ranks - 1)}; }

int chain_chunks(const MessagePlanRequest& request) { return request.segments; }

// Rank v gets segment j in step v - 1 + j, and passes it on in the next one.
Rows broadcast(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks, v = distance_from_root(request, rank);
  Rows rows;
  for (int step = std::max(v - 1, 0); step < v + request.segments; ++step) {
    const int passes_on = step - v, gets = step - v + 1;
    Transfer row{.step = step};
    if (v > 0 && gets < request.segments) row.receive_from = v - 1, row.receive = {gets};
    if (v < n - 1 && passes_on >= 0) row.send_to = v + 1, row.send = {passes_on};
    if (row.send_to >= 0 || row.receive_from >= 0) rows.push_back(std::move(row));
  }
  return from_root(std::move(rows), request);
}

Rows reduce(const MessagePlanRequest& request, int rank) { return reversed(broadcast(request, rank), chain_cost(request).steps, true); }

MessagePlanCost chain_cost(const MessagePlanRequest& request) { return {request.ranks - 2 + request.segments, request.segments}; }

}  // namespace ring

namespace bidirectional_ring {
namespace {
int reach_right(int n) { return n / 2; }
int reach_left(int n) { return (n - 1) / 2; }
}  // namespace

Rows all_gather(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks, right = wrap(rank + 1, n), left = wrap(rank - 1, n);
  Rows rows;
  for (int step = 0; step < reach_right(n); ++step) {
    rows.push_back({.step = step, .send_to = right, .send = {wrap(rank - step, n)}, .receive_from = left, .receive = {wrap(rank - 1 - step, n)}});
    if (step >= reach_left(n)) continue;  // with an even number of ranks the farthest is served from one side
    rows.push_back({.step = step, .send_to = left, .send = {wrap(rank + step, n)}, .receive_from = right, .receive = {wrap(rank + 1 + step, n)}});
  }
  return rows;
}

// Run backwards, the copies of a chunk that spread from its owner are the partial sums that come home to it.
Rows reduce_scatter(const MessagePlanRequest& request, int rank) { return reversed(all_gather(request, rank), one_pass_cost(request).steps, true); }

Rows all_reduce(const MessagePlanRequest& request, int rank) {
  return then(reduce_scatter(request, rank), one_pass_cost(request).steps, all_gather(request, rank));
}

MessagePlanCost one_pass_cost(const MessagePlanRequest& request) { return {reach_right(request.ranks), request.ranks - 1}; }
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request) { return {2 * reach_right(request.ranks), 2 * (request.ranks - 1)}; }

}  // namespace bidirectional_ring

}  // namespace tessera::comm::families
