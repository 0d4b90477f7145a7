#include <nlohmann/json.hpp>

#include "tessera/launch/round.h"

/// Rounds and records as JSON.
namespace tessera::comm {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Endpoint, host, port)
}  // namespace tessera::comm

namespace tessera::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Node, id, address, nproc, spare_port, order)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Round, phase, number, nnodes, nodes, waiting, restarts, quorum, master, cause, signal, reason, last_lines, exit_code)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Ending, rank, wait_status, report, last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Record, beat, round, running, done, clean, left, failures, record_sentence)

namespace {

/// What workers wrote need not be UTF-8.
std::string dump(const nlohmann::json& json) { return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }

}  // namespace

std::string write_round(const Round& round) { return dump(round); }
Round read_round(const std::string& text) { return nlohmann::json::parse(text).get<Round>(); }
std::string write_record(const Record& record) { return dump(record); }
Record read_record(const std::string& text) { return nlohmann::json::parse(text).get<Record>(); }

}  // namespace tessera::launch
