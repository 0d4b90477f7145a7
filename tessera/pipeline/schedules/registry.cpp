#include "tessera/pipeline/schedules/registry.h"

#include <algorithm>
#include <functional>

#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/generators.h"

namespace tessera::schedules {
namespace {

struct Maker {
  KnownSchedule known;
  std::function<Schedule(const Request&)> make;
};

Schedule automatic_within(const Request& request, const char* name, int limit) {
  return automatic(request.ranks, request.micro_batches, request.costs, {.micro_batches = limit, .kept = request.kept}, name);
}

const std::vector<Maker>& makers() {
  using R = const Request&;
  static const std::vector<Maker> all{
      {{"naive", "one micro-batch after the other", "any", "(p-1)/p", "1", 0}, [](R r) { return naive(r.ranks, r.micro_batches, r.chunks); }},
      {{"gpipe", "all forwards, then all backwards", "v = 1", "(p-1)/(m+p-1)", "m", 1}, [](R r) { return gpipe(r.ranks, r.micro_batches); }},
      {{"1f1b", "a forward and a backward in turns", "v = 1", "(p-1)/(m+p-1)", "min(m, p-i)", 1}, [](R r) { return one_f_one_b(r.ranks, r.micro_batches); }},
      {{"pipedream", "1f1b with an update behind every backward", "v = 1", "none between steps", "min(m, p-i)", 1},
       [](R r) { return pipedream(r.ranks, r.micro_batches, r.vertical_sync); }},
      {{"pipedream_2bw", "1f1b with an update behind every few backwards", "v = 1", "none between steps", "min(m, p-i)", 1},
       [](R r) { return pipedream_2bw(r.ranks, r.micro_batches, r.per_update); }},
      {{"interleaved", "1f1b over several chunks a rank", "m a multiple of max(1, m/p)", "(p-1)/(v m+p-1)", "min(v m, 2(p-1-i)+(v-1)g+1)/v, g = m/max(1, m/p)",
        0},
       [](R r) { return interleaved(r.ranks, r.micro_batches, r.chunks, r.group); }},
      {{"breadth_first", "gpipe over several chunks a rank", "any", "(p-1)/(v m+p-1)", "m", 0},
       [](R r) { return breadth_first(r.ranks, r.micro_batches, r.chunks); }},
      {{"zb_h1", "1f1b, its gaps filled with gradients of weights", "v = 1", "(p-1)/(3m+p-1)", "at most p", 1},
       [](R r) { return zb_h1(r.ranks, r.micro_batches); }},
      {{"zb_h2", "no bubble within a rank's span, for twice the memory", "v = 1", "(p-1)/(3m+p-1), of a span 0", "at most 2p-1", 1},
       [](R r) { return zb_h2(r.ranks, r.micro_batches); }},
      {{"zb_v", "no bubble within a rank's span, in 1f1b's memory", "v = 2", "(p-1)/(6m+p-1), of a span 0", "at most p", 2},
       [](R r) { return zb_v(r.ranks, r.micro_batches); }},
      {{"dualpipev", "a forward and a backward at once", "v = 2, m >= 2p", "idle (p-1)(F&B + B - 3W)", "at most p + 1/2", 2},
       [](R r) { return dualpipev(r.ranks, r.micro_batches); }},
      {{"v_half", "half of 1f1b's memory", "v = 2", "idle about 3p chunks", "at most (p+2)/2", 2}, [](R r) { return v_half(r.ranks, r.micro_batches); }},
      {{"v_min", "a third of 1f1b's memory", "v = 2", "idle about 4p chunks", "at most (p+4)/3", 2}, [](R r) { return v_min(r.ranks, r.micro_batches); }},
      {{"zb_1p", "the best found for measured costs, in 1f1b's memory", "v = 1", "by the costs", "at most p", 1},
       [](R r) { return automatic_within(r, "zb_1p", r.ranks); }},
      {{"zb_2p", "the best found for measured costs, in twice that", "v = 1", "by the costs", "at most 2p", 1},
       [](R r) { return automatic_within(r, "zb_2p", 2 * r.ranks); }},
      {{"zb_auto", "the best found for measured costs and a limit", "v = 1", "by the costs", "at most the limit", 1},
       [](R r) { return automatic_within(r, "zb_auto", r.memory_limit); }},
  };
  return all;
}

/// Names of the schedules that take several chunks, for a message.
std::string with_chunks() {
  std::string names;
  for (const auto& maker : makers()) {
    if (maker.known.chunks == 0) names += (names.empty() ? "" : ", ") + maker.known.name;
  }
  return names;
}

int chunks_of(const KnownSchedule& known, int chunks) {
  if (chunks == 0) return std::max(known.chunks, 1);
  require_of("chunks", known.chunks != 1 || chunks == 1, known.name, ": virtual_stages = ", chunks,
             ": a rank holds one stage of it; take 1, or a schedule with any number: ", with_chunks());
  require_of("chunks", known.chunks != 2 || chunks == 2, known.name, ": virtual_stages = ", chunks, ": a rank holds two stages of it; take 2");
  return chunks;
}

/// An option that is given to a schedule which does not know it would be without effect, silently.
void refuse_foreign_options(const Request& request) {
  const auto only = [&](bool given, const char* knob, const char* name) {
    require_of(knob, !given || request.name == name, request.name, ": ", knob, " is known to ", name, " only; leave it out");
  };
  only(request.memory_limit != 0, "memory_limit", "zb_auto");
  only(request.group != 0, "group", "interleaved");
  only(request.per_update != 0, "per_update", "pipedream_2bw");
  require_of("kept", request.kept == 1 || is_made_for_costs(request.name), request.name, ": kept is known to zb_1p, zb_2p and zb_auto only; leave it out");
  only(request.vertical_sync, "vertical_sync", "pipedream");
}

Schedule from_file(const Request& request) {
  Schedule schedule = read_csv_file(request.name);
  require_of("ranks", request.ranks == 0 || request.ranks == schedule.ranks(), request.name, ": holds ", schedule.ranks(),
             " ranks, and stages = ", request.ranks, " are asked for; take ", schedule.ranks());
  require_of("micro_batches", request.micro_batches == 0 || request.micro_batches == schedule.micro_batches, request.name, ": holds ", schedule.micro_batches,
             " micro-batches, and ", request.micro_batches, " are asked for; take ", schedule.micro_batches);
  const int chunks = schedule.stages() / schedule.ranks();
  require_of("chunks", request.chunks == 0 || request.chunks * schedule.ranks() == schedule.stages(), request.name, ": holds ", schedule.stages(),
             " stages on ", schedule.ranks(), " ranks, and virtual_stages = ", request.chunks, " are asked for",
             chunks * schedule.ranks() == schedule.stages() ? "; take " : "", chunks * schedule.ranks() == schedule.stages() ? std::to_string(chunks) : "");
  return schedule;
}

}  // namespace

const std::vector<KnownSchedule>& known_schedules() {
  static const auto all = [] {
    std::vector<KnownSchedule> known;
    for (const auto& maker : makers()) known.push_back(maker.known);
    return known;
  }();
  return all;
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const auto& known : known_schedules()) names.push_back(known.name);
  return names;
}

bool is_schedule_file(const std::string& name) { return name.ends_with(".csv"); }

Schedule make_schedule(const Request& request) {
  refuse_foreign_options(request);
  if (is_schedule_file(request.name)) return from_file(request);
  const auto maker = std::ranges::find(makers(), request.name, [](const Maker& each) { return each.known.name; });
  if (maker == makers().end()) {
    std::string names;
    for (const auto& name : schedule_names()) names += " " + name;
    throw ConfigError(tessera::detail::concat(request.name, ": no such schedule; there are", names, ", and CSV files"));
  }
  require_of("ranks", request.ranks >= 1, request.name, ": stages = ", request.ranks, ": at least 1");
  Request filled = request;
  filled.chunks = chunks_of(maker->known, request.chunks);
  return maker->make(filled);
}

}  // namespace tessera::schedules
