#include "tessera/comm/algorithms/message_plan.h"

#include <algorithm>
#include <array>

#include <fmt/ranges.h>

#include "tessera/comm/algorithms/families.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// A rank makes its own rows and no others, from the request alone: the plan of all ranks, n times as large, exists only where it is proved or drawn. That the
// rows fit together without a word between the ranks rests on one rule: a request holds nothing that is not the same on all of them.

namespace tessera::comm {
namespace {

using namespace families;

// An algorithm of an op.
struct Algorithm {
  std::string_view op, name;
  int (*chunks)(const MessagePlanRequest& request);
  Rows (*rows)(const MessagePlanRequest& request, int rank);
  MessagePlanCost (*cost)(const MessagePlanRequest& request);
};

int ranks_of(const MessagePlanRequest& request) { return request.ranks; }

// The catalogue: a new algorithm is a line here, and is then simulated, drawn, executed and offered.
constexpr std::array kAlgorithms{
    Algorithm{"all_reduce", "ring", ranks_of, ring::all_reduce, ring::all_reduce_cost},
    Algorithm{"all_reduce", "bidirectional_ring", ranks_of, bidirectional_ring::all_reduce, bidirectional_ring::all_reduce_cost},
    Algorithm{"all_reduce", "recursive_doubling", recursive::one_chunk, recursive::doubling_all_reduce, recursive::doubling_all_reduce_cost},
    Algorithm{"all_reduce", "halving_doubling", recursive::halving_chunks, recursive::halving_doubling, recursive::halving_doubling_cost},
    Algorithm{"all_reduce", "binomial_tree", recursive::one_chunk, binomial::all_reduce, binomial::all_reduce_cost},
    Algorithm{"all_reduce", "double_binary_tree", double_tree::chunks, double_tree::all_reduce, double_tree::all_reduce_cost},
    Algorithm{"all_reduce", "two_level", two_level::chunks, two_level::rows, two_level::cost},
    Algorithm{"reduce", "ring", ring::chain_chunks, ring::reduce, ring::chain_cost},
    Algorithm{"reduce", "binomial_tree", recursive::one_chunk, binomial::reduce, binomial::reduce_cost},
    Algorithm{"reduce", "double_binary_tree", double_tree::chunks, double_tree::reduce, double_tree::one_way_cost},
    Algorithm{"reduce", "two_level", two_level::chunks, two_level::rows, two_level::cost},
    Algorithm{"broadcast", "ring", ring::chain_chunks, ring::broadcast, ring::chain_cost},
    Algorithm{"broadcast", "binomial_tree", recursive::one_chunk, binomial::broadcast, binomial::broadcast_cost},
    Algorithm{"broadcast", "double_binary_tree", double_tree::chunks, double_tree::broadcast, double_tree::one_way_cost},
    Algorithm{"broadcast", "two_level", two_level::chunks, two_level::rows, two_level::cost},
    Algorithm{"all_gather", "ring", ranks_of, ring::all_gather, ring::one_pass_cost},
    Algorithm{"all_gather", "bidirectional_ring", ranks_of, bidirectional_ring::all_gather, bidirectional_ring::one_pass_cost},
    Algorithm{"all_gather", "recursive_doubling", ranks_of, recursive::doubling_all_gather, recursive::doubling_all_gather_cost},
    Algorithm{"all_gather", "bruck", ranks_of, bruck::all_gather, bruck::all_gather_cost},
    Algorithm{"all_gather", "two_level", two_level::chunks, two_level::rows, two_level::cost},
    Algorithm{"reduce_scatter", "ring", ranks_of, ring::reduce_scatter, ring::one_pass_cost},
    Algorithm{"reduce_scatter", "bidirectional_ring", ranks_of, bidirectional_ring::reduce_scatter, bidirectional_ring::one_pass_cost},
    Algorithm{"reduce_scatter", "recursive_halving", ranks_of, recursive::halving_reduce_scatter, recursive::halving_reduce_scatter_cost},
    Algorithm{"reduce_scatter", "pairwise", ranks_of, pairs::reduce_scatter, pairs::pairwise_cost},
    Algorithm{"reduce_scatter", "two_level", two_level::chunks, two_level::rows, two_level::cost},
    Algorithm{"all_to_all", "pairwise", ranks_of, pairs::all_to_all, pairs::pairwise_cost},
    Algorithm{"all_to_all", "direct", ranks_of, pairs::direct_all_to_all, pairs::direct_cost},
    Algorithm{"all_to_all", "bruck", ranks_of, bruck::all_to_all, bruck::all_to_all_cost},
    Algorithm{"gather", "binomial_tree", ranks_of, binomial::gather, binomial::gather_cost},
    Algorithm{"gather", "direct", ranks_of, pairs::direct_gather, pairs::direct_gather_cost},
    Algorithm{"scatter", "binomial_tree", ranks_of, binomial::scatter, binomial::scatter_cost},
    Algorithm{"scatter", "direct", ranks_of, pairs::direct_scatter, pairs::direct_cost},
    Algorithm{"barrier", "dissemination", bruck::no_chunks, bruck::barrier, bruck::barrier_cost},
};

std::string_view family(std::string_view algorithm) { return algorithm.substr(0, algorithm.find(':')); }

const Algorithm& find(const MessagePlanRequest& request) {
  check_algorithm("algorithm", request.algorithm, request.op);
  const auto found =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(), [&](const Algorithm& a) { return a.op == request.op && a.name == family(request.algorithm); });
  invariant(request.ranks >= 1 && request.segments >= 1 && request.root >= 0 && request.root < request.ranks, "a plan of ", request.ranks, " ranks with root ",
            request.root, " in ", request.segments, " segments");
  int known = 0;
  for (const int host : request.hosts) {
    invariant(host >= 0 && host <= known, "a plan's hosts are not numbered in order of appearance");
    known = std::max(known, host + 1);
  }
  invariant(request.hosts.empty() || static_cast<int>(request.hosts.size()) == request.ranks, "a plan of ", request.ranks, " ranks with ", request.hosts.size(),
            " hosts");
  return *found;
}

}  // namespace

const std::vector<std::string>& planned_ops() {
  static const std::vector<std::string> ops = [] {
    std::vector<std::string> all;
    for (const auto& algorithm : kAlgorithms) {
      if (all.empty() || all.back() != algorithm.op) all.emplace_back(algorithm.op);
    }
    return all;
  }();
  return ops;
}

std::vector<std::string> algorithms_for(std::string_view op) {
  std::vector<std::string> names;
  for (const auto& algorithm : kAlgorithms) {
    if (algorithm.op == op) names.emplace_back(algorithm.name);
  }
  return names;
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (const auto& algorithm : kAlgorithms) {
    if (std::find(names.begin(), names.end(), algorithm.name) == names.end()) names.emplace_back(algorithm.name);
  }
  return names;
}

bool has_algorithm(std::string_view op, const std::string& algorithm) {
  const auto name = family(algorithm);
  const bool listed = std::any_of(kAlgorithms.begin(), kAlgorithms.end(), [&](const Algorithm& a) { return a.op == op && a.name == name; });
  return listed && (name == "two_level" ? two_level::serves(op, algorithm) : name == algorithm);
}

void check_algorithm(std::string_view knob, const std::string& algorithm, std::string_view op) {
  const auto& ops = planned_ops();
  if (!op.empty() && std::find(ops.begin(), ops.end(), op) == ops.end()) {
    throw ConfigError(detail::concat(knob, " = ", algorithm, ": there is no operation ", op, "; did you mean ", nearest(std::string(op), ops), "? There are ",
                                     fmt::format("{}", fmt::join(ops, ", "))));
  }
  const bool known =
      op.empty() ? std::any_of(ops.begin(), ops.end(), [&](const auto& o) { return has_algorithm(o, algorithm); }) : has_algorithm(op, algorithm);
  if (known) return;
  const auto names = op.empty() ? algorithm_names() : algorithms_for(op);
  if (family(algorithm) == "two_level") {
    throw ConfigError(detail::concat(knob, " = ", algorithm, ": expected two_level, or two_level:INNER:OUTER with algorithms that ",
                                     op.empty() ? "the operations" : op, " can be composed of"));
  }
  throw ConfigError(detail::concat(knob, " = ", algorithm, ": ", op.empty() ? "there is no such algorithm" : detail::concat(op, " has no such algorithm"),
                                   "; did you mean ", nearest(algorithm, names), "? There are ", fmt::format("{}", fmt::join(names, ", "))));
}

int num_chunks(const MessagePlanRequest& request) { return find(request).chunks(request); }

Rows make_rows(const MessagePlanRequest& request, int rank) {
  const auto& algorithm = find(request);
  invariant(rank >= 0 && rank < request.ranks, "rank ", rank, " of a plan of ", request.ranks);
  return request.ranks == 1 ? Rows() : algorithm.rows(request, rank);
}

MessagePlanCost formula(const MessagePlanRequest& request) {
  const auto& algorithm = find(request);
  return request.ranks == 1 ? MessagePlanCost() : algorithm.cost(request);
}

MessagePlan make_message_plan(const MessagePlanRequest& request) {
  MessagePlan plan{.request = request, .chunks = num_chunks(request), .rows = {}};
  for (int rank = 0; rank < request.ranks; ++rank) plan.rows.push_back(make_rows(request, rank));
  return plan;
}

std::pair<int64_t, int64_t> chunk_extent(const MessagePlanRequest& request, int chunks, int64_t elements, int index) {
  if (request.op == "all_reduce" || request.op == "reduce" || request.op == "broadcast") return chunk(elements, chunks, index);
  const int64_t size = elements / request.ranks;
  return {index * size, size};
}

bool reduces(std::string_view op) { return op == "all_reduce" || op == "reduce" || op == "reduce_scatter"; }

double formula_bytes(const MessagePlanRequest& request, double bytes) {
  const int chunks = num_chunks(request);
  return chunks == 0 ? 0 : bytes * static_cast<double>(formula(request).chunks_sent) / chunks;
}

}  // namespace tessera::comm
