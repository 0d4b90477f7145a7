#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Collective algorithms as values: who sends what to whom, step by step. Pure functions make them, simulate.h proves them, picture.h draws them,
/// execute.h carries them out on any backend's send and recv. Formulas and pictures: docs/communication.md.
///
/// What moves is cut into chunks, which rows name by number:
///   all_reduce, reduce, broadcast      parts of the tensor that differ by at most one element, as layout's chunk() deals them
///   all_gather, gather                 chunk i is what rank i gives
///   reduce_scatter, scatter            chunk i is what rank i gets
///   all_to_all                         chunk i of a rank is what it has for the rank i places further: at first what it gives to rank + i, in the end
///                                      what it gets from rank - i
///   barrier                            none: its messages say only that they were sent
namespace tessera::comm {

/// What one rank does in one step: sends chunks to a rank, receives the same number of chunks from a rank, or both. A rank may have several rows in a step; all
/// that a step sends and receives is posted at once, and a step sends what was held before it.
struct Transfer {
  int step = 0;
  int send_to = -1;  ///< -1: sends nothing
  std::vector<int> send{};
  int receive_from = -1;  ///< -1: receives nothing
  std::vector<int> receive{};
  bool reduce = false;  ///< what comes is added to what is held, else it takes its place
  bool operator==(const Transfer&) const = default;
};
using Rows = std::vector<Transfer>;  ///< of one rank, by step

/// What a plan is asked for.
struct MessagePlanRequest {
  std::string op;         ///< all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, barrier
  std::string algorithm;  ///< a name that algorithms_for(op) lists; "two_level:INNER:OUTER" names what two_level is composed of
  int ranks = 1;
  int root = 0;              ///< of reduce, broadcast, gather, scatter
  int segments = 1;          ///< pieces that follow one another through a chain or a tree (ring of reduce and broadcast, double_binary_tree)
  std::vector<int> hosts{};  ///< two_level: the host of each rank, numbered from 0 in order of appearance; empty: all on one
  bool operator==(const MessagePlanRequest&) const = default;
};

/// The documented closed forms.
struct MessagePlanCost {
  int steps = 0;
  int64_t chunks_sent = 0;  ///< by the rank that sends most, of the plan's chunks. A chunk of L elements in c chunks has L/c, rounded down or up
  bool operator==(const MessagePlanCost&) const = default;
};

/// A plan of all ranks.
struct MessagePlan {
  MessagePlanRequest request;
  int chunks = 0;
  std::vector<Rows> rows;  ///< of each rank
};

/// Names of the ops that have algorithms, and of an op's algorithms.
const std::vector<std::string>& planned_ops();
std::vector<std::string> algorithms_for(std::string_view op);

/// All names there are, each once.
std::vector<std::string> algorithm_names();

/// Whether the op has this algorithm; for two_level:INNER:OUTER, whether both serve.
bool has_algorithm(std::string_view op, const std::string& algorithm);

/// Throws ConfigError naming `knob` for a name that is no algorithm of `op`, or of any op where `op` is empty. The text lists and gives the nearest.
void check_algorithm(std::string_view knob, const std::string& algorithm, std::string_view op = {});

/// Each throws ConfigError for an op or algorithm that does not exist, and InternalError for ranks, root, segments or hosts that make no sense.
int num_chunks(const MessagePlanRequest& request);
Rows make_rows(const MessagePlanRequest& request, int rank);  ///< one rank's part alone: time and memory of the order of its messages
MessagePlanCost formula(const MessagePlanRequest& request);   ///< two_level on hosts of unequal size: chunks_sent is an upper bound
MessagePlan make_message_plan(const MessagePlanRequest& request);

/// Where a chunk lies in a whole of `elements` elements (for all_to_all with equal parts: how large it is): {begin, size}.
std::pair<int64_t, int64_t> chunk_extent(const MessagePlanRequest& request, int chunks, int64_t elements, int chunk);

/// Whether the op adds what comes together.
bool reduces(std::string_view op);

/// Bytes that the busiest rank sends of a whole of `bytes`, where the chunks divide it evenly.
double formula_bytes(const MessagePlanRequest& request, double bytes);

}  // namespace tessera::comm
