#include "cli/plan_search.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iterator>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/progress_line.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"
#include "tessera/core/text_file.h"
#include "tessera/plan/curves.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/scaling.h"
#include "tessera/plan/search.h"
#include "tessera/plan/settings.h"

namespace tessera::cli {

namespace {

/// What a search and a curve choose; the rest of a layout they leave out.
bool is_chosen(const std::string& key) {
  static const std::set<std::string> chosen{"zero.stage",       "recompute.mode", "pipeline.schedule", "pipeline.virtual_stages",
                                            "batch.micro_size", "batch.per_rank", "batch.global_size", "tensor.sequence_parallel"};
  return key.starts_with("mesh.") || chosen.contains(key);
}

/// Keys whose values differ.
std::vector<std::string> keys_that_differ(const Config& one, const Config& other) {
  std::vector<std::string> keys;
  Config::for_each_section(one, [&](std::string_view section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](std::string_view name, const auto&...) {
      std::string key = detail::concat(section, ".", name);
      if (detail::value_text(one, key) != detail::value_text(other, key)) keys.push_back(std::move(key));
    });
  });
  return keys;
}

/// Of the layouts that a search chooses among, what the file says of them is none of its business; what is not chosen, and who asks for a layout by --set, is
/// told.
void forget_layout(Config& config, const std::vector<std::string>& sets, const std::string& flag) {
  const Config given = config;
  config.mesh = {.order = given.mesh.order};
  config.zero.stage = 0;
  config.recompute = {};
  config.offload = {};
  config.tensor = {};
  config.pipeline = {};
  config.batch.micro_size = 1;
  const std::vector<std::string> changed = keys_that_differ(given, config);
  std::vector<std::string> lost;
  std::ranges::copy_if(changed, std::back_inserter(lost), std::not_fn(is_chosen));
  if (!lost.empty())
    log().warn("{}: {} {} not looked at, and {} left out", flag, fmt::join(lost, ", "), lost.size() == 1 ? "is" : "are", lost.size() == 1 ? "is" : "are");
  for (const std::string& set : sets) {
    const std::string key = set.substr(0, set.find('='));
    if (is_chosen(key) && std::ranges::find(changed, key) != changed.end())
      log().warn("{0}: {1} is what it goes over, and `--set {2}` is left out", flag, key, set);
  }
}

/// Of what the file, or --set, says of a layout, what has to be said otherwise for `config`, as --set takes it.
std::vector<std::string> to_unsay(const Config& given, const Config& config) {
  std::vector<std::string> sets;
  for (const std::string& key : keys_that_differ(given, config)) {
    if (const auto value = detail::value_text(config, key)) sets.push_back(key + "=" + *value);
  }
  return sets;
}

/// Powers of two up to the largest, and that.
std::vector<int64_t> batches_up_to(int64_t largest) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < largest; size *= 2) sizes.push_back(size);
  sizes.push_back(largest);
  return sizes;
}

/// With what is alive over the step, and the stages that a search had for it.
plan::DryRun run_to_draw(Config& config, int world, const PlanRequest& request) {
  if (const auto settle = request.machine_of_each()) settle(config);
  plan::DryRunOptions options = request.dry_options(config);
  options.history = true;
  return plan::dry_run(config, world, options);
}

/// The best layout's own plan, with all that a picture needs.
void draw_search(const plan::LayoutSearch& found, Config winner, const PlanRequest& request) {
  const auto run = run_to_draw(winner, found.world, request);
  nlohmann::json json = json_of(run, winner, request.device(), std::nullopt);
  json["search"] = plan::to_json(found);
  request.flags().pictures.write({.config = winner, .run = run, .device = &*request.device(), .search = &found, .json = std::move(json)});
}

/// `asked` is the configuration as it was given, of which `beside` are to be told otherwise. Exit code 0 where something fits, else 1: a script asks for a
/// layout and needs to know.
int say_search(const Config& config, const Config& asked, const std::vector<std::string>& beside, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const plan::Machine machine = request.machine_of(config).value();
  const auto found = [&] {
    ProgressLine line;
    plan::SearchOptions options{.micro_size = asked.batch.micro_size,
                                .driven = request.machine_of_each(),
                                .allocator = request.allocator_of(config).has_value(),
                                .beside = beside,
                                .progress = [&](const std::string& text) { line.say(text); }};
    if (flags.max_batch) options.batches = batches_up_to(*flags.max_batch);
    if (flags.patience) options.patience = std::chrono::seconds(*flags.patience);
    return plan::search_layouts(config, flags.world, machine, options);
  }();
  const plan::Tried* best = found.best();
  std::string text = flags.json ? json_text(plan::to_json(found), 2) + "\n" : plan::to_string(found);
  if (best != nullptr && !flags.json) text += "\n" + plan::flags_of(plan::settings_of(best->choice, found.world, beside)) + "\n";
  if (best != nullptr && !flags.output.empty()) {
    Config winner = plan::with_settings(config, plan::settings_of(best->choice, found.world));
    winner.run = asked.run;  // without the device's limit
    write_text_file("--output " + flags.output, flags.output, to_toml(winner));
    if (!flags.json) text += flags.output + ": written\n";
  }
  if (best != nullptr && flags.pictures.asked()) {
    draw_search(found, plan::with_settings(config, plan::settings_of(best->choice, found.world)), request);
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  if (best == nullptr) std::fputs("tessera: --search: no layout was found that fits; standard output says what was tried\n", stderr);
  return best != nullptr ? 0 : 1;
}

/// Of the layout at the knee, or of the last that does, a picture; text or JSON of all.
void say_scaling(const Config& config, const std::vector<std::string>& beside, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const plan::Scaling scaling = [&] {
    ProgressLine line;
    return plan::strong_scaling(config, request.machine_of(config).value(),
                                {.world = request.world_or_8(),
                                 .allocator = request.allocator_of(config).has_value(),
                                 .driven = request.machine_of_each(),
                                 .beside = beside,
                                 .progress = [&](const std::string& text) { line.say(text); }});
  }();
  if (!flags.svg.empty()) write_text_file("--svg " + flags.svg, flags.svg, plan::svg_of(plan::curves_of(scaling)));
  nlohmann::json json = plan::to_json(scaling);
  if (!flags.pictures.report.empty()) {
    const plan::Scaling::Point* drawn = nullptr;
    for (const auto& point : scaling.points) {
      if (point.whole && (!scaling.knee || point.ranks <= *scaling.knee)) drawn = &point;
    }
    Config at = plan::with_settings(config, plan::settings_of(drawn->whole->choice, drawn->ranks));
    const auto run = run_to_draw(at, drawn->ranks, request);
    nlohmann::json page = json_of(run, at, request.device(), std::nullopt);
    page["scaling"] = json;
    flags.pictures.write({.config = at, .run = run, .device = &*request.device(), .scaling = &scaling, .json = std::move(page)});
  }
  std::fputs((flags.json ? json_text(json, 2) + "\n" : plan::to_string(scaling)).c_str(), stdout);
}

/// A step's size, as the layout, is each point's own.
void say_curves(const Config& config, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const plan::Curves curves = [&] {
    ProgressLine line;
    return plan::make_curves(config, flags.curve,
                             {.world = request.world_or_8(),
                              .machine = request.machine_of(config),
                              .allocator = request.allocator_of(config),
                              .driven = request.machine_of_each(),
                              .progress = [&](const std::string& text) { line.say(text); }});
  }();
  if (!flags.svg.empty()) write_text_file("--svg " + flags.svg, flags.svg, plan::svg_of(curves));
  std::fputs((flags.json ? json_text(plan::to_json(curves), 2) + "\n" : plan::to_string(curves)).c_str(), stdout);
}

}  // namespace

void check_search(const PlanFlags& flags) {
  require(flags.tokens.empty() || !(flags.search || flags.explain || flags.longest), "--tokens = ", flags.tokens,
          ": is said of a plan; leave out --search, --explain and --longest, or --tokens");
  if (flags.search) {
    require(!flags.explain && !flags.longest && !flags.events, "--search: stands in place of the plan; leave out --explain, --longest and --events");
    require(!flags.batch || !flags.max_batch, "--batch and --max-batch: the one is the size of a step, the other the largest to choose from; give one");
    for (const auto& [name, value] : {std::pair{"--batch", flags.batch}, {"--max-batch", flags.max_batch}, {"--patience", flags.patience}}) {
      require(!value || (*value >= 1 && *value <= 1 << 30), name, " = ", value.value_or(0), ": expected 1 to ", 1 << 30);
    }
    return;
  }
  for (const auto& [name, given] : {std::pair{"--batch", flags.batch.has_value() && flags.curve != "ranks"},
                                    {"--max-batch", flags.max_batch.has_value()},
                                    {"--patience", flags.patience.has_value()},
                                    {"--output", !flags.output.empty()}}) {
    require(!given, name, ": says something to --search alone", std::string_view(name) == "--batch" ? ", and to --curve ranks" : "",
            "; add it, or leave this out");
  }
}

/// A curve stands in place of a plan: what else does, or draws one, is refused beside it.
void check_curve(const PlanFlags& flags) {
  if (flags.curve.empty()) return;
  for (const auto& [name, given] : {std::pair{"--explain", flags.explain},
                                    {"--longest", flags.longest},
                                    {"--search", flags.search},
                                    {"--events", flags.events},
                                    {"--layouts", !flags.layouts.empty()},
                                    {"--tokens", !flags.tokens.empty()},
                                    {"--trace", !flags.pictures.trace.empty()},
                                    {"--report", flags.curve != "ranks" && !flags.pictures.report.empty()}}) {
    require(!given, name, ": not beside --curve, which stands in place of the plan; leave one out");
  }
  require(!flags.device.empty() || flags.curve == "memory" || flags.curve == "traffic", "--curve = ", flags.curve,
          ": is of seconds, and those are of a device; add --device NAME");
}

void size_steps(const PlanFlags& flags, Config& config) {
  BatchConfig& batch = config.batch;
  if (flags.batch) batch.global_size = *flags.batch;
  if (flags.max_batch) batch.global_size = *flags.max_batch;
  if (flags.batch || flags.max_batch) batch.per_rank = 0;
  require(!flags.search || batch.per_rank == 0, "batch.per_rank = ", batch.per_rank,
          ": --search chooses the data ranks, too; say with --batch or --max-batch how many sequences a step has");
  require(flags.curve != "ranks" || batch.per_rank == 0, "batch.per_rank = ", batch.per_rank,
          ": --curve ranks is of one step on ever more ranks; say with --batch how many sequences it has");
}

int search_layouts_of(Config config, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const Config asked = config;
  forget_layout(config, flags.sets, "--search");
  size_steps(flags, config);
  const std::vector<std::string> beside = to_unsay(asked, config);
  request.settle(config, 1, precision::Saying::Aloud, flags.world);
  return say_search(config, asked, beside, request);
}

void draw_curve_of(Config config, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const Config asked = config;
  forget_layout(config, flags.sets, "--curve");
  if (flags.curve != "ranks") {  // each point has a step of its own
    config.batch.per_rank = 0;
    config.batch.global_size = 1;
  }
  size_steps(flags, config);
  const std::vector<std::string> beside = to_unsay(asked, config);
  request.settle(config, 1, precision::Saying::Aloud, request.world_or_8());
  if (flags.curve == "ranks") {
    say_scaling(config, beside, request);
  } else {
    say_curves(config, request);
  }
}

}  // namespace tessera::cli
