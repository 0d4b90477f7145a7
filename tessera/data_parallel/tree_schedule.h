#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// A node of the fixed tree over the micro-batches 0 .. M-1 of a global batch: the sum over [index << level, min((index + 1) << level, M)).
/// Its value is left child + right child, or the left child alone where the right one lies beyond M.
struct TreeNode {
  int level = 0;
  int64_t index = 0;
  TreeNode parent() const { return {level + 1, index / 2}; }
  auto operator<=>(const TreeNode&) const = default;
};

/// One addition whose children live on different ranks, or were brought together by an earlier one: `owner` holds `left` and afterwards the sum.
struct TreeMerge {
  TreeNode left, right, sum;
  int owner = 0;
  int right_owner = 0;  ///< sends `right` to `owner`, unless they are the same rank
  bool operator==(const TreeMerge&) const = default;
};

/// How contiguous runs of micro-batches over ranks add up to the one fixed tree, whatever the runs: a plain value.
struct TreeSchedule {
  struct Run {
    int64_t begin = 0, size = 0;
    bool operator==(const Run&) const = default;
  };

  int64_t num_micro_batches = 0;
  std::vector<Run> runs;                    ///< per rank, contiguous, in rank order
  std::vector<std::vector<TreeNode>> kept;  ///< per rank, left to right: the maximal subtrees inside its run, at most 2 log2 M of them
  std::vector<TreeMerge> merges;            ///< in the one order that all ranks follow; so blocking messages cannot wait in a circle
  int root_owner = 0;                       ///< holds the sum of all; broadcasts it

  TreeNode root() const;
};

/// The schedule for `num_micro_batches` (at least 1) dealt over `ranks` (at least 1) by `chunk`. Throws InternalError otherwise.
TreeSchedule make_tree_schedule(int64_t num_micro_batches, int ranks);

/// The same where each rank has the runs of `sources` neighbours of those that they are dealt over: `ranks` times as many.
TreeSchedule make_tree_schedule(int64_t num_micro_batches, int ranks, int sources);

/// What a rank's partial sums do when micro-batches arrive one by one, left to right: after each arrival, as many merges of the two rightmost partial
/// sums as the tree has complete there. Shared by the schedule and its executor.
class TreeStack {
 public:
  explicit TreeStack(int64_t num_micro_batches);

  /// The next micro-batch is `index`. Returns how often the rightmost sum is added into its left neighbor.
  int push(int64_t index) { return push(TreeNode{.level = 0, .index = index}); }

  /// The same of a partial sum that begins where the rightmost one ends.
  int push(TreeNode node);

  const std::vector<TreeNode>& nodes() const { return nodes_; }

 private:
  int64_t num_micro_batches_;
  int root_level_;
  std::vector<TreeNode> nodes_;
};

/// Level of the root of a tree over `num_micro_batches` leaves.
int tree_root_level(int64_t num_micro_batches);

/// "2/3": level and index. The schedule: what each rank keeps, then the merges.
std::string to_string(const TreeNode& node);
std::string to_string(const TreeSchedule& schedule);

}  // namespace tessera
