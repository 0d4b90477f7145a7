#include <algorithm>
#include <functional>

#include "tessera/comm/algorithms/families.h"
#include "tessera/comm/meeting/hosts.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// A phase is any other algorithm's rows with its ranks and chunks renamed: inside a host, between leaders, or between those with the same place. So no schedule
// is written twice, any inner can meet any outer one, and the whole is a plan like others, which the simulation proves and the executor runs. The only
// arithmetic is that of names: which chunks of the whole a phase's chunk stands for.

namespace tessera::comm::families::two_level {
namespace {

// backends/two_level does the same with whole collectives of the engine inside a host, which sums in shared memory; here all is messages, of any algorithms.
// What both know of hosts is Hosts; the shares and their scratch differ.

Hosts hosts_of(const MessagePlanRequest& request) { return Hosts(request.hosts.empty() ? std::vector<int>(request.ranks, 0) : request.hosts); }

// Place in its host of who speaks for it: the root, or the first rank of another host.
int leader(const Hosts& hosts, int host, int root) { return hosts.host(root) == host ? hosts.local_rank(root) : 0; }

enum class Scope { Inside, Leaders, Peers };  // ranks of a host; each host's leader; ranks with the same place in their hosts

// One of the parts, and which chunks of the whole a chunk of the part stands for.
struct Phase {
  Scope scope;
  std::string op, algorithm;
  std::function<std::vector<int>(int chunk, int index)> chunks;  // index: the rank's place in its host
  int largest_chunk = 1;                                         // of the whole's chunks
};

MessagePlanRequest request_of(const Phase& phase, int ranks, int root = 0) {
  return {.op = phase.op, .algorithm = phase.algorithm, .ranks = ranks, .root = root};
}

std::string or_default(const std::string& name, const char* op, const char* otherwise) { return !name.empty() && has_algorithm(op, name) ? name : otherwise; }

// Chunks a*inner + b of a whole in outer x inner chunks.
std::function<std::vector<int>(int, int)> slow_index(int inner) {
  return [inner](int chunk, int) { return range(chunk * inner, (chunk + 1) * inner); };
}
std::function<std::vector<int>(int, int)> fast_index(int outer, int inner) {
  return [outer, inner](int chunk, int) {
    std::vector<int> chunks;
    for (int slow = 0; slow < outer; ++slow) chunks.push_back(slow * inner + chunk);
    return chunks;
  };
}

int parts_of(const char* op, const std::string& algorithm, int ranks) { return num_chunks({.op = op, .algorithm = algorithm, .ranks = ranks}); }

// The op's phases and the number of chunks of the whole.
struct Composition {
  std::vector<Phase> phases;
  int chunks = 1;
};

Composition all_reduce(const Hosts& hosts, const std::string& inner, const std::string& outer) {
  const int m = hosts.most_members();
  const auto between = or_default(outer, "all_reduce", "ring");
  const int fine = parts_of("all_reduce", between, hosts.count());
  if (hosts.even() && (inner.empty() || (has_algorithm("reduce_scatter", inner) && has_algorithm("all_gather", inner)))) {
    const auto mine = [fine](int chunk, int index) { return std::vector<int>{index * fine + chunk}; };
    return {{{Scope::Inside, "reduce_scatter", or_default(inner, "reduce_scatter", "ring"), slow_index(fine), fine},
             {Scope::Peers, "all_reduce", between, mine},
             {Scope::Inside, "all_gather", or_default(inner, "all_gather", "ring"), slow_index(fine), fine}},
            m * fine};
  }
  const auto up = or_default(inner, "reduce", "binomial_tree"), down = or_default(inner, "broadcast", "binomial_tree");
  const int coarse = parts_of("reduce", up, m);
  return {{{Scope::Inside, "reduce", up, slow_index(fine), fine},
           {Scope::Leaders, "all_reduce", between, fast_index(coarse, fine), coarse},
           {Scope::Inside, "broadcast", down, slow_index(fine), fine}},
          coarse * fine};
}

Composition rooted(const std::string& op, const Hosts& hosts, const std::string& inner, const std::string& outer) {
  const auto inside = or_default(inner, op.c_str(), "binomial_tree"), between = or_default(outer, op.c_str(), "binomial_tree");
  const int coarse = parts_of(op.c_str(), inside, hosts.most_members()), fine = parts_of(op.c_str(), between, hosts.count());
  Composition made{{{Scope::Inside, op, inside, slow_index(fine), fine}, {Scope::Leaders, op, between, fast_index(coarse, fine), coarse}}, coarse * fine};
  if (op == "broadcast") std::reverse(made.phases.begin(), made.phases.end());
  return made;
}

// Chunks are ranks. A leader's broadcast or reduction carries all of them, in as many parts as its algorithm has.
Composition of_parts(const std::string& op, const Hosts& hosts, const std::string& inner, const std::string& outer) {
  const int n = hosts.size();
  const bool gathers = op == "all_gather";
  const char *leaf = gathers ? "gather" : "scatter", *whole = gathers ? "broadcast" : "reduce";
  const auto all_by = or_default(inner, whole, "binomial_tree");
  const int parts = parts_of(whole, all_by, hosts.most_members());
  const auto all_ranks = [n, parts](int part, int) {
    const auto [begin, size] = chunk(n, parts, part);
    return range(static_cast<int>(begin), static_cast<int>(begin + size));
  };
  const Phase leaves{Scope::Inside, leaf, or_default(inner, leaf, "binomial_tree"), nullptr};  // a chunk is a member of the rank's own host
  const Phase middle{Scope::Leaders, op, or_default(outer, op.c_str(), "ring"), [hosts](int host, int) { return hosts.members(host); }, hosts.most_members()};
  const Phase everything{Scope::Inside, whole, all_by, all_ranks, (n + parts - 1) / parts};
  return gathers ? Composition{{leaves, middle, everything}, n} : Composition{{everything, middle, leaves}, n};
}

Composition compose(const MessagePlanRequest& request, const Hosts& hosts) {
  const auto [inner, outer] = inner_and_outer(request.algorithm);
  if (request.op == "all_reduce") return all_reduce(hosts, inner, outer);
  if (request.op == "reduce" || request.op == "broadcast") return rooted(request.op, hosts, inner, outer);
  return of_parts(request.op, hosts, inner, outer);
}

MessagePlanCost phase_cost(const Phase& phase, const Hosts& hosts) {
  if (phase.scope != Scope::Inside) return formula(request_of(phase, hosts.count()));
  MessagePlanCost most;
  for (int host = 0; host < hosts.count(); ++host) {
    const auto cost = formula(request_of(phase, static_cast<int>(hosts.members(host).size())));
    most = {std::max(most.steps, cost.steps), std::max(most.chunks_sent, cost.chunks_sent)};
  }
  return most;
}

// The ranks that a rank meets in a phase; empty where it takes no part.
std::vector<int> company(const Phase& phase, const Hosts& hosts, int rank, int root) {
  const int host = hosts.host(rank), index = hosts.local_rank(rank);
  if (phase.scope == Scope::Inside) return hosts.members(host);
  if (phase.scope == Scope::Leaders && index != leader(hosts, host, root)) return {};
  std::vector<int> ranks;
  for (int other = 0; other < hosts.count(); ++other) {
    ranks.push_back(hosts.members(other)[phase.scope == Scope::Leaders ? leader(hosts, other, root) : index]);
  }
  return ranks;
}

Rows phase_rows(const Phase& phase, const Hosts& hosts, int rank, int root) {
  const auto ranks = company(phase, hosts, rank, root);
  if (ranks.empty()) return {};
  const int host = hosts.host(rank), place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const int local_root = phase.scope == Scope::Inside ? leader(hosts, host, root) : hosts.host(root);
  // The phase's program speaks of places in its company and of chunks of its own: both are translated.
  auto rows = make_rows(request_of(phase, static_cast<int>(ranks.size()), local_root), place);
  const auto expanded = [&](const std::vector<int>& chunks) {
    std::vector<int> all;
    for (const int chunk : chunks) {
      const auto these = phase.chunks ? phase.chunks(chunk, hosts.local_rank(rank)) : std::vector<int>{ranks[chunk]};
      all.insert(all.end(), these.begin(), these.end());
    }
    return all;
  };
  for (auto& row : rows) {
    if (row.send_to >= 0) row.send_to = ranks[row.send_to];
    if (row.receive_from >= 0) row.receive_from = ranks[row.receive_from];
    row.send = expanded(row.send);
    row.receive = expanded(row.receive);
  }
  return rows;
}

}  // namespace

std::pair<std::string, std::string> inner_and_outer(const std::string& algorithm) {
  const auto first = algorithm.find(':');
  if (first == std::string::npos) return {};
  const auto second = algorithm.find(':', first + 1);
  if (second == std::string::npos) return {algorithm.substr(first + 1), ""};
  return {algorithm.substr(first + 1, second - first - 1), algorithm.substr(second + 1)};
}

bool serves(std::string_view op, const std::string& algorithm) {
  const auto [inner, outer] = inner_and_outer(algorithm);
  const auto named = algorithm.find(':') != std::string::npos;
  if (!named) return true;
  if (inner.starts_with("two_level") || outer.starts_with("two_level") || !has_algorithm(op, outer)) return false;
  if (op == "all_reduce" && has_algorithm("reduce_scatter", inner) && has_algorithm("all_gather", inner)) return true;
  if (op == "all_reduce") return has_algorithm("reduce", inner) && has_algorithm("broadcast", inner);
  if (op == "all_gather") return has_algorithm("broadcast", inner);
  if (op == "reduce_scatter") return has_algorithm("reduce", inner);
  return has_algorithm(op, inner);
}

int chunks(const MessagePlanRequest& request) { return compose(request, hosts_of(request)).chunks; }

Rows rows(const MessagePlanRequest& request, int rank) {
  const auto hosts = hosts_of(request);
  Rows all;
  int steps = 0;
  for (const auto& phase : compose(request, hosts).phases) {
    all = then(std::move(all), steps, phase_rows(phase, hosts, rank, request.root));
    steps += phase_cost(phase, hosts).steps;
  }
  return all;
}

MessagePlanCost cost(const MessagePlanRequest& request) {
  const auto hosts = hosts_of(request);
  MessagePlanCost sum;
  for (const auto& phase : compose(request, hosts).phases) {
    const auto cost = phase_cost(phase, hosts);
    sum = {sum.steps + cost.steps, sum.chunks_sent + cost.chunks_sent * phase.largest_chunk};
  }
  return sum;
}

}  // namespace tessera::comm::families::two_level
