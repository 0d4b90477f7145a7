#include "tessera/data_parallel/tree_schedule.h"

#include <map>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// The tree is fixed by the number of micro-batches alone; the ranks only decide who makes which addition. A run of neighbours contains few maximal subtrees
// (those of a binary counter: a stack that merges when its two rightmost are siblings), so a rank holds O(log M) sums however long its run. What remains is
// merged in one order for all ranks: the two of the earliest merge that is not done have nothing before it to wait for, so somebody can always go on.

namespace tessera {
namespace {

int64_t first_leaf(const TreeNode& node) { return node.index << node.level; }

/// A left child whose right sibling lies beyond the last micro-batch is its parent.
TreeNode promoted(TreeNode node, int64_t num_micro_batches, int root_level) {
  while (node.level < root_level && node.index % 2 == 0 && first_leaf({node.level, node.index + 1}) >= num_micro_batches) node = node.parent();
  return node;
}

}  // namespace

int tree_root_level(int64_t num_micro_batches) {
  int level = 0;
  while ((int64_t{1} << level) < num_micro_batches) ++level;
  return level;
}

TreeNode TreeSchedule::root() const { return {tree_root_level(num_micro_batches), 0}; }

TreeStack::TreeStack(int64_t num_micro_batches) : num_micro_batches_(num_micro_batches), root_level_(tree_root_level(num_micro_batches)) {
  invariant(num_micro_batches >= 1, "a tree over ", num_micro_batches, " micro-batches");
}

int TreeStack::push(TreeNode node) {
  invariant(node.index >= 0 && first_leaf(node) < num_micro_batches_, "micro-batch ", first_leaf(node), " of ", num_micro_batches_);
  nodes_.push_back(promoted(node, num_micro_batches_, root_level_));
  int merges = 0;
  while (nodes_.size() >= 2) {
    const TreeNode right = nodes_.back();
    const TreeNode left = nodes_[nodes_.size() - 2];
    if (left.level != right.level || left.index % 2 != 0 || right.index != left.index + 1) break;
    nodes_.pop_back();
    nodes_.back() = promoted(left.parent(), num_micro_batches_, root_level_);
    ++merges;
  }
  return merges;
}

TreeSchedule make_tree_schedule(int64_t num_micro_batches, int ranks) { return make_tree_schedule(num_micro_batches, ranks, /*sources=*/1); }

TreeSchedule make_tree_schedule(int64_t num_micro_batches, int ranks, int sources) {
  invariant(num_micro_batches >= 1 && ranks >= 1 && sources >= 1, "a tree over ", num_micro_batches, " micro-batches on ", ranks, " ranks of ", sources);
  const int root_level = tree_root_level(num_micro_batches);
  TreeSchedule schedule;
  schedule.num_micro_batches = num_micro_batches;

  std::map<TreeNode, int> owner_of;  // what exists at the level being merged, or above
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t begin = chunk(num_micro_batches, ranks * sources, rank * sources).first;
    const auto [last, of_last] = chunk(num_micro_batches, ranks * sources, (rank + 1) * sources - 1);
    const int64_t size = last + of_last - begin;
    TreeStack stack(num_micro_batches);
    for (int64_t index = begin; index < begin + size; ++index) stack.push(index);
    schedule.runs.push_back({begin, size});
    schedule.kept.push_back(stack.nodes());
    for (const TreeNode& node : stack.nodes()) owner_of.emplace(node, rank);
  }

  // Level by level, left to right: the left child's owner takes the right child. Ordered by level first, so no transfer waits for a later one.
  for (int level = 0; level < root_level; ++level) {
    std::vector<std::pair<TreeNode, int>> here;
    for (const auto& [node, owner] : owner_of) {
      if (node.level == level) here.emplace_back(node, owner);
    }
    for (size_t i = 0; i < here.size(); i += 2) {
      invariant(i + 1 < here.size() && here[i].first.parent() == here[i + 1].first.parent(), "tree node ", to_string(here[i].first), " has no sibling");
      const auto& [left, owner] = here[i];
      const auto& [right, right_owner] = here[i + 1];
      const TreeNode sum = promoted(left.parent(), num_micro_batches, root_level);
      schedule.merges.push_back({left, right, sum, owner, right_owner});
      owner_of.erase(left);
      owner_of.erase(right);
      owner_of.emplace(sum, owner);
    }
  }
  invariant(owner_of.size() == 1 && owner_of.begin()->first == schedule.root(), "the tree over ", num_micro_batches, " micro-batches has no single root");
  schedule.root_owner = owner_of.begin()->second;
  return schedule;
}

std::string to_string(const TreeNode& node) { return fmt::format("{}/{}", node.level, node.index); }

std::string to_string(const TreeSchedule& schedule) {
  std::string text;
  for (size_t rank = 0; rank < schedule.runs.size(); ++rank) {
    const TreeSchedule::Run& run = schedule.runs[rank];
    text += fmt::format("rank {}: micro-batches {} .. {} keep", rank, run.begin, run.begin + run.size);
    for (const TreeNode& node : schedule.kept[rank]) text += " " + to_string(node);
    text += '\n';
  }
  for (const TreeMerge& merge : schedule.merges) {
    text += fmt::format("{} + {} on rank {}", to_string(merge.left), to_string(merge.right), merge.owner);
    if (merge.right_owner != merge.owner) text += fmt::format(", from rank {}", merge.right_owner);
    text += '\n';
  }
  return text + fmt::format("root {} on rank {}, broadcast\n", to_string(schedule.root()), schedule.root_owner);
}

}  // namespace tessera
