#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/plan_pictures.h"
#include "tessera/config/detail.h"
#include "tessera/config/settle_batch.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"
#include "tessera/core/text_file.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/products.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/collective_time.h"
#include "tessera/plan/curves.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/explain.h"
#include "tessera/plan/formats.h"
#include "tessera/plan/framework.h"
#include "tessera/plan/longest.h"
#include "tessera/plan/machine.h"
#include "tessera/plan/out_of_memory.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/scaling.h"
#include "tessera/plan/search.h"
#include "tessera/plan/settings.h"
#include "tessera/plan/whole_run.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/compose.h"
#include "tessera/train/inputs.h"

namespace tessera::cli {

namespace {

struct PlanFlags {
  std::string what, device, framework, layouts;
  std::vector<std::string> sets;
  int world = 1;
  bool says_world = false;
  std::optional<int> devices_per_node;
  bool json = false, longest = false, events = false, explain = false, search = false;
  std::optional<int64_t> batch, max_batch, patience;
  std::string output, tokens, curve, svg;
  PlanPictures pictures;
};

/// A file has no name that speaks of a number of parameters, and no source.
plan::Preset planned(const PlanFlags& flags, const std::optional<plan::Framework>& framework) {
  std::vector<std::string> sets = flags.sets;
  if (framework) {
    const int tp = planned(flags, std::nullopt).config.mesh.tp;
    sets = plan::settings_of(*framework, tp);
    sets.insert(sets.end(), flags.sets.begin(), flags.sets.end());
  }
  if (is_there(flags.what)) return {.config = read_config(flags.what, sets)};
  if (auto found = plan::preset(flags.what, sets)) {
    BatchConfig& batch = found->config.batch;
    const auto sizes_the_step = [](const std::string& set) { return set.starts_with("batch.global_size"); };
    if (batch.per_rank > 0 && std::ranges::none_of(flags.sets, sizes_the_step)) batch.global_size = 0;  // the preset's own, which nobody asked for
    resolve(found->config);
    return *found;
  }
  std::string names;
  for (const auto& name : plan::preset_names()) names += " " + name;
  const auto near = nearest(flags.what, plan::preset_names());
  throw ConfigError(detail::concat(flags.what, ": neither a file nor a preset", near.empty() ? "" : "; did you mean " + near + "?", "; presets:", names,
                                   ", or a number of parameters such as 7e9"));
}

/// Above it, lists of ranks alone take longer than anybody waits; the largest machines have a tenth of it.
constexpr int kMostRanks = 1 << 20;

/// One line on standard error, written again and again on a terminal, and every ten seconds elsewhere; nothing of a plan that is done at once. By a thread of
/// its own: a large model takes its time before the dry run has anything to tell.
class ProgressLine {
 public:
  ProgressLine() {
    try {
      thread_ = std::jthread([this](const std::stop_token& stop) { show(stop); });
    } catch (const std::system_error&) {  // no more threads are to be had: then there is no line
    }
  }
  ~ProgressLine() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
    if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
  }
  void operator()(const plan::DryRunProgress& progress) {
    say(fmt::format("kind {} of {} of ranks, step {} of {}: {:2.0f}%", progress.kind, progress.kinds, progress.step, progress.steps, 100 * progress.share));
  }
  void say(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }

 private:
  void show(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    for (auto pause = std::chrono::milliseconds(2000); !ended_.wait_for(lock, stop, pause, [&] { return stop.stop_requested(); });) {
      std::fprintf(stderr, "%splan: %s%s", terminal_ ? "\r" : "", text_.c_str(), terminal_ ? "\033[K" : "\n");
      std::fflush(stderr);
      shown_ = true;
      pause = std::chrono::milliseconds(terminal_ ? 500 : 10000);
    }
  }

  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::string text_ = "laying out the model";
  std::jthread thread_;  // last: it reads the others
};

nlohmann::json json_of(const plan::DryRun& run, const Config& config, const std::optional<plan::Device>& device,
                       const std::optional<plan::Framework>& framework, const std::optional<plan::WholeRun>& all = std::nullopt,
                       const std::optional<plan::Bounds>& bounds = std::nullopt) {
  nlohmann::json json = plan::to_json(run);
  if (bounds) json["bounds"] = plan::to_json(*bounds);
  if (all) json["run"] = plan::to_json(*all);
  json["compute"] = config.precision.compute;  // what auto became
  if (device) json["device"] = device->key;
  if (framework) {
    json["framework"] = framework->key;
    json["reserved_bytes"] = plan::reserved_bytes(*framework, config, run);
    json["context_bytes"] = framework->context_bytes;
    json["unfitted_bytes"] = plan::reserved_bytes(*framework, config, run, /*reserve=*/false);
    if (run.memory_limit > 0) json["fits"] = plan::fits(*framework, config, run);
  }
  return json;
}

std::string text_of(const plan::DryRun& run, const Config& config, const std::optional<plan::Framework>& framework, const std::optional<plan::WholeRun>& all,
                    const std::optional<plan::Bounds>& bounds, int world) {
  plan::DryRun said = run;
  if (framework) said.memory_limit = 0;  // what it reserves is held against the limit, in a line of its own
  std::string text = plan::to_string(said);
  if (bounds) text += "\n" + plan::to_string(*bounds, run.memory_limit);
  if (all) text += "\n" + plan::to_string(*all);
  if (framework) text += plan::verdict_of(*framework, config, run) + "\n";
  if (!run.fits()) text += "\n" + plan::settings_text(plan::find_fit(config, world, run.memory_limit));
  return text;
}

/// What `train` looks at besides the rules of a configuration: patterns that name no module.
void add_remarks(const Config& config, plan::DryRun& run) {
  try {
    check_modules(config, size_along(mesh_shape(config.mesh, config.zero.stage, run.world), mesh_roles(config).layers));
  } catch (const ConfigError& error) {
    run.remarks.emplace_back(error.what());
  }
}

/// A step may need no more than the device has.
void limit_to(const plan::Device& device, Config& config) {
  const auto memory = static_cast<int64_t>(device.memory_bytes);
  int64_t& limit = config.run.memory_limit_bytes;
  limit = limit == 0 ? memory : std::min(limit, memory);
}

plan::Device device_of(const PlanFlags& flags) {
  plan::Device device = plan::find_device(flags.device);
  if (!flags.devices_per_node) return device;
  require(*flags.devices_per_node >= 1, "--devices-per-node = ", *flags.devices_per_node, ": it must be at least 1");
  device.devices_per_node = *flags.devices_per_node;
  return device;
}

/// Of what looks at growing numbers of ranks.
int world_or_8(const PlanFlags& flags) { return flags.says_world ? flags.world : 8; }

void say_explanation(const plan::Preset& of, const PlanFlags& flags) {
  const auto explanation = plan::explain(of.config, of.parameters, world_or_8(flags));
  if (flags.json) {
    std::printf("%s\n", json_text(plan::to_json(explanation), 2).c_str());
    return;
  }
  const std::string source = of.source.empty() ? "" : " (shape: " + of.source + ")";
  std::printf("%s%s: %s\n%s", of.config.name.c_str(), source.c_str(), plan::to_string(explanation).c_str(), plan::to_string(plan::number_formats()).c_str());
}

void say_longest(const plan::LongestSequence& found, const Config& config, bool json) {
  if (json) {
    std::printf("%s\n", json_text(nlohmann::json{{"longest", found.seq_len}, {"peak_bytes", found.peak}, {"limit", config.run.memory_limit_bytes}}).c_str());
  } else {
    std::printf("data.seq_len = %lld: %s of %s a rank at the peak\n", static_cast<long long>(found.seq_len), format_bytes(found.peak).c_str(),
                format_bytes(config.run.memory_limit_bytes).c_str());
  }
  std::fflush(stdout);
}

/// Of the layouts that a search chooses among, what the file says of them is none of its business; who asks for one by --set is told.
void forget_layout(Config& config, const std::vector<std::string>& sets, const std::string& flag) {
  const Config given = config;
  const auto order = config.mesh.order;
  config.mesh = {.order = order};
  config.zero.stage = 0;
  config.recompute = {};
  if (config.offload != OffloadConfig{}) log().warn("{}: offload.* is not looked at, and is left out", flag);
  config.offload = {};
  if (config.tensor.overlap || config.tensor.keep_gathered) log().warn("{}: tensor.overlap and tensor.keep_gathered are not looked at, and are left out", flag);
  config.tensor = {};
  config.pipeline = {};
  config.batch.micro_size = 1;
  for (const std::string& set : sets) {
    const std::string key = set.substr(0, set.find('='));
    if (detail::value_text(given, key) != detail::value_text(config, key))
      log().warn("{0}: {1} is what it goes over, and `--set {2}` is left out", flag, key, set);
  }
}

/// What data ranks there will be is not known before a layout is chosen.
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

/// Powers of two up to the largest, and that.
std::vector<int64_t> batches_up_to(int64_t largest) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < largest; size *= 2) sizes.push_back(size);
  sizes.push_back(largest);
  return sizes;
}

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

/// The best layout's own plan, with all that a picture needs.
void draw_search(const plan::LayoutSearch& found, const Config& winner, const PlanFlags& flags, const plan::Device& device, const plan::Machine& machine) {
  const auto run = plan::dry_run(winner, found.world, {.machine = machine, .history = true});
  nlohmann::json json = json_of(run, winner, device, std::nullopt);
  json["search"] = plan::to_json(found);
  flags.pictures.write({.config = winner, .run = run, .device = &device, .search = &found, .json = std::move(json)});
}

/// `micro_size` is that of the run as it was given. Exit code 0 where something fits, else 1: a script asks for a layout and needs to know.
int say_search(const Config& config, int64_t micro_size, const PlanFlags& flags, const plan::Device& device, const plan::Machine& machine) {
  const auto found = [&] {
    ProgressLine line;
    plan::SearchOptions options{.micro_size = micro_size, .progress = [&](const std::string& text) { line.say(text); }};
    if (flags.max_batch) options.batches = batches_up_to(*flags.max_batch);
    if (flags.patience) options.patience = std::chrono::seconds(*flags.patience);
    return plan::search_layouts(config, flags.world, machine, options);
  }();
  const plan::Tried* best = found.best();
  std::string text = flags.json ? json_text(plan::to_json(found), 2) + "\n" : plan::to_string(found);
  if (best != nullptr && !flags.json) text += "\n" + plan::flags_of(plan::settings_of(best->choice, found.world)) + "\n";
  if (best != nullptr && !flags.output.empty()) {
    Config winner = plan::with_settings(config, plan::settings_of(best->choice, found.world));
    winner.run.memory_limit_bytes = 0;  // the device's own
    write_text_file("--output " + flags.output, flags.output, to_toml(winner));
    if (!flags.json) text += flags.output + ": written\n";
  }
  if (best != nullptr && flags.pictures.asked()) {
    draw_search(found, plan::with_settings(config, plan::settings_of(best->choice, found.world)), flags, device, machine);
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  if (best == nullptr) std::fputs("tessera: --search: no layout was found that fits; standard output says what was tried\n", stderr);
  return best != nullptr ? 0 : 1;
}

/// Of the layout at the knee, or of the last that does, a picture; text or JSON of all.
void say_scaling(const Config& config, const PlanFlags& flags, const plan::Device& device, const plan::Machine& machine) {
  const plan::Scaling scaling = [&] {
    ProgressLine line;
    return plan::strong_scaling(config, machine, {.world = world_or_8(flags), .progress = [&](const std::string& text) { line.say(text); }});
  }();
  if (!flags.svg.empty()) write_text_file("--svg " + flags.svg, flags.svg, plan::svg_of(plan::curves_of(scaling)));
  nlohmann::json json = plan::to_json(scaling);
  if (!flags.pictures.report.empty()) {
    const plan::Scaling::Point* drawn = nullptr;
    for (const auto& point : scaling.points) {
      if (point.whole && (!scaling.knee || point.ranks <= *scaling.knee)) drawn = &point;
    }
    const Config at = plan::with_settings(config, plan::settings_of(drawn->whole->choice, drawn->ranks));
    const auto run = plan::dry_run(at, drawn->ranks, {.machine = machine, .history = true});
    nlohmann::json page = json_of(run, at, device, std::nullopt);
    page["scaling"] = json;
    flags.pictures.write({.config = at, .run = run, .device = &device, .scaling = &scaling, .json = std::move(page)});
  }
  std::fputs((flags.json ? json_text(json, 2) + "\n" : plan::to_string(scaling)).c_str(), stdout);
}

/// A step's size, as the layout, is each point's own.
void say_curves(const Config& config, const PlanFlags& flags, const std::optional<plan::Machine>& machine) {
  const plan::Curves curves = [&] {
    ProgressLine line;
    return plan::make_curves(config, flags.curve,
                             {.world = world_or_8(flags), .machine = machine, .progress = [&](const std::string& text) { line.say(text); }});
  }();
  if (!flags.svg.empty()) write_text_file("--svg " + flags.svg, flags.svg, plan::svg_of(curves));
  std::fputs((flags.json ? json_text(plan::to_json(curves), 2) + "\n" : plan::to_string(curves)).c_str(), stdout);
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

/// Before anything is computed for them; of all flags together, and over nothing that the command reads.
void check_outputs(const PlanFlags& flags, const Config& config) {
  std::vector<std::string> inputs = inputs_of(config);
  inputs.insert(inputs.end(), {flags.what, flags.device, flags.framework});
  auto outputs = flags.pictures.files();
  outputs.insert(outputs.end(), {{"--output", flags.output}, {"--svg", flags.svg}});
  check_output_files(outputs, inputs);
}

/// Sizes that are left to the world (-1) as they come out: what frameworks hold is divided by them.
void settle_mesh(Config& config, int world) {
  for (const auto& [axis, size] : resolve_mesh(config.mesh, config.zero.stage, world)) {
    if (axis == "tp") config.mesh.tp = size;
    if (axis == "cp") config.mesh.cp = size;
    if (axis == "pp") config.mesh.pp = size;
  }
}

plan::Machine machine_for(const plan::Device& device, const std::optional<plan::Framework>& framework, const Config& config) {
  plan::Machine machine = plan::machine_of(device);
  const auto tf32 = device.flops_per_s.find("tf32");
  if (config.precision.compute == "tf32" && tf32 != device.flops_per_s.end()) machine.device.flops[at::kFloat] = tf32->second;
  return framework ? plan::driven(*framework, config, machine) : machine;
}

/// Guards that a plan of this framework opens, on this thread.
std::unique_ptr<kernels::WholeLogitsGuard> logits_of(const std::optional<plan::Framework>& framework) {
  return framework && framework->whole_logits ? std::make_unique<kernels::WholeLogitsGuard>() : nullptr;
}

/// What a file has a line of each; refused as a whole where one of them is no layout.
std::vector<nlohmann::json> layouts_in(const std::string& path) {
  const auto refuse_unless = [&](bool good, const std::string& what) {
    require(good, "--layouts = ", path, ": ", what, R"(; give a file with a layout a line, such as {"world": 8, "set": ["mesh.tp=2"]})");
  };
  refuse_unless(is_there(path), "no such file");
  refuse_unless(std::filesystem::is_regular_file(path), "is not a regular file");
  std::vector<nlohmann::json> layouts;
  std::istringstream file(read_text_file("--layouts = " + path, path));
  for (std::string line; std::getline(file, line);) {
    const auto number = layouts.size() + 1;
    auto layout = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    refuse_unless(layout.is_object() && layout.value("set", nlohmann::json::array()).is_array() && layout.value("world", nlohmann::json(1)).is_number_integer(),
                  detail::concat("line ", number, " is no layout"));
    for (const auto& [key, value] : layout.items()) {
      const bool known = key == "world" || key == "set" || key == "all_reduce";
      refuse_unless(known, detail::concat("line ", number, " has ", json_text(nlohmann::json(key)), ", which is none of world, set and all_reduce"));
    }
    refuse_unless(!layout.contains("all_reduce") || !layout.contains("set"),
                  detail::concat("line ", number, " has all_reduce, which is a collective alone, beside set, which is of a step"));
    layouts.push_back(std::move(layout));
  }
  refuse_unless(!layouts.empty(), "is empty");
  return layouts;
}

/// {"all_reduce": bytes, "world": 8}: what a collective takes alone.
nlohmann::json all_reduce_json(const nlohmann::json& asked, int world, const plan::Device& device) {
  constexpr int64_t most = 1'000'000'000'000'000;
  const int64_t bytes = to_integer(asked, "--layouts: the bytes of all_reduce", 0, most);
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  const CollectiveEvent call{
      .op = "all_reduce", .group_size = world, .bytes = bytes, .sent_bytes = 2 * (bytes / world * (world - 1) + bytes % world * (world - 1) / world)};
  const plan::Machine machine = plan::machine_of(device);
  return {{"seconds", plan::collective_cost(call, plan::placement_of(ranks, machine.devices_per_host), machine).seconds()}};
}

/// One line of JSON for each layout: what `--json` has of a run, but for its ranks; or why it is refused.
void say_layouts(const PlanFlags& flags, const std::optional<plan::Device>& device, const std::optional<plan::Framework>& framework) {
  const auto layouts = layouts_in(flags.layouts);
  const bool takes_world = std::ranges::any_of(layouts, [](const nlohmann::json& layout) { return !layout.contains("world"); });
  require(!flags.says_world || takes_world, "--world = ", flags.world, ": each line of --layouts = ", flags.layouts, " says its own; leave --world out");
  for (const nlohmann::json& layout : layouts) {
    nlohmann::json answer;
    try {
      PlanFlags one = flags;
      if (layout.contains("world")) one.world = static_cast<int>(to_integer(layout["world"], "--layouts: world", 1, kMostRanks));
      if (layout.contains("all_reduce")) {
        require(device.has_value(), "--layouts: all_reduce: takes its time on a device; give --device");
        std::printf("%s\n", json_text(all_reduce_json(layout["all_reduce"], one.world, *device)).c_str());
        continue;
      }
      for (const auto& set : layout.value("set", nlohmann::json::array())) one.sets.push_back(set.is_string() ? set.get<std::string>() : set.dump());
      Config config = planned(one, framework).config;
      if (device) limit_to(*device, config);
      settle_batch(config, one.world);
      validate(config, one.world, Purpose::Plan);
      if (framework) settle_mesh(config, one.world);
      precision::settle_compute(config, at::kMeta, precision::Saying::Silent);
      const auto machine = device ? std::optional(machine_for(*device, framework, config)) : std::nullopt;
      plan::DryRun run = plan::dry_run(config, one.world, {.machine = machine});
      add_remarks(config, run);
      answer = json_of(run, config, device, framework);
      int64_t peak = 0;
      for (const auto& ranks : answer["ranks"]) peak = std::max(peak, ranks["peak_bytes"]["total"].get<int64_t>());
      answer["peak_bytes"] = peak;
      answer.erase("ranks");
      answer.erase("pipeline");
    } catch (const std::exception& error) {
      answer = {{"refused", error.what()}};
    }
    std::printf("%s\n", json_text(answer).c_str());
    std::fflush(stdout);
  }
}

}  // namespace

void add_plan(Command app, int& exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  auto command = app.add_command("plan", "What a run needs on each rank, from a dry run of its very step");
  command.add_option("what", flags->what, "Configuration (TOML), or the name of a preset").required();
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
    std::optional<plan::Framework> framework;
    if (!flags->framework.empty()) framework = plan::find_framework(flags->framework);
    const auto logits = logits_of(framework);
    std::optional<plan::Device> device;
    if (!flags->device.empty()) device = device_of(*flags);
    std::optional<kernels::Fp16ProductsGuard> halves;  // of a device; a CPU's file has no rate of them
    if (device && device->flops_per_s.contains("fp16")) halves.emplace();
    if (!flags->layouts.empty()) {
      require(!flags->explain && !flags->longest && !flags->search && !flags->events,
              "--layouts: plans each of them; leave out what stands in place of a plan");
      require(!flags->pictures.asked() && flags->tokens.empty(), "--layouts: plans each of them, in a line; leave out --report, --trace and --tokens");
      const kernels::Bf16ProductsGuard accelerated(/*native=*/true);
      say_layouts(*flags, device, framework);
      exit_code = 0;
      return;
    }
    plan::Preset what = planned(*flags, framework);
    Config& config = what.config;
    check_outputs(*flags, config);
    if (device) limit_to(*device, config);
    const double tokens = flags->tokens.empty() ? 0 : plan::parse_tokens(flags->tokens);
    require(!flags->explain || !flags->longest, "--explain and --longest: each stands in place of the plan; give one");
    const int64_t micro_size = config.batch.micro_size;
    if (flags->search) forget_layout(config, flags->sets, "--search");
    if (!flags->curve.empty()) {
      forget_layout(config, flags->sets, "--curve");
      if (flags->curve != "ranks") {  // each point has a step of its own
        config.batch.per_rank = 0;
        config.batch.global_size = 1;
      }
    }
    size_steps(*flags, config);
    const int world = flags->explain || flags->search || !flags->curve.empty() ? 1 : flags->world;
    settle_batch(config, world);
    validate(config, world, Purpose::Plan);
    if (framework) settle_mesh(config, world);
    // A file is planned for this machine, as train would run it, or for the device that is named; a preset, which no CPU trains, and another framework's step,
    // for one that multiplies what it names.
    std::optional<kernels::Bf16ProductsGuard> accelerator;
    if (!is_there(flags->what) || framework || (device && device->flops_per_s.contains("bf16"))) accelerator.emplace(/*native=*/true);
    precision::settle_compute(config, at::kMeta);
    if (flags->explain) {
      say_explanation(what, *flags);
      exit_code = 0;
      return;
    }
    if (flags->search) {
      exit_code = say_search(config, micro_size, *flags, *device, machine_for(*device, framework, config));
      return;
    }
    if (flags->curve == "ranks") {
      say_scaling(config, *flags, *device, machine_for(*device, framework, config));
      exit_code = 0;
      return;
    }
    if (!flags->curve.empty()) {
      say_curves(config, *flags, device ? std::optional(machine_for(*device, framework, config)) : std::nullopt);
      exit_code = 0;
      return;
    }
    if (flags->longest) {
      say_longest(plan::longest_sequence(config, flags->world), config, flags->json);
      exit_code = 0;
      return;
    }
    std::optional<plan::Bounds> bounds;
    auto run = [&] {
      ProgressLine line;
      const auto machine = device ? std::optional(machine_for(*device, framework, config)) : std::nullopt;
      const plan::DryRunOptions options{.events = flags->events, .machine = machine, .history = !flags->pictures.report.empty(), .progress = std::ref(line)};
      plan::DryRun planned = plan::dry_run(config, flags->world, options);
      if (!framework) bounds = plan::find_bounds(config, planned, options);
      return planned;
    }();
    add_remarks(config, run);
    const int64_t steps = tokens > 0 ? plan::steps_for(run, tokens) : is_there(flags->what) ? config.run.steps : 0;  // a preset has no end of its own
    std::optional<plan::WholeRun> all;
    if (steps > 0) all = plan::whole_run(run, steps, device ? device->drawn_w() : std::nullopt);
    const nlohmann::json json = json_of(run, config, device, framework, all, bounds);
    std::string text = flags->json ? json_text(json, 2) + "\n" : text_of(run, config, framework, all, bounds, flags->world);
    if (flags->pictures.asked()) {
      flags->pictures.write({.config = config,
                             .run = run,
                             .device = device ? &*device : nullptr,
                             .framework = framework ? &*framework : nullptr,
                             .bounds = bounds,
                             .json = json});
    }
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
