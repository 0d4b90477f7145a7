#include "tessera/plan/curves.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log_plot.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/scaling.h"
#include "tessera/plan/settings.h"

// A curve is a table of settings: for each line and each x, what is set over the bare model. All else is the dry run's.

namespace tessera::plan {
namespace {

using Sets = std::vector<std::string>;

/// One line: its name, and what is set at x.
struct Way {
  std::string name;
  std::function<Sets(int64_t x)> sets;
};

/// A panel before it is run.
struct Asked {
  std::string title, x;
  Curves::Unit unit = Curves::Unit::Bytes;
  std::vector<Way> ways;
  std::vector<int64_t> at;
  std::function<int(int64_t x)> ranks;
};

Sets joined(Sets sets, const Sets& more) {
  sets.insert(sets.end(), more.begin(), more.end());
  return sets;
}

std::string set_to(const std::string& key, int64_t value) { return key + "=" + std::to_string(value); }
Sets step_of(int64_t sequences, int64_t micro) { return {set_to("batch.global_size", sequences), set_to("batch.micro_size", micro)}; }

/// At most five, by equal factors of two down from the last one, and 1.
std::vector<int64_t> counts_up_to(int64_t last) {
  int doublings = 0;
  while ((int64_t{2} << doublings) <= last) ++doublings;
  const int64_t factor = int64_t{1} << std::max(1, (doublings + 3) / 4);
  std::vector<int64_t> counts;
  for (int64_t count = last; count > 1; count /= factor) counts.push_back(count);
  counts.push_back(1);
  std::ranges::reverse(counts);
  return counts;
}

double value_of(const DryRun& run, const std::string& name) {
  if (name == "memory") return static_cast<double>(needed_bytes(largest_class(run)));
  if (run.time) return run.time->seconds;
  int64_t most = 0;
  for (const RankClass& ranks : run.ranks) {
    int64_t sent = 0;
    for (const CollectiveSum& sum : ranks.collectives) sent += sum.sent_bytes;
    most = std::max(most, sent);
  }
  return static_cast<double>(most);
}

Asked memory_panel(const Config& config, const CurveOptions& options) {
  const int64_t micro = config.batch.micro_size;
  Asked asked{
      .title = "peak memory of a rank, over ranks", .x = "ranks", .at = counts_up_to(options.world), .ranks = [](int64_t x) { return static_cast<int>(x); }};
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string name = stage == 0 ? "DDP" : fmt::format("ZeRO {}{}", stage, stage == 3 ? " (FSDP)" : "");
    asked.ways.push_back({name, [stage, micro](int64_t ranks) { return joined({set_to("zero.stage", stage)}, step_of(ranks * micro, micro)); }});
  }
  return asked;
}

Asked latency_panel(const CurveOptions& options) {
  Asked asked{
      .title = "step of one sequence, over ranks", .x = "ranks", .unit = Curves::Unit::Seconds, .at = counts_up_to(options.world), .ranks = [](int64_t x) {
        return static_cast<int>(x);
      }};
  for (const auto& [name, axis] : {std::pair("tensor parallel", "mesh.tp"), std::pair("pipeline", "mesh.pp"), std::pair("context parallel", "mesh.cp")}) {
    asked.ways.push_back({name, [axis = std::string(axis)](int64_t ranks) {
                            return joined(
                                {set_to(axis, ranks), ranks > 1 && axis == "mesh.tp" ? "tensor.sequence_parallel=true" : "tensor.sequence_parallel=false"},
                                step_of(1, 1));
                          }});
  }
  return asked;
}

/// Tensor parallelism stays inside a host; hosts share what is left by FSDP.
Sets inside_hosts(int world, int tp) {
  Sets sets{set_to("mesh.tp", tp), "tensor.sequence_parallel=true"};
  if (world > tp) sets.emplace_back("zero.stage=3");
  return sets;
}

Asked batch_panel(const CurveOptions& options) {
  const int world = options.world, tp = std::gcd(world, options.machine ? options.machine->devices_per_host : 8);
  Asked asked{.title = fmt::format("step of {} ranks, over its sequences", world),
              .x = "sequences",
              .unit = Curves::Unit::Seconds,
              .at = counts_up_to(8 * int64_t{world}),
              .ranks = [world](int64_t) { return world; }};
  for (const auto& [name, stage] : {std::pair("DDP", 0), std::pair("ZeRO 1", 1), std::pair("ZeRO 3 (FSDP)", 3)}) {
    asked.ways.push_back({name, [stage](int64_t sequences) { return joined({set_to("zero.stage", stage)}, step_of(sequences, 1)); }});
  }
  asked.ways.push_back({fmt::format("tensor parallel {}{}", tp, world > tp ? " x FSDP" : ""), [world, tp](int64_t sequences) {
                          const int64_t share = std::max<int64_t>(1, sequences * tp / world);  // of a group of tp ranks
                          return joined(inside_hosts(world, tp), step_of(sequences, std::gcd(share, int64_t{tp})));
                        }});
  asked.ways.push_back({"pipeline", [world](int64_t sequences) { return joined({set_to("mesh.pp", world)}, step_of(sequences, 1)); }});
  return asked;
}

/// One micro-batch for all: each data rank has its part of it, ranks that layers are cut over have all of it.
std::vector<Way> senders(int world, const std::function<Sets(int64_t x)>& model, const std::function<int64_t(int64_t x)>& sequences) {
  const auto way = [&](const std::string& name, const Sets& layout, int64_t micro_batches) {
    return Way{name, [=](int64_t x) {
                 const int64_t step = sequences(x);
                 return joined(joined(layout, model(x)), step_of(step, std::max<int64_t>(1, step / micro_batches)));
               }};
  };
  return {way("DDP: gradients", {"zero.stage=0"}, world), way("FSDP: weights, gradients", {"zero.stage=3"}, world),
          way("tensor parallel: activations", {set_to("mesh.tp", world), "tensor.sequence_parallel=true"}, 1),
          way("pipeline: activations", {set_to("mesh.pp", world)}, world)};
}

std::vector<Asked> traffic_panels(const Config& config, const CurveOptions& options) {
  const int world = options.world;
  const auto ranks = [world](int64_t) { return world; };
  std::vector<int64_t> sequences, sizes;
  for (const int factor : {1, 2, 4, 8}) sequences.push_back(int64_t{factor} * world);
  const ModelConfig& model = config.model;
  const int64_t keys = model.kv_heads.value_or(model.heads), inner = model.ffn_dim.value_or(0);
  for (const int64_t factor : {1, 2, 4, 8}) {  // quarters of the model's own
    const auto whole = {model.dim, model.heads, keys, inner};
    if (std::ranges::all_of(whole, [&](int64_t size) { return size * factor % 4 == 0; })) sizes.push_back(model.dim * factor / 4);
  }
  const auto wider = [=, dim = model.dim, heads = model.heads](int64_t size) {
    Sets sets{set_to("model.dim", size), set_to("model.heads", heads * size / dim), set_to("model.kv_heads", keys * size / dim)};
    if (inner > 0) sets.push_back(set_to("model.ffn_dim", inner * size / dim));
    return sets;
  };
  return {{.title = fmt::format("sent by each of {} ranks, over sequences", world),
           .x = "sequences",
           .ways = senders(
               world, [](int64_t) { return Sets{}; }, [](int64_t x) { return x; }),
           .at = std::move(sequences),
           .ranks = ranks},
          {.title = fmt::format("sent in a step of {} sequences, over hidden size", world),
           .x = "hidden size",
           .ways = senders(world, wider, [world](int64_t) { return int64_t{world}; }),
           .at = std::move(sizes),
           .ranks = ranks}};
}

/// Whether a step has too few micro-batches for all data ranks, as none that is trained has.
bool has_idle_ranks(const Config& config, int world) {
  const MeshShape mesh = mesh_shape(config.mesh, config.zero.stage, world);
  return config.batch.global_size < config.batch.micro_size * size_along(mesh, mesh_roles(config).batch);
}

/// What a panel has of each line at each x. `refusal` is the last one.
Curves::Panel run_panel(const Config& config, const Asked& asked, const std::string& name, const CurveOptions& options, std::string& refusal) {
  Curves::Panel panel{.title = asked.title, .x = asked.x, .unit = asked.unit};
  DryRunOptions dry{.allocator = options.allocator, .alike_stages = true, .exact_ranks = 0};
  if (asked.unit == Curves::Unit::Seconds) dry.machine = options.machine;
  for (const Way& way : asked.ways) {
    Curves::Line line{.name = way.name};
    for (const int64_t x : asked.at) {
      if (options.progress) options.progress(fmt::format("{}, {} {}", way.name, x, asked.x));
      try {
        Config at = with_settings(config, way.sets(x));
        validate(at, asked.ranks(x), Purpose::Plan);
        if (name == "batch" && has_idle_ranks(at, asked.ranks(x))) continue;
        if (dry.machine && options.driven) dry.machine = options.driven(at);
        const double value = value_of(dry_run(at, asked.ranks(x), dry), name);
        if (value > 0) line.points.emplace_back(static_cast<double>(x), value);
      } catch (const ConfigError& error) {
        refusal = error.what();
      }
    }
    if (!line.points.empty()) panel.lines.push_back(std::move(line));
  }
  return panel;
}

std::string cell_of(const Curves::Panel& panel, double value) {
  if (panel.unit == Curves::Unit::Seconds) return format_duration(value);
  return panel.unit == Curves::Unit::Bytes ? format_bytes(static_cast<int64_t>(value)) : format_count(value);
}

std::string_view name_of(Curves::Unit unit) { return unit == Curves::Unit::Seconds ? "seconds" : unit == Curves::Unit::Bytes ? "bytes" : "tokens_per_second"; }

std::string upwards(const Curves& curves, Curves::Unit unit) {
  if (unit == Curves::Unit::Seconds) return "time of a step";
  if (unit == Curves::Unit::TokensPerSecond) return "tokens per second";
  return curves.name == "traffic" ? "bytes sent" : "peak memory";
}

std::set<double> columns_of(const Curves::Panel& panel) {
  std::set<double> at;
  for (const auto& line : panel.lines) {
    for (const auto& [x, y] : line.points) at.insert(x);
  }
  return at;
}

}  // namespace

std::vector<std::string> curve_names() { return {"memory", "latency", "batch", "traffic", "ranks"}; }

Curves make_curves(const Config& config, const std::string& name, const CurveOptions& options) {
  const auto names = curve_names();
  require(std::ranges::find(names, name) != names.end(), "--curve = ", name, ": no such curve; choose one of memory, latency, batch, traffic, ranks");
  const bool timed = name == "latency" || name == "batch" || name == "ranks";
  require(!timed || options.machine, "--curve = ", name, ": is of seconds, and those are of a device; add --device NAME");
  check_curve_world(options.world);
  if (name == "ranks")
    return curves_of(strong_scaling(config, *options.machine, {.world = options.world, .driven = options.driven, .progress = options.progress}));
  std::vector<Asked> panels;
  if (name == "memory") panels = {memory_panel(config, options)};
  if (name == "latency") panels = {latency_panel(options)};
  if (name == "batch") panels = {batch_panel(options)};
  if (name == "traffic") panels = traffic_panels(config, options);
  Curves curves{.name = name};
  std::string refusal;
  for (const Asked& asked : panels) {
    Curves::Panel panel = run_panel(config, asked, name, options, refusal);
    if (panel.lines.empty()) continue;
    if (name == "memory" && config.run.memory_limit_bytes > 0) panel.limit = static_cast<double>(config.run.memory_limit_bytes);
    curves.panels.push_back(std::move(panel));
  }
  require(!curves.panels.empty(), "--curve = ", name, ": this model has none, for no layout of it can be planned: ", refusal);
  return curves;
}

std::string to_string(const Curves& curves) {
  std::string out;
  for (const Curves::Panel& panel : curves.panels) {
    const auto columns = columns_of(panel);
    out += fmt::format("{}{}\n{:<30}", out.empty() ? "" : "\n", panel.title, panel.x);
    for (const double x : columns) out += fmt::format("{:>11}", fmt::format("{:.0f}", x));
    out += "\n";
    for (const auto& line : panel.lines) {
      out += fmt::format("{:<30}", line.name);
      for (const double x : columns) {
        const auto point = std::ranges::find(line.points, x, &std::pair<double, double>::first);
        out += fmt::format("{:>11}", point == line.points.end() ? "-" : cell_of(panel, point->second));
      }
      out += "\n";
    }
    if (panel.limit) out += fmt::format("{:<30}{:>11}\n", "the device has", cell_of(panel, *panel.limit));
  }
  return out;
}

nlohmann::json to_json(const Curves& curves) {
  nlohmann::json panels = nlohmann::json::array();
  for (const Curves::Panel& panel : curves.panels) {
    nlohmann::json lines = nlohmann::json::array();
    for (const auto& line : panel.lines) lines.push_back({{"name", line.name}, {"points", line.points}});
    panels.push_back({{"title", panel.title}, {"x", panel.x}, {"y", name_of(panel.unit)}, {"lines", std::move(lines)}});
    if (panel.limit) panels.back()["limit"] = *panel.limit;
  }
  return {{"curve", curves.name}, {"panels", std::move(panels)}};
}

std::string svg_of(const Curves& curves) {
  constexpr double margin = 24, gap = 24, legend_width = 230, legend_line = 18;
  const auto panels = static_cast<double>(curves.panels.size());
  Svg svg(2 * margin + panels * (LogPlot::width + gap) + legend_width, 2 * margin + LogPlot::height);
  std::vector<std::string> names;
  double left = margin;
  for (const Curves::Panel& panel : curves.panels) {
    LogPlot::Axis x{.base = 2, .label = [](double value) { return fmt::format("{:.0f}", value); }, .most_ticks = 9, .name = panel.x};
    LogPlot::Axis y{.base = 2, .label = [&](double value) { return cell_of(panel, value); }, .most_ticks = 8, .name = upwards(curves, panel.unit)};
    for (const auto& line : panel.lines) {
      std::ranges::transform(line.points, std::back_inserter(x.values), &std::pair<double, double>::first);
      std::ranges::transform(line.points, std::back_inserter(y.values), &std::pair<double, double>::second);
    }
    if (panel.limit) y.values.push_back(*panel.limit);
    LogPlot plot(svg, left, margin, panel.title + (panel.limit ? "; dashed: " + cell_of(panel, *panel.limit) + " of a device" : ""), x, y);
    if (panel.limit) plot.dashes({plot.left(), *panel.limit}, {plot.right(), *panel.limit}, "");
    for (const auto& line : panel.lines) {
      auto named = std::ranges::find(names, line.name);
      if (named == names.end()) named = names.insert(names.end(), line.name);
      plot.series(line.points, static_cast<size_t>(named - names.begin()));
    }
    left += LogPlot::width + gap;
  }
  for (size_t i = 0; i < names.size(); ++i) LogPlot::legend(svg, left, margin + 34 + 8 + legend_line * static_cast<double>(i), names[i], i);
  return svg.str();
}

}  // namespace tessera::plan
