#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/plan_layouts.h"
#include "cli/plan_request.h"
#include "cli/plan_search.h"
#include "cli/progress_line.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/curves.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/explain.h"
#include "tessera/plan/formats.h"
#include "tessera/plan/longest.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/settings.h"
#include "tessera/plan/whole_run.h"

namespace tessera::cli {

namespace {

std::string text_of(const plan::DryRunProgress& progress) {
  return fmt::format("kind {} of {} of ranks, step {} of {}: {:2.0f}%", progress.kind, progress.kinds, progress.step, progress.steps, 100 * progress.share);
}

std::string text_of(const plan::DryRun& run, const Config& config, const std::optional<plan::Framework>& framework, const std::optional<plan::WholeRun>& all,
                    const std::optional<plan::Bounds>& bounds, int world) {
  plan::DryRun said = run;
  if (framework) said.memory_limit = 0;  // what it reserves is held against the limit, in a line of its own
  std::string text = plan::to_string(said);
  if (bounds) text += "\n" + plan::to_string(*bounds, run.memory_limit);
  if (all) text += "\n" + plan::to_string(*all);
  if (framework) text += plan::verdict_of(*framework, config, run) + "\n";
  if (!run.fits()) text += "\n" + plan::settings_text(plan::find_fit(config, world, run.memory_limit, plan::kFitPatience, run.allocator));
  return text;
}

void say_explanation(plan::Preset of, const PlanRequest& request) {
  Config& config = of.config;  // of one rank, whatever the mesh
  config.mesh = {.order = config.mesh.order};
  config.zero.stage = 0;
  config.pipeline = {};
  config.tensor = {};
  config.offload = {};
  std::vector<std::string> left_out;  // by the file or by --set
  for (const std::string& key : config.given) {
    const bool is_of_layout = std::ranges::any_of(std::vector<std::string_view>{"mesh.", "zero.", "pipeline.", "tensor.", "offload."},
                                                  [&](std::string_view section) { return key.starts_with(section); });
    if (is_of_layout) left_out.push_back(key);
  }
  request.settle(config, 1);
  auto explanation = plan::explain(config, of.parameters, request.world_or_8(), request.allocator_of(config));
  explanation.left_out = std::move(left_out);
  if (request.flags().json) {
    std::printf("%s\n", json_text(plan::to_json(explanation), 2).c_str());
    return;
  }
  const std::string source = of.source.empty() ? "" : " (shape: " + of.source + ")";
  std::printf("%s%s: %s\n%s", config.name.c_str(), source.c_str(), plan::to_string(explanation).c_str(), plan::to_string(plan::number_formats()).c_str());
}

void say_longest(const plan::LongestSequence& found, const Config& config, bool json) {
  if (json) {
    std::printf("%s\n",
                json_text(nlohmann::json{
                              {"longest", found.seq_len}, {"peak_bytes", found.peak}, {"needed_bytes", found.needed}, {"limit", config.run.memory_limit_bytes}})
                    .c_str());
  } else {
    std::printf("data.seq_len = %lld: %s of %s a rank at the peak\n", static_cast<long long>(found.seq_len), format_bytes(found.needed).c_str(),
                format_bytes(config.run.memory_limit_bytes).c_str());
  }
  std::fflush(stdout);
}

/// One configuration's plan; `tokens` of its whole run, 0: not said.
void say_plan(const Config& config, double tokens, const PlanRequest& request) {
  const PlanFlags& flags = request.flags();
  const auto& [device, framework] = std::tie(request.device(), request.framework());
  std::optional<plan::Bounds> bounds;
  auto run = [&] {
    ProgressLine line;
    plan::DryRunOptions options = request.dry_options(config);
    options.events = flags.events;
    options.history = !flags.pictures.report.empty();
    options.progress = [&](const plan::DryRunProgress& progress) { line.say(text_of(progress)); };
    plan::DryRun planned = plan::dry_run(config, flags.world, options);
    if (!framework) bounds = plan::find_bounds(config, planned, options);
    return planned;
  }();
  add_remarks(config, run);
  const int64_t steps = tokens > 0 ? plan::steps_for(run, tokens) : is_there(flags.what) ? config.run.steps : 0;  // a preset has no end of its own
  std::optional<plan::WholeRun> all;
  if (steps > 0) all = plan::whole_run(run, steps, device ? device->drawn_w() : std::nullopt);
  const nlohmann::json json = json_of(run, config, device, framework, all, bounds);
  const std::string text = flags.json ? json_text(json, 2) + "\n" : text_of(run, config, framework, all, bounds, flags.world);
  if (flags.pictures.asked()) {
    flags.pictures.write(
        {.config = config, .run = run, .device = device ? &*device : nullptr, .framework = framework ? &*framework : nullptr, .bounds = bounds, .json = json});
  }
  std::fputs(text.c_str(), stdout);
}

/// Before anything is computed for them; of all flags together, and over nothing that the command reads.
void check_outputs(const PlanFlags& flags, const Config& config) {
  std::vector<std::string> inputs = inputs_of(config);
  inputs.insert(inputs.end(), {flags.what, flags.device, flags.framework});
  auto outputs = flags.pictures.files();
  outputs.insert(outputs.end(), {{"--output", flags.output}, {"--svg", flags.svg}});
  check_output_files(outputs, inputs);
}

}  // namespace

void add_plan(Command app, int& exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  auto command = app.add_command("plan", "What a run needs on each rank, from a dry run of its very step");
  command.add_option("configuration", flags->what, "Configuration (TOML), or the name of a preset").required();
  auto world_option = command.add_option("--world", flags->world, "Ranks").shows_default();
  command.add_option("--set", flags->sets, "key=value, over the file; may be given again").one_at_a_time();
  command.add_flag("--json", flags->json, "Print JSON");
  command.add_flag("--longest", flags->longest, "The longest sequence with which every rank keeps within run.memory_limit_bytes, in place of the plan");
  command.add_option("--device", flags->device,
                     "The device of each rank: what fits in its memory, and how long a step takes; a name, or a file like those of tessera/plan/hardware");
  command.add_option("--framework", flags->framework, "Whose step it is, in place of ours: a name, or a file like those of tessera/plan/frameworks");
  command.add_option("--layouts", flags->layouts,
                     "A file of layouts, one JSON object a line, such as {\"world\": 8, \"set\": [\"mesh.tp=2\"]}: a line for each");
  command.add_option("--devices-per-node", flags->devices_per_node, "Devices of a node, in place of what --device says").needs("--device");
  command.add_option("--tokens", flags->tokens,
                     "Of the whole run, such as 15T, in place of run.steps: steps and, with --device, days, device hours and energy");
  command.add_flag("--explain", flags->explain, "Where the memory goes, number by number, in place of the plan");
  command.add_flag("--events", flags->events, "With --json: all that each kind of rank does in a step, and what each event waits for").needs("--json");
  command
      .add_flag("--search", flags->search,
                "Which layout to train in: mesh, zero.stage, recompute.mode, schedule and micro-batch, by dry runs, in place of the plan")
      .needs("--device");
  command.add_option("--batch", flags->batch, "With --search and --curve ranks: sequences of a step (batch.global_size)");
  command.add_option("--max-batch", flags->max_batch, "With --search: the step is chosen, too, of powers of two up to this; the fastest for a token is first");
  command.add_option("--patience", flags->patience, "With --search: seconds after which no further layout is run dry (20)");
  command.add_option("-o,--output", flags->output, "With --search: where the configuration of the best goes (TOML)");
  command.add_option("--curve", flags->curve, "How a figure grows, of dry runs up to --world (8) ranks, in place of the plan").one_of(plan::curve_names());
  command.add_option("--svg", flags->svg, "With --curve: draw it").needs("--curve");
  flags->pictures.add_options(command);
  command.when_chosen([flags, world_option, &exit_code] {
    flags->says_world = world_option.given();
    check_search(*flags);
    check_curve(*flags);
    require(!flags->pictures.asked() || !(flags->explain || flags->longest), "--report and --trace: draw a plan; leave out --explain and --longest");
    require(!flags->events || !(flags->explain || flags->longest), "--events: are those of a plan; leave out --explain and --longest");
    flags->pictures.check(!flags->device.empty());
    require(flags->world >= 1, "--world = ", flags->world, ": it must be at least 1");
    require(flags->world <= kMostRanks, "--world = ", flags->world, ": a plan is made for at most ", kMostRanks, " ranks; name fewer");
    const PlanRequest request(*flags);
    exit_code = 0;
    if (!flags->layouts.empty()) {
      require(!flags->explain && !flags->longest && !flags->search && !flags->events,
              "--layouts: plans each of them; leave out what stands in place of a plan");
      require(!flags->pictures.asked() && flags->tokens.empty(), "--layouts: plans each of them, in a line; leave out --report, --trace and --tokens");
      say_layouts(request);
      return;
    }
    plan::Preset what = request.read(flags->sets, flags->world);
    Config& config = what.config;
    check_outputs(*flags, config);
    const double tokens = flags->tokens.empty() ? 0 : plan::parse_tokens(flags->tokens);
    require(!flags->explain || !flags->longest, "--explain and --longest: each stands in place of the plan; give one");
    if (flags->explain) {
      say_explanation(std::move(what), request);
    } else if (flags->search) {
      exit_code = search_layouts_of(config, request);
    } else if (!flags->curve.empty()) {
      draw_curve_of(config, request);
    } else {
      request.settle(config, flags->world);
      if (flags->longest) {
        say_longest(plan::longest_sequence(config, flags->world, request.allocator_of(config)), config, flags->json);
      } else {
        say_plan(config, tokens, request);
      }
    }
  });
}

}  // namespace tessera::cli
