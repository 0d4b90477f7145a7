#include <algorithm>
#include <bit>

#include "tessera/comm/algorithms/families.h"

// A binomial tree has the fewest steps, but the root sends all of S log2 n times: for small tensors. For large ones S goes down a tree in segments, as through
// a pipe, and costs about S and the tree's height in segments; yet half the ranks of one binary tree are leaves, which never send. The double tree gives them
// the other half of the data to pass on: whoever is a leaf in one tree is inner in the other. Both are the tree of numbers in order, in which exactly the odd
// ones are leaves; the second is the first with its positions mirrored or turned until odd and even have changed places.
// The paper colors edges so that nobody sends or receives twice in a step. Here all that a step has is posted at once, so depth and segment alone give a
// message its step.

namespace tessera::comm::families {

namespace binomial {

// In step k the 2^k who have it give it to the next 2^k.
Rows broadcast(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks, v = distance_from_root(request, rank);
  Rows rows;
  for (int step = 0; step < log2_ceil(n); ++step) {
    const int have = 1 << step;
    if (v < have && v + have < n) rows.push_back({.step = step, .send_to = v + have, .send = {0}});
    if (v >= have && v < 2 * have) rows.push_back({.step = step, .receive_from = v - have, .receive = {0}});
  }
  return from_root(std::move(rows), request);
}

Rows reduce(const MessagePlanRequest& request, int rank) { return reversed(broadcast(request, rank), log2_ceil(request.ranks), true); }

Rows all_reduce(const MessagePlanRequest& request, int rank) { return then(reduce(request, rank), log2_ceil(request.ranks), broadcast(request, rank)); }

// Each holder gives away the farther half of what it holds: whole subtrees, so that every message is one piece of memory but at the wrap of ranks.
Rows scatter(const MessagePlanRequest& request, int rank) {
  const int n = request.ranks, v = distance_from_root(request, rank), steps = log2_ceil(n);
  Rows rows;
  for (int step = 0; step < steps; ++step) {
    const int half = 1 << (steps - 1 - step);
    if (v % (2 * half) == 0 && v + half < n) rows.push_back({.step = step, .send_to = v + half, .send = range(v + half, std::min(v + 2 * half, n))});
    if (v % (2 * half) == half) rows.push_back({.step = step, .receive_from = v - half, .receive = range(v, std::min(v + half, n))});
  }
  return from_root(std::move(rows), request);
}

Rows gather(const MessagePlanRequest& request, int rank) { return reversed(scatter(request, rank), log2_ceil(request.ranks), false); }

MessagePlanCost broadcast_cost(const MessagePlanRequest& request) { return {log2_ceil(request.ranks), log2_ceil(request.ranks)}; }
MessagePlanCost reduce_cost(const MessagePlanRequest& request) { return {log2_ceil(request.ranks), 1}; }
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request) { return {2 * log2_ceil(request.ranks), log2_ceil(request.ranks)}; }
MessagePlanCost scatter_cost(const MessagePlanRequest& request) { return {log2_ceil(request.ranks), request.ranks - 1}; }

// The largest subtree below the root's: the last one, if it is nearly full, else the one before.
MessagePlanCost gather_cost(const MessagePlanRequest& request) {
  const int steps = log2_ceil(request.ranks), last = request.ranks - (1 << (steps - 1));
  return {steps, std::max(last, steps > 1 ? 1 << (steps - 2) : 0)};
}

}  // namespace binomial

namespace double_tree {
namespace {

// A node of the tree over positions 1 .. m in which numbers stand in order from left to right; odd positions are its leaves. Above it stands position 0.
struct Node {
  int depth = 1;  // of position 0: 0
  int parent = 0;
  std::vector<int> children{};
};

int top_of(int before, int count) { return before + static_cast<int>(std::bit_floor(static_cast<unsigned>(count))); }

Node node_at(int position, int m) {
  if (position == 0) return {.depth = 0, .parent = -1, .children = {top_of(0, m)}};
  Node node;
  // Down from the top, as in a search tree, until it stands there.
  int before = 0, count = m, top = top_of(before, count);
  for (; top != position; top = top_of(before, count), ++node.depth) {
    node.parent = top;
    if (position < top) {
      count = top - before - 1;
    } else {
      count -= top - before;
      before = top;
    }
  }
  const int left = top - before - 1, right = count - (top - before);
  if (left > 0) node.children.push_back(top_of(before, left));
  if (right > 0) node.children.push_back(top_of(top, right));
  return node;
}

// Where rank v > 0 stands in a tree. In the second one odd positions have become even: a mirror image, or where m is odd (the image of an odd number would be
// odd) a turn by one.
int position_of(int v, int m, int tree) {
  if (v == 0 || tree == 0) return v;
  return m % 2 == 0 ? m + 1 - v : v % m + 1;
}

int rank_at(int position, int m, int tree) {
  if (position == 0 || tree == 0) return position;
  return m % 2 == 0 ? m + 1 - position : (position == 1 ? m : position - 1);
}

int height(int m) { return log2_floor(m) + 1; }

// Segment j goes down from depth d in step d + j, in both trees at once.
Rows tree_broadcast(const MessagePlanRequest& request, int rank, int tree) {
  const int m = request.ranks - 1;
  const auto node = node_at(position_of(distance_from_root(request, rank), m, tree), m);
  Rows rows;
  for (int segment = 0; segment < request.segments; ++segment) {
    const int chunk = tree * request.segments + segment;
    if (node.parent >= 0) {
      rows.push_back({.step = node.depth - 1 + segment, .receive_from = rank_at(node.parent, m, tree), .receive = {chunk}});
    }
    for (const int child : node.children) rows.push_back({.step = node.depth + segment, .send_to = rank_at(child, m, tree), .send = {chunk}});
  }
  return rows;
}

int one_way_steps(const MessagePlanRequest& request) { return height(request.ranks - 1) + request.segments - 1; }

Rows by_step(Rows rows) {
  std::stable_sort(rows.begin(), rows.end(), [](const Transfer& a, const Transfer& b) { return a.step < b.step; });
  return rows;
}

}  // namespace

int chunks(const MessagePlanRequest& request) { return 2 * request.segments; }

Rows broadcast(const MessagePlanRequest& request, int rank) {
  return from_root(by_step(then(tree_broadcast(request, rank, 0), 0, tree_broadcast(request, rank, 1))), request);
}

Rows reduce(const MessagePlanRequest& request, int rank) {
  // Backwards the segments would come in backward order: what matters to the pipeline of all_reduce is that the first is done first.
  auto rows = reversed(broadcast(request, rank), one_way_steps(request), true);
  const int k = request.segments;
  const auto turned = [k](int chunk) { return chunk / k * k + (k - 1 - chunk % k); };
  for (auto& row : rows) {
    for (auto& chunk : row.send) chunk = turned(chunk);
    for (auto& chunk : row.receive) chunk = turned(chunk);
  }
  return rows;
}

// A segment turns around at the root: it starts down in the step after it arrived, while later ones still come up.
Rows all_reduce(const MessagePlanRequest& request, int rank) {
  return by_step(then(reduce(request, rank), height(request.ranks - 1), broadcast(request, rank)));
}

MessagePlanCost one_way_cost(const MessagePlanRequest& request) { return {one_way_steps(request), 2 * request.segments}; }

MessagePlanCost all_reduce_cost(const MessagePlanRequest& request) {
  return {2 * height(request.ranks - 1) + request.segments - 1, int64_t{request.segments} * std::min(request.ranks, 4)};
}

}  // namespace double_tree

}  // namespace tessera::comm::families
