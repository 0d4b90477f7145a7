#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cli/bench/bench.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/config/config.h"
#include "tessera/core/columns.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"
#include "tessera/pipeline/schedules/picture.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tessera/pipeline/schedules/timed.h"

namespace tessera::cli {
namespace {

using nlohmann::json;
using schedules::Timed;

struct TraceFlags {
  std::string from, against;
  std::optional<int64_t> step{};
  std::optional<int> rank{};
  std::string svg{}, trace{};
  bool json = false;
};

/// A schedule with its times, and what it is.
struct Compared {
  std::string what;
  Timed timed;
};

bool holds_times(const std::string& name) {
  std::error_code ignored;
  return name.ends_with(".json") || name.ends_with(".jsonl") || std::filesystem::is_directory(name, ignored);
}

/// What `measured` is held against: its own order by its own costs, another schedule by these costs, or another timeline as it is.
Compared other_side(const TraceFlags& flags, const Timed& measured) {
  if (holds_times(flags.against)) return {flags.against, schedules::read_timeline(flags.against)};
  const schedules::Costs costs{.stages = schedules::costs_of(measured)};
  const auto& ran = measured.schedule;
  if (flags.against.empty()) return {"foretold", {.schedule = ran, .timeline = simulate(ran, costs)}};
  const auto names = schedules::schedule_names();
  const auto known = std::ranges::find(names, flags.against);
  require(known != names.end() || schedules::is_schedule_file(flags.against), "--against = ", flags.against, ": no schedule, file or run; did you mean ",
          nearest(flags.against, names), "? tessera schedule --list shows what there is");
  require(flags.against != "zb_auto", "--against = zb_auto: is made for a limit of memory, which nothing says here; name zb_1p or zb_2p, or the file that ",
          "`tessera schedule zb_auto --memory-limit N --costs RUN --csv FILE.csv` writes");
  const int chunks = known != names.end() && schedules::known_schedules()[static_cast<size_t>(known - names.begin())].chunks == 0 ? ran.chunks(0) : 0;
  auto other = schedules::make_schedule({.name = flags.against, .ranks = ran.ranks(), .micro_batches = ran.micro_batches, .chunks = chunks, .costs = costs});
  require(other.stages() == ran.stages(), "--against = ", flags.against, ": cuts a model into ", other.stages(), " stages on ", ran.ranks(),
          " ranks, and what was measured has ", ran.stages(), "; time a run with pipeline.schedule = ", flags.against, ", or compare schedules of ",
          ran.stages(), " stages");
  auto timeline = simulate(other, costs);
  return {"foretold", {.schedule = std::move(other), .timeline = std::move(timeline)}};
}

std::string compared_title(const Compared& side) {
  const auto& schedule = side.timed.schedule;
  const auto stages = schedule.stages() == schedule.ranks() ? "" : fmt::format(", {} stages", schedule.stages());
  const auto step = side.timed.measured() ? fmt::format(", step {}", side.timed.step) : "";
  return fmt::format("{}: {}, {} ranks{}, {} micro-batches{}", side.what, schedule.name, schedule.ranks(), stages, schedule.micro_batches, step);
}

std::string percent_of(double part, double whole) { return fmt::format("{:.2f}%", whole > 0 ? 100 * part / whole : 0); }

/// Both sides' whole, and each rank.
std::string compared_text(const Compared& measured, const Compared& other) {
  const auto ours = measure(measured.timed.schedule, measured.timed.timeline), theirs = measure(other.timed.schedule, other.timed.timeline);
  const auto own = shares_of(measured.timed), held = shares_of(other.timed);
  double waited = 0, collectives = 0;
  for (const auto& rank : own) waited += rank.waited, collectives += rank.collectives;
  const double whole = ours.makespan * static_cast<double>(own.size());
  std::string text =
      compared_title(measured) + "\n" + compared_title(other) + (other.timed.measured() ? "" : ", by the mean costs that were measured") + "\n\n";
  text += format_columns({{"", measured.what, other.what},
                          {"makespan ms", fmt::format("{:.3f}", ours.makespan), fmt::format("{:.3f}", theirs.makespan)},
                          {"bubble", percent_of(ours.bubble_fraction, 1), percent_of(theirs.bubble_fraction, 1)}},
                         {0});
  text += fmt::format("waits for other stages {} of the makespan, collectives of other axes {}; a message takes {:.3f} ms\n\n", percent_of(waited, whole),
                      percent_of(collectives, whole), message_time(measured.timed));
  std::vector<std::vector<std::string>> rows{{"rank", "busy ms", "waits", "bubble", other.what, "peak"}};
  for (size_t rank = 0; rank < own.size(); ++rank) {
    rows.push_back({std::to_string(rank), fmt::format("{:.3f}", own[rank].busy), percent_of(own[rank].waited, ours.makespan), percent_of(own[rank].bubble, 1),
                    rank < held.size() ? percent_of(held[rank].bubble, 1) : "-", fmt::format("{:.4g}", ours.peak_activations[rank])});
  }
  text += format_columns(rows) + "\n";
  rows = {{"stage", "rank", "forward ms", "backward ms", "of inputs", "of weights"}};
  const auto costs = costs_of(measured.timed);
  const bool halves = measured.timed.schedule.splits_backward();
  for (size_t stage = 0; stage < costs.size(); ++stage) {
    const auto& cost = costs[stage];
    rows.push_back({std::to_string(stage), std::to_string(measured.timed.schedule.rank_of[stage]), fmt::format("{:.3f}", cost.forward),
                    fmt::format("{:.3f}", cost.backward), halves ? fmt::format("{:.3f}", cost.backward_input) : "-",
                    halves ? fmt::format("{:.3f}", cost.backward_weight) : "-"});
  }
  return text + format_columns(rows);
}

json compared_json(const Compared& measured, const Compared& other) {
  json ranks = json::array(), stages = json::array();
  const auto own = shares_of(measured.timed), held = shares_of(other.timed);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    ranks.push_back({{"busy_ms", own[rank].busy},
                     {"waited_ms", own[rank].waited},
                     {"collectives_ms", own[rank].collectives},
                     {"bubble", own[rank].bubble},
                     {"bubble_against", rank < held.size() ? json(held[rank].bubble) : json()}});
  }
  for (const auto& cost : costs_of(measured.timed)) {
    stages.push_back({{"forward_ms", cost.forward},
                      {"backward_ms", cost.backward},
                      {"backward_input_ms", cost.backward_input},
                      {"backward_weight_ms", cost.backward_weight}});
  }
  return {{"measured", to_json(measured.timed)},        {"against", to_json(other.timed)}, {"against_what", other.what},
          {"message_ms", message_time(measured.timed)}, {"ranks", std::move(ranks)},       {"stages", std::move(stages)}};
}

int show_trace(const TraceFlags& flags) {
  std::vector<std::string> inputs;
  add_timeline(inputs, flags.from);
  if (holds_times(flags.against)) add_timeline(inputs, flags.against);
  if (schedules::is_schedule_file(flags.against)) inputs.push_back(flags.against);
  check_output_files({{"--svg", flags.svg}, {"--trace", flags.trace}}, inputs);
  const Compared measured{"measured", schedules::read_timeline(flags.from, flags.step, flags.rank)};
  const Compared other = other_side(flags, measured.timed);
  std::fputs((flags.json ? json_text(compared_json(measured, other)) + "\n" : compared_text(measured, other)).c_str(), stdout);
  std::fflush(stdout);
  std::vector<schedules::Drawing> drawings;
  for (const Compared* side : {&measured, &other})
    drawings.push_back({compared_title(*side), side->timed.schedule, side->timed.timeline, side->timed.asked, " ms"});
  if (!flags.svg.empty()) write_file("--svg", flags.svg, svg_of(drawings));
  if (!flags.trace.empty()) write_file("--trace", flags.trace, trace_of(drawings));
  return 0;
}

}  // namespace

void add_trace(Command app, int& exit_code) {
  auto flags = std::make_shared<TraceFlags>();
  auto command = app.add_command("trace", "What a pipeline really did, beside what its schedule foretells");
  command.add_option("run", flags->from, "Folder of a run (log.dir) that was trained with log.timeline_every, or a file of timelines").required();
  command.add_option("--step", flags->step, "Which step (default: the last that was timed)");
  command.add_option("--rank", flags->rank, "Which pipeline, by its first rank in the world (default: the lowest)");
  command.add_option("--against", flags->against,
                     "Schedule or CSV file, foretold by the measured costs, or another run or file of timelines (default: what ran, foretold)");
  command.add_option("--svg", flags->svg, "Draw both below one another, on one scale of time");
  command.add_option("--trace", flags->trace, "Write both for Perfetto (JSON)");
  command.add_flag("--json", flags->json, "Print JSON");
  command.when_chosen([flags, &exit_code] { exit_code = show_trace(*flags); });
}

}  // namespace tessera::cli
