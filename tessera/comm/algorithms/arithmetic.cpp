#include <bit>
#include <numeric>

#include "tessera/comm/algorithms/families.h"

// Most of a family's programs are one program: run backwards it sends where it received, so a broadcast gives the reduce, and a scatter the gather. Only trees
// with root 0 are written down; another root is a rotation of the ranks, and of the parts too where they are named after ranks.

namespace tessera::comm::families {

int wrap(int rank, int ranks) { return (rank % ranks + ranks) % ranks; }
int log2_floor(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }
int log2_ceil(int n) { return n == 1 ? 0 : log2_floor(n - 1) + 1; }

std::vector<int> range(int begin, int end) {
  std::vector<int> all(begin < end ? end - begin : 0);
  std::iota(all.begin(), all.end(), begin);
  return all;
}

Rows then(Rows first, int steps, const Rows& second) {
  for (auto row : second) {
    row.step += steps;
    first.push_back(std::move(row));
  }
  return first;
}

Rows reversed(const Rows& rows, int steps, bool reduce) {
  Rows back;
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    const bool receives = row->send_to >= 0;
    back.push_back({.step = steps - 1 - row->step,
                    .send_to = row->receive_from,
                    .send = row->receive,
                    .receive_from = row->send_to,
                    .receive = row->send,
                    .reduce = reduce && receives});
  }
  return back;
}

int distance_from_root(const MessagePlanRequest& request, int rank) { return wrap(rank - request.root, request.ranks); }

Rows from_root(Rows rows, const MessagePlanRequest& request) {
  const bool parts = request.op == "gather" || request.op == "scatter";  // chunks are named after ranks
  const auto real = [&](int v) { return wrap(v + request.root, request.ranks); };
  for (auto& row : rows) {
    if (row.send_to >= 0) row.send_to = real(row.send_to);
    if (row.receive_from >= 0) row.receive_from = real(row.receive_from);
    if (!parts) continue;
    for (auto& chunk : row.send) chunk = real(chunk);
    for (auto& chunk : row.receive) chunk = real(chunk);
  }
  return rows;
}

}  // namespace tessera::comm::families
