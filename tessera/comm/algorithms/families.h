#pragma once

#include <utility>

#include "tessera/comm/algorithms/message_plan.h"

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
Rows from_root(Rows rows, const MessagePlanRequest& request);
int distance_from_root(const MessagePlanRequest& request, int rank);

// Each chunk visits the ranks one after the other: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
namespace ring {
int chunks(const MessagePlanRequest& request);
Rows all_reduce(const MessagePlanRequest& request, int rank);
Rows all_gather(const MessagePlanRequest& request, int rank);
Rows reduce_scatter(const MessagePlanRequest& request, int rank);
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request);
MessagePlanCost one_pass_cost(const MessagePlanRequest& request);
// A chain with the root at one end, segment after segment.
int chain_chunks(const MessagePlanRequest& request);
Rows broadcast(const MessagePlanRequest& request, int rank);
Rows reduce(const MessagePlanRequest& request, int rank);
MessagePlanCost chain_cost(const MessagePlanRequest& request);
}  // namespace ring

// Both directions at once, each serving the half of the ring that is nearer: half the steps of a ring, the same bytes.
namespace bidirectional_ring {
Rows all_reduce(const MessagePlanRequest& request, int rank);
Rows all_gather(const MessagePlanRequest& request, int rank);
Rows reduce_scatter(const MessagePlanRequest& request, int rank);
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request);
MessagePlanCost one_pass_cost(const MessagePlanRequest& request);
}  // namespace bidirectional_ring

// Partners at distances 1, 2, 4, ...: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005. Of n - p ranks
// too many, each hands its data to a neighbor before and gets the result after.
namespace recursive {
int one_chunk(const MessagePlanRequest& request);
Rows doubling_all_reduce(const MessagePlanRequest& request, int rank);
MessagePlanCost doubling_all_reduce_cost(const MessagePlanRequest& request);
int halving_chunks(const MessagePlanRequest& request);  ///< p
Rows halving_doubling(const MessagePlanRequest& request, int rank);
MessagePlanCost halving_doubling_cost(const MessagePlanRequest& request);
Rows doubling_all_gather(const MessagePlanRequest& request, int rank);
MessagePlanCost doubling_all_gather_cost(const MessagePlanRequest& request);
Rows halving_reduce_scatter(const MessagePlanRequest& request, int rank);
MessagePlanCost halving_reduce_scatter_cost(const MessagePlanRequest& request);
}  // namespace recursive

// Whoever has the data gives it to one who has not: ceil(log2 n) steps.
namespace binomial {
Rows broadcast(const MessagePlanRequest& request, int rank);
Rows reduce(const MessagePlanRequest& request, int rank);
Rows all_reduce(const MessagePlanRequest& request, int rank);
Rows scatter(const MessagePlanRequest& request, int rank);
Rows gather(const MessagePlanRequest& request, int rank);
MessagePlanCost broadcast_cost(const MessagePlanRequest& request);
MessagePlanCost reduce_cost(const MessagePlanRequest& request);
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request);
MessagePlanCost scatter_cost(const MessagePlanRequest& request);
MessagePlanCost gather_cost(const MessagePlanRequest& request);
}  // namespace binomial

// Two binary trees below the root, each for half of the data; a rank that is inner in one is a leaf of the other, so that all links carry: Sanders,
// Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
namespace double_tree {
int chunks(const MessagePlanRequest& request);  ///< `segments` for each tree
Rows broadcast(const MessagePlanRequest& request, int rank);
Rows reduce(const MessagePlanRequest& request, int rank);
Rows all_reduce(const MessagePlanRequest& request, int rank);
MessagePlanCost one_way_cost(const MessagePlanRequest& request);
MessagePlanCost all_reduce_cost(const MessagePlanRequest& request);
}  // namespace double_tree

// Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997; and barrier's
// dissemination: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
namespace bruck {
Rows all_gather(const MessagePlanRequest& request, int rank);
MessagePlanCost all_gather_cost(const MessagePlanRequest& request);
Rows all_to_all(const MessagePlanRequest& request, int rank);
MessagePlanCost all_to_all_cost(const MessagePlanRequest& request);
int no_chunks(const MessagePlanRequest& request);
Rows barrier(const MessagePlanRequest& request, int rank);
MessagePlanCost barrier_cost(const MessagePlanRequest& request);
}  // namespace bruck

// Every pair meets once: in a step of its own (pairwise), or all in one (direct).
namespace pairs {
Rows reduce_scatter(const MessagePlanRequest& request, int rank);
Rows all_to_all(const MessagePlanRequest& request, int rank);
MessagePlanCost pairwise_cost(const MessagePlanRequest& request);
Rows direct_all_to_all(const MessagePlanRequest& request, int rank);
Rows direct_gather(const MessagePlanRequest& request, int rank);
Rows direct_scatter(const MessagePlanRequest& request, int rank);
MessagePlanCost direct_cost(const MessagePlanRequest& request);
MessagePlanCost direct_gather_cost(const MessagePlanRequest& request);
}  // namespace pairs

// Inside of hosts, between hosts, inside of hosts: any algorithm for each part.
namespace two_level {
std::pair<std::string, std::string> inner_and_outer(const std::string& algorithm);  ///< of "two_level:INNER:OUTER"; empty for "two_level"
bool serves(std::string_view op, const std::string& algorithm);
int chunks(const MessagePlanRequest& request);
Rows rows(const MessagePlanRequest& request, int rank);
MessagePlanCost cost(const MessagePlanRequest& request);
}  // namespace two_level

}  // namespace tessera::comm::families
