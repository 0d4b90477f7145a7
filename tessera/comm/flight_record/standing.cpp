#include <algorithm>
#include <array>

#include "tessera/comm/flight_record/text.h"
#include "tessera/comm/flight_record/verdict.h"
#include "tessera/core/columns.h"

namespace tessera::comm::flight {
namespace {

// In the order of State.
const char* state_of(const RecordedCall& call) {
  if (call.is_only_enqueued()) return "enqueued";
  return std::array{"waits", "in flight", "waits", "outside", "failed", "waits"}[static_cast<size_t>(call.state) - static_cast<size_t>(State::Entered)];
}

// What holds the rank up, by the earliest entry; or else its last call.
Standing standing_of(const Merge& merge, const RankRecord& record) {
  Standing standing{.rank = record.rank, .site = record.place};
  const Wait* wait = nullptr;
  for (const auto& other : merge.waits()) {
    if (other.record == &record && (wait == nullptr || std::pair(!other.blocks, other.call->entered_s) < std::pair(!wait->blocks, wait->call->entered_s)))
      wait = &other;
  }
  const auto* call = wait ? wait->call : record.calls.empty() ? nullptr : &record.calls.back();
  if (call == nullptr) {
    standing.state = record.closed ? "left the world" : "outside";
    standing.for_s = record.seen_s - record.started_s;
    return standing;
  }
  const auto data = data_text(*call);
  standing.call = call_text(*call, record.groups[call->group]) + (data.empty() ? "" : " ") + data;
  if (wait || record.place.empty()) standing.site = call->site;  // where it is now says more than where its last call was
  if (wait) {
    standing.state = wait->failed ? "failed" : wait->blocks ? "waits" : state_of(*call);
    standing.for_s = wait->waited_s();
  } else {
    standing.state = record.closed ? "left the world" : state_of(*call);
    standing.for_s = record.seen_s - (call->ended() ? call->left_s : call->entered_s);
  }
  return standing;
}

}  // namespace

std::vector<Standing> standings(const Merge& merge) {
  double newest_s = 0;
  for (const auto& record : merge.records().ranks) newest_s = std::max(newest_s, record.seen_s);
  std::vector<Standing> all;
  for (int rank = 0; rank < merge.records().world_size; ++rank) {
    const auto* record = merge.record_of(rank);
    all.push_back(record ? standing_of(merge, *record) : Standing{.rank = rank, .state = "no record"});
    if (record) all.back().silent_s = newest_s - record->seen_s;
  }
  return all;
}

std::string table(const std::vector<Standing>& standings) {
  std::vector<std::vector<std::string>> rows{{"rank", "last entered", "state", "for", "last seen", "where"}};
  for (const auto& standing : standings) {
    const bool known = standing.state != "no record";
    rows.push_back({std::to_string(standing.rank), standing.call.empty() ? "-" : standing.call, standing.state, known ? seconds_text(standing.for_s) : "-",
                    !known                  ? "-"
                    : standing.silent_s < 1 ? "at the end"
                                            : seconds_text(standing.silent_s) + " before",
                    standing.site});
  }
  return format_columns(rows, /*left=*/{1, 2, 5});
}

}  // namespace tessera::comm::flight
