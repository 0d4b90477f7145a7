#include "tessera/launch/record_findings.h"

#include <algorithm>
#include <exception>

#include "tessera/comm/flight_record/verdict.h"

namespace tessera::launch {
namespace {

// Of a job on several hosts, each may hold the records of its own ranks only; then another host knows better.
bool knows(const comm::flight::Merge& merge, const comm::flight::Verdict& verdict) {
  return std::ranges::all_of(verdict.culprits, [&](int rank) { return merge.record_of(rank) != nullptr; });
}

}  // namespace

RecordFindings explain_records(const std::filesystem::path& dir) noexcept {
  namespace flight = comm::flight;
  try {
    const auto records = flight::read_records(dir, flight::Damage::LeaveOut);
    if (records.ranks.empty()) return {};
    const flight::Merge merge(records);
    const auto verdict = flight::explain(merge);
    return {verdict.sentence, flight::table(flight::standings(merge)), verdict.names_cause && knows(merge, verdict)};
  } catch (const std::exception&) {  // no folder, no records, no memory: the launcher has its own sentence
    return {};
  }
}

}  // namespace tessera::launch
