#pragma once

#include <utility>

#include "tessera/comm/algorithms/plan.h"

/// The families of algorithms, for the catalogue in plan.cpp alone. Each algorithm is three pure functions of a request with at least two ranks: how many
/// chunks, one rank's rows, and what the busiest rank does. Letters: n ranks, r a rank, v its distance from the root, p the largest power of two that is at
/// most n.
namespace tessera::comm::families {

// Arithmetic that they share.
int wrap(int rank, int ranks);  ///< modulo, from 0 to ranks - 1
int log2_floor(int n);          ///< of n >= 1
int log2_ceil(int n);           ///< of n >= 1
std::vector<int> range(int begin, int end);

/// The second plan after the first, which has `steps` steps.
Rows then(Rows first, int steps, const Rows& second);

/// The same plan run backwards: a broadcast becomes a reduction, a scatter a gather (with `reduce` = false).
Rows reversed(const Rows& rows, int steps, bool reduce);

/// Rows made for rank `v` of a group whose root is 0, told to the real ranks.
Rows from_root(Rows rows, const PlanRequest& request);
int distance_from_root(const PlanRequest& request, int rank);

// Each chunk visits the ranks one after the other: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
namespace ring {
int chunks(const PlanRequest& request);
Rows all_reduce(const PlanRequest& request, int rank);
Rows all_gather(const PlanRequest& request, int rank);
Rows reduce_scatter(const PlanRequest& request, int rank);
PlanCost all_reduce_cost(const PlanRequest& request);
PlanCost one_pass_cost(const PlanRequest& request);
// A chain with the root at one end, segment after segment.
int chain_chunks(const PlanRequest& request);
Rows broadcast(const PlanRequest& request, int rank);
Rows reduce(const PlanRequest& request, int rank);
PlanCost chain_cost(const PlanRequest& request);
}  // namespace ring

// Both directions at once, each serving the half of the ring that is nearer: half the steps of a ring, the same bytes.
namespace bidirectional_ring {
Rows all_reduce(const PlanRequest& request, int rank);
Rows all_gather(const PlanRequest& request, int rank);
Rows reduce_scatter(const PlanRequest& request, int rank);
PlanCost all_reduce_cost(const PlanRequest& request);
PlanCost one_pass_cost(const PlanRequest& request);
}  // namespace bidirectional_ring

// Partners at distances 1, 2, 4, ...: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005. Of n - p ranks
// too many, each hands its data to a neighbor before and gets the result after.
namespace recursive {
int one_chunk(const PlanRequest& request);
Rows doubling_all_reduce(const PlanRequest& request, int rank);
PlanCost doubling_all_reduce_cost(const PlanRequest& request);
int halving_chunks(const PlanRequest& request);  ///< p
Rows halving_doubling(const PlanRequest& request, int rank);
PlanCost halving_doubling_cost(const PlanRequest& request);
Rows doubling_all_gather(const PlanRequest& request, int rank);
PlanCost doubling_all_gather_cost(const PlanRequest& request);
Rows halving_reduce_scatter(const PlanRequest& request, int rank);
PlanCost halving_reduce_scatter_cost(const PlanRequest& request);
}  // namespace recursive

// Whoever has the data gives it to one who has not: ceil(log2 n) steps.
namespace binomial {
Rows broadcast(const PlanRequest& request, int rank);
Rows reduce(const PlanRequest& request, int rank);
Rows all_reduce(const PlanRequest& request, int rank);
Rows scatter(const PlanRequest& request, int rank);
Rows gather(const PlanRequest& request, int rank);
PlanCost broadcast_cost(const PlanRequest& request);
PlanCost reduce_cost(const PlanRequest& request);
PlanCost all_reduce_cost(const PlanRequest& request);
PlanCost scatter_cost(const PlanRequest& request);
PlanCost gather_cost(const PlanRequest& request);
}  // namespace binomial

// Two binary trees below the root, each for half of the data; a rank that is inner in one is a leaf of the other, so that all links carry: Sanders,
// Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
namespace double_tree {
int chunks(const PlanRequest& request);  ///< `segments` for each tree
Rows broadcast(const PlanRequest& request, int rank);
Rows reduce(const PlanRequest& request, int rank);
Rows all_reduce(const PlanRequest& request, int rank);
PlanCost one_way_cost(const PlanRequest& request);
PlanCost all_reduce_cost(const PlanRequest& request);
}  // namespace double_tree

// Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997; and barrier's
// dissemination: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
namespace bruck {
Rows all_gather(const PlanRequest& request, int rank);
PlanCost all_gather_cost(const PlanRequest& request);
Rows all_to_all(const PlanRequest& request, int rank);
PlanCost all_to_all_cost(const PlanRequest& request);
int no_chunks(const PlanRequest& request);
Rows barrier(const PlanRequest& request, int rank);
PlanCost barrier_cost(const PlanRequest& request);
}  // namespace bruck

// Every pair meets once: in a step of its own (pairwise), or all in one (direct).
namespace pairs {
Rows reduce_scatter(const PlanRequest& request, int rank);
Rows all_to_all(const PlanRequest& request, int rank);
PlanCost pairwise_cost(const PlanRequest& request);
Rows direct_all_to_all(const PlanRequest& request, int rank);
Rows direct_gather(const PlanRequest& request, int rank);
Rows direct_scatter(const PlanRequest& request, int rank);
PlanCost direct_cost(const PlanRequest& request);
PlanCost direct_gather_cost(const PlanRequest& request);
}  // namespace pairs

// Inside of hosts, between hosts, inside of hosts: any algorithm for each part.
namespace two_level {
std::pair<std::string, std::string> inner_and_outer(const std::string& algorithm);  ///< of "two_level:INNER:OUTER"; empty for "two_level"
bool serves(std::string_view op, const std::string& algorithm);
int chunks(const PlanRequest& request);
Rows rows(const PlanRequest& request, int rank);
PlanCost cost(const PlanRequest& request);
}  // namespace two_level

}  // namespace tessera::comm::families
