#include "cli/inspect_record.h"

#include <cstdio>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/comm/flight_record/verdict.h"
#include "tessera/core/json_text.h"

namespace tessera::cli {

namespace {

namespace flight = comm::flight;
using nlohmann::json;

const char* name_of(const flight::RecordedCall& call) {
  switch (call.state) {
    case flight::State::Entered:
      return "entered";
    case flight::State::InFlight:
      return call.on_device ? "enqueued" : "in flight";
    case flight::State::Waiting:
      return "waiting";
    case flight::State::Completed:
      return "completed";
    case flight::State::Failed:
      return "failed";
    case flight::State::Begun:
      return "begun";
  }
  return "unknown";
}

json call_json(const flight::RankRecord& record, const flight::RecordedCall& call) {
  return {{"number", call.number},
          {"sequence", call.sequence},
          {"group", record.groups[call.group].name},
          {"op", call.op},
          {"shape", call.shape},
          {"dtype", call.dtype},
          {"reduction", call.reduction},
          {"bytes", call.bytes},
          {"peer", call.peer},
          {"tag", call.tag},
          {"site", call.site},
          {"state", name_of(call)},
          {"on_device", call.on_device},
          {"entered_s", call.entered_s},
          {"left_s", call.ended() ? json(call.left_s) : json()}};
}

json rank_json(const flight::RankRecord& record, const flight::Standing& standing, size_t calls) {
  json groups = json::array(), last = json::array();
  for (const auto& group : record.groups) groups.push_back({{"name", group.name}, {"members", group.members}, {"collectives", group.collectives}});
  for (size_t i = record.calls.size() - std::min(calls, record.calls.size()); i < record.calls.size(); ++i) last.push_back(call_json(record, record.calls[i]));
  return {{"rank", record.rank},
          {"host", record.host},
          {"pid", record.pid},
          {"restart_count", record.restart_count},
          {"started_s", record.started_s},
          {"seen_s", record.seen_s},
          {"closed", record.closed},
          {"total_calls", record.total_calls},
          {"last_entered", standing.call},
          {"state", standing.state},
          {"for_s", standing.for_s},
          {"where", standing.site},
          {"place", record.place},
          {"groups", groups},
          {"calls", last}};
}

json describe(const flight::Merge& merge, const flight::Verdict& verdict, const std::vector<flight::Standing>& standings, size_t calls) {
  json ranks = json::array();
  for (const auto& record : merge.records().ranks) ranks.push_back(rank_json(record, standings[record.rank], calls));
  return {{"kind", "flight_record"},
          {"world_size", merge.records().world_size},
          {"missing", merge.records().missing},
          {"verdict", {{"kind", name_of(verdict.kind)}, {"sentence", verdict.sentence}, {"culprits", verdict.culprits}, {"waiting", verdict.waiting}}},
          {"ranks", ranks}};
}

}  // namespace

void add_inspect_record(Command inspect, int& exit_code, const std::function<void()>& check) {
  struct Flags {
    std::string dir;
    bool json = false;
    size_t calls = 1;
  };
  auto flags = std::make_shared<Flags>();
  auto command = inspect.add_command("record", "Who kept whom waiting, as the flight records of a run say");
  command.add_option("dir", flags->dir, "Folder of the records, such as log.dir/record").required();
  command.add_flag("--json", flags->json, "Print JSON");
  command.add_option("--calls", flags->calls, "Last calls of each rank in the JSON").shows_default();
  command.when_chosen([flags, check, &exit_code] {
    check();
    const auto records = flight::read_records(flags->dir);
    const flight::Merge merge(records);
    const auto verdict = flight::explain(merge);
    const auto standings = flight::standings(merge);
    const auto text = flags->json ? json_text(describe(merge, verdict, standings, flags->calls), 2) + "\n" : verdict.sentence + "\n" + flight::table(standings);
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
