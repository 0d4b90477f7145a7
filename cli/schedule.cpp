#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cli/bench/bench.h"
#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/config/config.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/columns.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tessera/pipeline/schedules/picture.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tessera/pipeline/schedules/timed.h"

namespace tessera::cli {
namespace {

struct ScheduleFlags {
  schedules::Request request{.name = "", .costs = {}};
  std::string costs = "1,1,1,0", per_rank{};
  std::optional<int> memory_limit{}, group{}, per_update{};
  std::string csv{}, svg{}, trace{};
  bool list = false, json = false, lower = false;
};

/// "1,2.5,0".
std::vector<double> read_numbers(const char* flag, const std::string& text, const std::string& expected) {
  std::vector<double> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    double number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    const bool good = error == std::errc() && std::isfinite(number) && (number == 0 || (number >= 1e-9 && number <= 1e15)) && (next == end || *next == ',');
    require(good, flag, " = ", text, ": expected ", expected, ", 0 or numbers from 1e-9 to 1e15, with commas between them");
    numbers.push_back(number);
    if (next == end) return numbers;
    at = next + 1;
  }
}

/// Of each stage, as a run has measured them.
schedules::Costs measured_costs(const ScheduleFlags& flags) {
  require(flags.per_rank.empty(), "--per-rank = ", flags.per_rank, ": --costs = ", flags.costs, " holds each stage's own; leave --per-rank out");
  const schedules::Timed timed = schedules::read_timeline(flags.costs);
  try {
    return schedules::measured_costs(timed);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat("--costs = ", flags.costs, ": ", error.what()));
  }
}

/// A run that was timed, and no numbers.
bool holds_costs(const std::string& costs) {
  const bool numbers = costs.find_first_of("-0123456789.") == 0 || costs.find(',') != std::string::npos;
  return !numbers || std::filesystem::exists(costs);
}

schedules::Costs read_costs(const ScheduleFlags& flags) {
  if (holds_costs(flags.costs)) return measured_costs(flags);
  const std::string expected = "F,B,W,comm or F,B,W,comm,F&B";
  const auto numbers = read_numbers("--costs", flags.costs, expected);
  require(numbers.size() == 4 || numbers.size() == 5, "--costs = ", flags.costs, ": expected ", expected, ", and there are ", numbers.size(), " numbers");
  require(numbers[0] > 0 && numbers[1] > 0, "--costs = ", flags.costs, ": a forward and a backward of inputs take time; give both more than 0");
  return {.forward = numbers[0],
          .backward_input = numbers[1],
          .backward_weight = numbers[2],
          .communication = numbers[3],
          .overlap = numbers.size() == 5 ? numbers[4] : 0};
}

/// The factors of each rank's costs, for each of its stages.
std::vector<double> scale_of(const std::string& per_rank, const std::vector<int>& rank_of, int ranks) {
  if (per_rank.empty()) return {};
  const auto factors = read_numbers("--per-rank", per_rank, "a factor of the costs for each rank");
  require(factors.size() == static_cast<size_t>(ranks), "--per-rank = ", per_rank, ": ", factors.size(), " factors for ", ranks, " ranks; give ", ranks);
  std::vector<double> scale;
  for (const int rank : rank_of) scale.push_back(factors[rank]);
  for (const double factor : factors) require(factor > 0, "--per-rank = ", per_rank, ": each factor is more than 0");
  return scale;
}

/// What some schedules alone take; a 0 would pass for one that was left out.
void add_given(const ScheduleFlags& flags, schedules::Request& request) {
  const auto take = [](const char* flag, const std::optional<int>& given, int& into) {
    require(given != 0, flag, " = 0: expected 1 or more; leave it out where there is none to say");
    into = given.value_or(into);
  };
  take("--memory-limit", flags.memory_limit, request.memory_limit);
  take("--group", flags.group, request.group);
  take("--per-update", flags.per_update, request.per_update);
}

void check_request(const schedules::Request& request) {
  require(!request.name.empty(), "schedule: no name; --list shows what there is");
  if (schedules::is_schedule_file(request.name)) return;
  const auto names = schedules::schedule_names();
  if (std::ranges::find(names, request.name) == names.end()) {
    throw ConfigError(detail::concat(request.name, ": no such schedule, and no CSV file; did you mean ", nearest(request.name, names),
                                     "? There are: ", fmt::format("{}", fmt::join(names, " "))));
  }
  require(request.ranks != 0, request.name, ": --stages: say how many ranks the pipeline has, at least 1");
  require(request.micro_batches != 0, request.name, ": --micro-batches: say how many a step has, at least 1");
}

struct Simulated {
  schedules::Schedule schedule;
  schedules::Costs costs;
  schedules::Timeline timeline;
  schedules::Measures measures;
};

Simulated simulate(const ScheduleFlags& flags) {
  auto request = flags.request;
  check_request(request);
  add_given(flags, request);
  request.costs = read_costs(flags);
  // A list that is made for costs holds one stage a rank: the ranks' factors are the stages'.
  if (is_made_for_costs(request.name) && request.ranks > 0)
    request.costs.scale = scale_of(flags.per_rank, schedules::loop_placement(request.ranks, 1), request.ranks);
  Simulated result{.schedule = schedules::make_schedule(request), .costs = request.costs, .timeline = {}, .measures = {}};
  require(result.costs.stages.empty() || std::ssize(result.costs.stages) == result.schedule.stages(), "--costs = ", flags.costs, ": was measured with ",
          result.costs.stages.size(), " stages, and ", request.name, " has ", result.schedule.stages(), " here; take as many");
  result.costs.scale = scale_of(flags.per_rank, result.schedule.rank_of, result.schedule.ranks());
  if (flags.lower && !result.schedule.is_lowered()) result.schedule = schedules::lower(result.schedule, {.reduce_gradients = true, .costs = result.costs});
  result.timeline = schedules::simulate(result.schedule, result.costs);
  result.measures = schedules::measure(result.schedule, result.timeline);
  return result;
}

std::string title_of(const ScheduleFlags& flags, const Simulated& simulated) {
  const auto& schedule = simulated.schedule;
  auto text = fmt::format("{}: {} ranks, ", flags.request.name, schedule.ranks());
  if (schedule.stages() != schedule.ranks()) text += fmt::format("{} stages, ", schedule.stages());
  return text + fmt::format("{} micro-batches; costs {}", schedule.micro_batches, flags.costs) +
         (flags.per_rank.empty() ? "" : ", of ranks x " + flags.per_rank);
}

std::string text_of(const ScheduleFlags& flags, const Simulated& simulated) {
  const auto& [schedule, costs, timeline, measures] = simulated;
  std::string text = title_of(flags, simulated) + "\n\n" + (flags.lower ? to_string(schedule) : grid_of(schedule, timeline));
  text += fmt::format("\nmakespan {:.6g}, of which the ranks idle {:.2f}%; idle over busy time {:.4f}\n", measures.makespan, 100 * measures.bubble_fraction,
                      measures.bubble_over_ideal);
  text += fmt::format("bubble within the longest rank's span {:.2f}%\n", 100 * measures.span_bubble_rate);
  text += fmt::format("peak activations, in micro-batches of a rank's share: {:.4g}\n", fmt::join(measures.peak_activations, " "));
  if (schedule.is_asynchronous()) text += fmt::format("versions of the weights: {}\n", fmt::join(measures.weight_versions, " "));
  return text;
}

std::string list_json() {
  auto list = nlohmann::json::array();
  for (const auto& known : schedules::known_schedules())
    list.push_back({{"name", known.name}, {"what", known.what}, {"takes", known.domain}, {"bubble", known.bubble}, {"peak", known.peak}});
  return json_text(list) + "\n";
}

std::string list_text() {
  std::vector<std::vector<std::string>> rows{{"name", "what", "takes", "bubble", "peak of rank i"}};
  for (const auto& known : schedules::known_schedules()) rows.push_back({known.name, known.what, known.domain, known.bubble, known.peak});
  return format_columns(rows, {0, 1, 2, 3, 4}) +
         "p stages, m micro-batches, v chunks a rank; a bubble is the idle share of the makespan where F = B = W and nothing is sent, a peak counts "
         "micro-batches\n";
}

int show_schedule(const ScheduleFlags& flags) {
  if (flags.list) {
    std::fputs((flags.json ? list_json() : list_text()).c_str(), stdout);
    return 0;
  }
  std::vector<std::string> inputs;
  if (schedules::is_schedule_file(flags.request.name)) inputs.push_back(flags.request.name);
  if (holds_costs(flags.costs)) add_timeline(inputs, flags.costs);
  check_output_files({{"--csv", flags.csv}, {"--svg", flags.svg}, {"--trace", flags.trace}}, inputs);
  const auto simulated = simulate(flags);
  std::fputs(
      (flags.json ? json_text(schedules::to_json({.schedule = simulated.schedule, .timeline = simulated.timeline})) + "\n" : text_of(flags, simulated)).c_str(),
      stdout);
  std::fflush(stdout);
  const std::vector<schedules::Drawing> drawings{{.title = title_of(flags, simulated), .schedule = simulated.schedule, .timeline = simulated.timeline}};
  if (!flags.csv.empty()) write_file("--csv", flags.csv, to_csv(simulated.schedule));
  if (!flags.svg.empty()) write_file("--svg", flags.svg, svg_of(drawings));
  if (!flags.trace.empty()) write_file("--trace", flags.trace, trace_of(drawings));
  return 0;
}

}  // namespace

void add_schedule(Command app, int& exit_code) {
  auto flags = std::make_shared<ScheduleFlags>();
  auto command = app.add_command("schedule", "A pipeline's schedule: its grid, bubble and peak of activations");
  auto& request = flags->request;
  command.add_option("name", request.name, "Name of a schedule (--list), or a CSV file in PyTorch's text");
  command.add_option("--stages", request.ranks, "Ranks of the pipeline");
  command.add_option("--micro-batches", request.micro_batches, "Micro-batches of a step");
  command.add_option("--virtual", request.chunks, "Chunks of the model per rank (default: 1, or the 2 that a schedule demands)");
  command
      .add_option("--costs", flags->costs,
                  "F,B,W,comm of a stage, any one unit: forward, backward of inputs and of weights, a message; and F&B, of both at once; or what each stage "
                  "cost a run with log.timeline_every: its folder, or timeline.jsonl")
      .shows_default();
  command.add_option("--per-rank", flags->per_rank, "A factor of these costs for each rank: 1,1,1,1.2");
  command.add_option("--memory-limit", flags->memory_limit, "zb_auto: micro-batches whose activations a rank may hold");
  command.add_option("--kept", request.kept, "zb_1p, zb_2p, zb_auto: share of the activations that gradients of weights still need").shows_default();
  command.add_option("--group", flags->group, "interleaved: micro-batches that pass a chunk before the next, as Megatron has it");
  command.add_option("--per-update", flags->per_update, "pipedream_2bw: micro-batches that an update sums");
  command.add_flag("--vertical-sync", request.vertical_sync, "pipedream: one version of the weights for a micro-batch on all stages");
  command.add_flag("--lower", flags->lower, "Add sends, receives and reductions of gradients");
  command.add_option("--csv", flags->csv, "Write the actions, a row a rank");
  command.add_option("--svg", flags->svg, "Draw it");
  command.add_option("--trace", flags->trace, "Write it for Perfetto (JSON)");
  command.add_flag("--list", flags->list, "Say which schedules there are");
  command.add_flag("--json", flags->json, "Print JSON");
  command.when_chosen([flags, command, &exit_code] {
    for (const std::string& given : command.given()) {
      require(!flags->list || given == "--list" || given == "--json", "--list shows all schedules; leave ", given, " out");
    }
    exit_code = show_schedule(*flags);
  });
}

}  // namespace tessera::cli
