#include <set>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/json_reason.h"
#include "tessera/core/json_text.h"
#include "tessera/launch/round.h"

/// Rounds and records as JSON.
namespace tessera::comm {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Endpoint, host, port)
}  // namespace tessera::comm

namespace tessera::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Node, id, address, nproc, spare_port, order)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Round, phase, number, nnodes, job, attempts_before, nodes, waiting, restarts, quorum, lacks_server, master, cause, signal,
                                   reason, last_lines, exit_code)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Ending, rank, wait_status, report, last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeReport, beat, round, running, done, clean, left, ended_alone, attempts_before, failures, record_sentence)

namespace {

/// What workers wrote need not be UTF-8.
std::string dump(const nlohmann::json& json) { return json_text(json); }

void check_port(int port) { require(port >= 0 && port <= 65535, "port ", port); }

constexpr int64_t most_rounds = int64_t{1} << 40;

void check_attempts(int64_t before) { require(before >= 0 && before <= most_rounds, before, " attempts before"); }

/// What decisions rely on. Bounds keep the sum of ranks, and numbers that count up, from overflowing.
void check(const Round& round) {
  constexpr int64_t most_ranks = 1 << 20;
  require(round.phase >= Phase::Joining && round.phase <= Phase::Finished, "phase ", static_cast<int>(round.phase));
  require(round.cause >= Cause::None && round.cause <= Cause::Interrupt, "cause ", static_cast<int>(round.cause));
  require(round.number >= 0 && round.number <= most_rounds, "number ", round.number);
  check_attempts(round.attempts_before);
  require(round.restarts >= 0 && round.restarts <= round.number, round.restarts, " restarts in round ", round.number);
  check_port(round.master.port);
  std::set<std::string> ids;
  int64_t ranks = 0;
  for (const auto* list : {&round.nodes, &round.waiting}) {
    for (const Node& node : *list) {
      require(ids.insert(node.id).second, "node '", node.id, "' is there twice");
      require(node.nproc >= 1 && node.nproc <= most_ranks, "node '", node.id, "' has ", node.nproc, " ranks");
      check_port(node.spare_port);
      ranks += node.nproc;
    }
  }
  require(ranks <= most_ranks, ranks, " ranks");
}

void check(const NodeReport& record) {
  require(record.beat >= 0 && record.round >= 0, "beat ", record.beat, ", round ", record.round);
  check_attempts(record.attempts_before);
  for (const Ending& ending : record.failures) require(ending.rank >= 0, "rank ", ending.rank);
}

/// Numbers are whole: turning others into integers is undefined where they do not fit.
bool is_whole(int, nlohmann::json::parse_event_t, nlohmann::json& value) {
  require(!value.is_number_float(), value.dump(), " is no whole number");
  return true;
}

/// Reads a T; `what` it is. Each field has to come back as it stands in the text, for the library's own conversion wraps numbers.
template <class T>
T parsed(const std::string& text, const char* what) {
  constexpr const char* way_out = "; another program, or another version of this one, writes to the rendezvous' store: give this job another --rdzv-endpoint";
  try {
    const auto json = nlohmann::json::parse(text, is_whole);
    T value = json.get<T>();
    require(nlohmann::json(value) == json, "there are fields that are not known, or numbers that do not fit");
    check(value);
    return value;
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("the ", what, " in the store cannot be read: ", json_reason(error), way_out));
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat("the ", what, " in the store cannot be read: ", error.what(), way_out));
  }
}

}  // namespace

std::string write_round(const Round& round) { return dump(round); }
Round read_round(const std::string& text) { return parsed<Round>(text, "round"); }
std::string write_record(const NodeReport& record) { return dump(record); }
NodeReport read_record(const std::string& text) { return parsed<NodeReport>(text, "record"); }

}  // namespace tessera::launch
