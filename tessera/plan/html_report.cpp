#include "tessera/plan/html_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "tessera/config/detail.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/markup.h"
#include "tessera/core/svg.h"
#include "tessera/mesh/mesh.h"
#include "tessera/pipeline/schedules/registry.h"

// Pictures are drawn as everywhere else, on white with dark text; the page's style gives other colors to those few that mean paper, ink and lines, because a
// rule of CSS is stronger than an attribute of SVG.

namespace tessera::plan {
namespace {

constexpr size_t kMostRows = 48;  ///< of a picture by class of ranks
constexpr size_t kMostCurves = 4;

constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --paper: #ffffff; --ink: #222222; --faint: #666666; --line: #d0d0d0; --band: #f3f3f3; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e4e4e4; --faint: #a4a8ae; --line: #3c4148; --band: #22262c; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 1120px; font: 15px/1.5 system-ui, sans-serif; background: var(--paper); color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; } p { max-width: 75ch; }
figure { margin: .8rem 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; } figcaption, .faint { color: var(--faint); font-size: .9em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } caption { text-align: left; color: var(--faint); font-size: .9em; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .words td, .words th { text-align: left; } .wide { overflow-x: auto; }
.links td:nth-child(4), .layouts td:nth-child(2), .layouts th:nth-child(2), .links th:nth-child(4) { text-align: left; white-space: normal; }
.verdict { font-weight: 600; } .no { color: #d55e00; }
svg text[fill="#222222"] { fill: var(--ink); } svg text[fill="#666666"] { fill: var(--faint); } svg line[stroke="#222222"] { stroke: var(--ink); }
svg rect[fill="#ffffff"] { fill: var(--paper); } svg rect[fill="#f2f2f2"], svg rect[fill="#f3f3f3"] { fill: var(--band); }
svg line[stroke="#cccccc"] { stroke: var(--line); }
@media print { body { max-width: none; } figure, .wide { overflow: visible; } }
)";

/// What a reader of the screen hears in place of the picture stands in the picture.
std::string figure(std::string svg, const std::string& title, const std::string& caption) {
  const auto inside = svg.find('>', svg.find("<svg")) + 1;
  svg.insert(inside, "<title>" + escape_markup(title) + "</title>");
  svg.insert(inside - 1, " role=\"img\" aria-label=\"" + escape_markup(title) + "\"");
  return "<figure>\n" + svg + "<figcaption>" + escape_markup(caption) + "</figcaption>\n</figure>\n";
}

using Row = std::vector<std::string>;

std::string table(const Row& head, const std::vector<Row>& rows, std::string_view kind = {}) {
  const auto line = [](const Row& row, std::string_view cell) {
    std::string out = "<tr>";
    for (const auto& text : row) out += fmt::format("<{0}>{1}</{0}>", cell, escape_markup(text));
    return out + "</tr>\n";
  };
  std::string out = fmt::format("<div class=\"wide\"><table class=\"{}\">\n<thead>{}</thead>\n<tbody>\n", kind, line(head, "th"));
  for (const auto& row : rows) out += line(row, "td");
  return out + "</tbody></table></div>\n";
}

std::string section(std::string_view id, std::string_view title, const std::string& body) {
  return fmt::format("<section id=\"{}\">\n<h2>{}</h2>\n{}</section>\n", id, title, body);
}

std::string paragraph(const std::string& text) { return "<p>" + escape_markup(text) + "</p>\n"; }

std::string name_of(const RankClass& ranks, const DryRun& run) {
  std::string name = ranks.count == 1 ? fmt::format("rank {}", ranks.examples.front()) : fmt::format("{} like {}", ranks.count, ranks.examples.front());
  if (run.pipeline.stages.size() > 1) name += fmt::format(", stage {}", ranks.pipeline_rank);
  return name;
}

std::vector<MemoryCategory> categories_of(const DryRun& run) {
  std::vector<MemoryCategory> used;
  for (size_t c = 0; c < num_memory_categories; ++c) {
    if (std::ranges::any_of(run.ranks, [&](const RankClass& ranks) { return ranks.peak_bytes[c] > 0; })) used.push_back(static_cast<MemoryCategory>(c));
  }
  return used;
}

void legend(Svg& svg, const std::vector<MemoryCategory>& categories, double left, double top) {
  for (const MemoryCategory category : categories) {
    svg.rect(left, top - 10, 11, 11, Svg::color(static_cast<size_t>(category)));
    svg.text(left + 16, top, to_string(category), {.size = 12, .color = "#666666"});
    left += 34 + 7 * static_cast<double>(to_string(category).size());
  }
}

// ---- memory of the ranks

std::string draw_peaks(const DryRun& run) {
  constexpr double width = 1040, left = 170, plot = 760, top = 42, row = 26;
  const auto shown = std::min(run.ranks.size(), kMostRows);
  Svg svg(width, top + row * static_cast<double>(shown) + 28);
  const int64_t needed = needed_bytes(largest_class(run));
  double most = static_cast<double>(run.memory_limit > 8 * needed ? needed : std::max(run.memory_limit, needed));
  most *= 1.02;
  const auto x = [&](double bytes) { return left + plot * bytes / most; };
  const double bottom = top + row * static_cast<double>(shown);
  legend(svg, categories_of(run), left, 20);
  for (double bytes = 0; bytes <= most; bytes += binary_grid_step(most)) {
    svg.line(x(bytes), top - 6, x(bytes), bottom, "#cccccc", 0.5);
    svg.text(x(bytes), bottom + 16, format_bytes(static_cast<int64_t>(bytes)), {.size = 11, .color = "#666666", .anchor = "middle"});
  }
  for (size_t i = 0; i < shown; ++i) {
    const RankClass& ranks = run.ranks[i];
    const double y = top + row * static_cast<double>(i);
    svg.text(left - 8, y + 16, name_of(ranks, run), {.size = 12, .anchor = "end"});
    double begin = 0;
    for (size_t c = 0; c < num_memory_categories; ++c) {
      const auto bytes = static_cast<double>(ranks.peak_bytes[c]);
      if (bytes == 0) continue;
      svg.rect(x(begin), y + 3, x(begin + bytes) - x(begin), row - 6, Svg::color(c),
               fmt::format("{}: {} {}", name_of(ranks, run), to_string(static_cast<MemoryCategory>(c)), format_bytes(ranks.peak_bytes[c])));
      begin += bytes;
    }
    if (const auto reserved = static_cast<double>(ranks.reserved_bytes); reserved > begin) {
      svg.rect(x(begin), y + 3, x(reserved) - x(begin), row - 6, "#dddddd", fmt::format("{}: held by the allocator beside tensors", name_of(ranks, run)));
      begin = reserved;
    }
    svg.text(x(begin) + 6, y + 16, format_bytes(needed_bytes(ranks)), {.size = 12, .bold = true});
  }
  if (run.memory_limit > 0 && static_cast<double>(run.memory_limit) <= most) {
    const double at = x(static_cast<double>(run.memory_limit));
    svg.line(at, top - 8, at, bottom, "#d55e00", 2);
    svg.text(at, top - 12, "limit " + format_bytes(run.memory_limit), {.size = 11, .color = "#d55e00", .anchor = "end"});
  }
  return svg.str();
}

std::string memory_by_rank(const DryRun& run) {
  const auto used = categories_of(run);
  Row head{"ranks"};
  for (const auto category : used) head.emplace_back(to_string(category));
  head.emplace_back("total");
  head.emplace_back("bytes");
  const bool kept = std::ranges::any_of(run.ranks, [](const RankClass& ranks) { return ranks.reserved_bytes > 0; });
  if (kept) head.emplace_back("reserved");
  const bool hosts = std::ranges::any_of(run.ranks, [](const RankClass& ranks) { return total_of(ranks.host_bytes) > 0; });
  if (hosts) head.emplace_back("on the host");
  std::vector<Row> rows;
  for (const RankClass& ranks : run.ranks) {
    Row row{name_of(ranks, run)};
    for (const auto category : used) row.push_back(format_bytes(ranks.peak_bytes[static_cast<size_t>(category)]));
    row.push_back(format_bytes(total_of(ranks.peak_bytes)));
    row.push_back(std::to_string(total_of(ranks.peak_bytes)));
    if (kept) row.push_back(format_bytes(ranks.reserved_bytes));
    if (hosts) row.push_back(format_bytes(total_of(ranks.host_bytes)));
    rows.push_back(std::move(row));
  }
  const std::string left_out = run.ranks.size() > kMostRows ? fmt::format(" The first {} kinds of {} are drawn.", kMostRows, run.ranks.size()) : "";
  return figure(
             draw_peaks(run),
             fmt::format("Memory at the peak of {} kinds of ranks by category, the most {}", run.ranks.size(), format_bytes(needed_bytes(largest_class(run)))),
             std::string(kept ? "What the device's allocator reserves, and of it what tensors hold when most is alive, by what it is for."
                              : "When most is alive, by what it is for.") +
                 " Ranks that do the same are one line." + left_out) +
         table(head, rows);
}

// ---- memory over the step

std::string draw_curve(const MemoryHistory& history, const DryRun& run, bool timed) {
  constexpr double width = 1040, left = 84, plot = 920, top = 40, height = 220;
  Svg svg(width, top + height + 26);
  double most = 1;
  std::vector<std::pair<double, MemoryByCategory>> points{{0, history.before}};
  for (const auto& event : history.events) points.emplace_back(event.seconds, event.after);
  points.emplace_back(history.seconds, points.back().second);
  for (const auto& [at, alive] : points) most = std::max(most, 1.08 * static_cast<double>(total_of(alive)));
  const auto x = [&](double seconds) { return left + plot * (history.seconds > 0 ? seconds / history.seconds : 0); };
  const auto y = [&](double bytes) { return top + height * (1 - bytes / most); };
  legend(svg, categories_of(run), left, 20);
  for (double bytes = 0; bytes <= most; bytes += binary_grid_step(most)) {
    svg.line(left, y(bytes), left + plot, y(bytes), "#cccccc", 0.5);
    svg.text(left - 6, y(bytes) + 4, format_bytes(static_cast<int64_t>(bytes)), {.size = 11, .color = "#666666", .anchor = "end"});
  }
  for (const double part : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    const std::string text = part == 0 ? "0" : timed ? format_duration(part * history.seconds) : fmt::format("{:.0f} operators", part * history.seconds);
    svg.text(x(part * history.seconds), top + height + 16, text, {.size = 11, .color = "#666666", .anchor = part == 1 ? "end" : "middle"});
  }
  std::vector<double> below(points.size(), 0);
  for (size_t c = 0; c < num_memory_categories; ++c) {
    std::vector<double> above = below;
    for (size_t i = 0; i < points.size(); ++i) above[i] += static_cast<double>(points[i].second[c]);
    if (above == below) continue;
    std::vector<std::pair<double, double>> outline;
    const auto step = [&](size_t i, const std::vector<double>& bytes, size_t held) { outline.emplace_back(x(points[i].first), y(bytes[held])); };
    for (size_t i = 0; i < points.size(); ++i) {
      if (i > 0) step(i, above, i - 1);
      step(i, above, i);
    }
    for (size_t i = points.size(); i-- > 0;) {
      step(i, below, i);
      if (i > 0) step(i, below, i - 1);
    }
    svg.polygon(outline, Svg::color(c), to_string(static_cast<MemoryCategory>(c)));
    below = std::move(above);
  }
  if (const MemoryEvent* peak = history.peak()) {
    const bool right = peak->seconds > history.seconds / 2;
    svg.line(x(peak->seconds), top, x(peak->seconds), top + height, "#222222", 1);
    svg.text(x(peak->seconds) + (right ? -6 : 6), y(static_cast<double>(total_of(peak->after))) - 5, "peak " + format_bytes(total_of(peak->after)),
             {.size = 12, .anchor = right ? "end" : "start", .bold = true});
  }
  return svg.str();
}

std::string memory_over_step(const DryRun& run) {
  std::vector<const RankClass*> order;
  for (const RankClass& ranks : run.ranks) order.push_back(&ranks);
  std::ranges::stable_sort(order, std::ranges::greater(), [](const RankClass* ranks) { return total_of(ranks->peak_bytes); });
  std::string out;
  for (const RankClass* ranks : order) {
    if (out.empty()) out = paragraph(run.time ? "By the time of the rank's own work, without its waits for other stages." : "By the operators that have run.");
    if (ranks->history.events.empty()) continue;
    const MemoryEvent* peak = ranks->history.peak();
    const int64_t most = total_of(peak != nullptr ? peak->after : ranks->history.before);
    std::string caption = fmt::format("{}: {} at the start of the step, at most {} ({} bytes).", name_of(*ranks, run),
                                      format_bytes(total_of(ranks->history.before)), format_bytes(most), most);
    if (most < total_of(ranks->peak_bytes)) caption += " The peak above is that of the first steps, in which buckets are made.";
    out += figure(draw_curve(ranks->history, run, run.time.has_value()), "Memory by category over a step of " + name_of(*ranks, run), caption);
    if (static_cast<size_t>(std::ranges::find(order, ranks) - order.begin()) + 1 == kMostCurves) break;
  }
  if (order.size() > kMostCurves) out += paragraph(fmt::format("The {} kinds of ranks that need most, of {}.", kMostCurves, order.size()));
  return out;
}

// ---- time

std::string timeline(const DryRun& run) {
  const auto drawing = drawing_of(run);
  if (!drawing) return paragraph("How long a step takes is said of a device: --device NAME.");
  const StepTime& time = *run.time;
  const auto row = [&](std::string what, double seconds) {
    return Row{std::move(what), fmt::format("{:.6g}", seconds), fmt::format("{:.1f}%", 100 * seconds / time.seconds)};
  };
  const bool staged = run.pipeline.stages.size() > 1;
  return figure(
             schedules::svg_of({*drawing}), staged ? "The pipeline's actions over a step" : "The actions of a step, of the rank that decides",
             "Forwards and backwards as the plan foretells them; what stands before the first action and behind the last, such as the update, is not drawn.") +
         table({"of the rank that decides", "seconds", "of the step"},
               {row("the step", time.seconds), row("computing", time.computing), row("of that, guessed", time.guessed),
                row("waiting for collectives", time.exposed), row("waiting for the host", time.asked),
                row("waiting for copies from and to the host", time.copied), row("waiting for other stages", time.bubble)});
}

// ---- traffic

std::string link_of(const RankClass& ranks, const std::string& group, const Device* device) {
  const auto place = ranks.places.find(group);
  if (place == ranks.places.end()) return "";
  const bool inside = place->second.hosts == 1;
  std::string text = inside ? "inside a node" : fmt::format("between {} nodes", place->second.hosts);
  const auto& link = device == nullptr ? std::nullopt : inside ? device->inside : device->between;
  return link && !link->name.empty() ? text + ": " + link->name : text;
}

std::string draw_traffic(const std::vector<std::pair<std::string, std::pair<int64_t, bool>>>& axes) {
  constexpr double width = 1040, left = 200, plot = 720, top = 34, row = 26;
  Svg svg(width, top + row * static_cast<double>(axes.size()) + 8);
  int64_t most = 1;
  for (const auto& [axis, sent] : axes) most = std::max(most, sent.first);
  svg.rect(left, 10, 11, 11, Svg::color(2));
  svg.text(left + 16, 20, "inside a node, or not placed", {.size = 12, .color = "#666666"});
  svg.rect(left + 220, 10, 11, 11, Svg::color(5));
  svg.text(left + 236, 20, "between nodes", {.size = 12, .color = "#666666"});
  double y = top;
  for (const auto& [axis, sent] : axes) {
    svg.text(left - 8, y + 16, axis, {.size = 12, .anchor = "end"});
    const double length = std::max(1.0, plot * static_cast<double>(sent.first) / static_cast<double>(most));
    svg.rect(left, y + 3, length, row - 6, Svg::color(sent.second ? 5 : 2), axis + ": " + format_bytes(sent.first));
    svg.text(left + length + 6, y + 16, format_bytes(sent.first), {.size = 12});
    y += row;
  }
  return svg.str();
}

std::string traffic(const Reported& reported) {
  std::vector<std::pair<std::string, std::pair<int64_t, bool>>> axes;  // of the class that sends most over it
  std::vector<Row> rows;
  for (const RankClass& ranks : reported.run.ranks) {
    std::map<std::string, int64_t> sent;
    for (const CollectiveSum& sum : ranks.collectives) {
      sent[sum.axis] += sum.sent_bytes;
      rows.push_back({name_of(ranks, reported.run), sum.op, sum.axis, link_of(ranks, sum.axis, reported.device), std::to_string(sum.count), sum.dtype,
                      format_bytes(sum.bytes), format_bytes(sum.sent_bytes), std::to_string(sum.sent_bytes)});
    }
    for (const auto& [axis, bytes] : sent) {
      const auto place = ranks.places.find(axis);
      const bool between = place != ranks.places.end() && place->second.hosts > 1;
      const auto known = std::ranges::find(axes, axis, &decltype(axes)::value_type::first);
      if (known == axes.end()) {
        axes.push_back({axis, {bytes, between}});
      } else {
        known->second = {std::max(known->second.first, bytes), known->second.second || between};
      }
    }
  }
  if (rows.empty()) return paragraph("Nothing is sent.");
  return figure(draw_traffic(axes), "Bytes that a rank sends in a step over each axis of the mesh",
                "Bytes that a rank sends in a step, of the rank that sends most.") +
         "<details" + (rows.size() > 12 ? "" : " open=\"open\"") + "><summary>Every collective</summary>\n" +
         table({"ranks", "operation", "axis", "link", "calls", "type", "of the whole", "sent", "bytes sent"}, rows, "links") + "</details>\n";
}

// ---- layout

std::string layout(const Reported& reported) {
  const Config& config = reported.config;
  std::vector<Row> rows;
  for (const auto& [axis, size] : mesh_shape(config.mesh, config.zero.stage, reported.run.world)) {
    if (size > 1) rows.push_back({"mesh." + axis, std::to_string(size)});
  }
  if (config.mesh.ep > 1) rows.push_back({"mesh.ep", std::to_string(config.mesh.ep)});
  std::vector<std::string> keys{"zero.stage",        "recompute.mode",   "precision.compute", "precision.master",
                                "batch.global_size", "batch.micro_size", "data.seq_len"};
  if (config.mesh.tp > 1) keys.emplace_back("tensor.sequence_parallel");
  if (config.mesh.pp > 1) keys.emplace_back("pipeline.schedule");
  for (const auto& key : keys) {
    if (const auto text = detail::value_text(config, key)) rows.push_back({key, *text});
  }
  const EffectiveBatch& batch = reported.run.batch;
  const auto counted = [](int64_t count, const char* one, const char* more) { return fmt::format("{} {}{}", count, one, count == 1 ? "" : more); };
  rows.push_back(
      {"effective batch", fmt::format("{} a rank x {} x {} = {}, {} tokens", batch.per_rank, counted(batch.data_ranks, "data rank", "s"),
                                      counted(batch.accumulation, "micro-batch", "es"), counted(batch.global, "sequence", "s"), reported.run.tokens_per_step)});
  std::string out = table({"setting", "value"}, rows, "words");
  for (const auto& remark : reported.run.remarks) out += paragraph("train would refuse this: " + remark);
  return out;
}

std::string searched(const LayoutSearch& search) {
  std::vector<Row> rows;
  size_t place = 0;
  for (const Tried& tried : search.ranked) {
    rows.push_back({std::to_string(++place), to_string(tried.choice, search.world), format_bytes(tried.needed_bytes), std::to_string(tried.needed_bytes),
                    tried.fits ? "yes" : "no", fmt::format("{:.6g}", tried.time.seconds), fmt::format("{:.1f}%", 100 * tried.time.mfu)});
  }
  std::string out = paragraph(fmt::format("{} layouts are possible, {} of them too large by their state alone; {} were run dry.", search.possible,
                                          search.too_large, search.ranked.size())) +
                    table({"", "layout", "memory", "bytes", "fits", "step (s)", "of the peak rate"}, rows, "layouts");
  if (!search.losing.empty()) {
    rows.clear();
    for (const Loses& loses : search.losing) rows.push_back({loses.what, loses.reason});
    out += "<h3>Why not, in place of the first</h3>\n" + table({"change", "outcome"}, rows, "words");
  }
  for (const auto& observation : search.observations) out += paragraph(observation);
  return out;
}

std::string scaled(const Scaling& scaling) {
  std::vector<Row> rows;
  for (const Scaling::Point& point : scaling.points) {
    for (const auto* tried : {&point.whole, &point.cut}) {
      if (!*tried) continue;
      const double step = (*tried)->time.seconds, tokens = static_cast<double>(scaling.sequences) * static_cast<double>(scaling.seq_len);
      rows.push_back({std::to_string(point.ranks), to_string((*tried)->choice, point.ranks), format_bytes((*tried)->needed_bytes), fmt::format("{:.6g}", step),
                      fmt::format("{:.0f}", tokens / step / point.ranks)});
    }
  }
  std::string out;
  for (const auto& finding : findings_of(scaling)) out += paragraph(finding + ".");
  return out +
         figure(svg_of(curves_of(scaling)), "Seconds of a step, and tokens per second and rank, over ranks",
                "The same step in the best layout of each number of ranks, without and with sequences that are cut.") +
         table({"ranks", "layout", "memory", "step (s)", "tokens/s/rank"}, rows, "layouts");
}

bool has_room(const Reported& reported) {
  return reported.framework == nullptr ? reported.run.fits() : fits(*reported.framework, reported.config, reported.run);
}

/// Of another framework what it reserves decides, and not the bytes of our tensors.
std::string verdict(const Reported& reported) {
  const DryRun& run = reported.run;
  const std::string peak = format_bytes(total_of(largest_class(run).peak_bytes));
  std::string text = "The rank that needs most has " + peak + " at its peak";
  if (reported.framework != nullptr) return text + " of our tensors; " + verdict_of(*reported.framework, reported.config, run);
  if (run.allocator)
    text = fmt::format("The rank that needs most takes {} of its device, {} of it for tensors", format_bytes(needed_bytes(largest_class(run))), peak);
  if (run.memory_limit > 0) text += fmt::format(" of {}: the step {}", format_bytes(run.memory_limit), run.fits() ? "fits" : "does not fit");
  return text;
}

std::string summary(const Reported& reported) {
  const DryRun& run = reported.run;
  std::string out = fmt::format("<h1>{}</h1>\n", escape_markup(reported.config.name.empty() ? "A plan" : reported.config.name));
  out += paragraph(fmt::format("{} parameters on {} rank{}{}, {} tokens a step: what a dry run of the very step foretells.",
                               format_count(static_cast<double>(run.parameters)), run.world, run.world == 1 ? "" : "s",
                               reported.device != nullptr ? " of " + reported.device->name : "", format_count(static_cast<double>(run.tokens_per_step))));
  out += fmt::format("<p class=\"verdict{}\">{}.</p>\n", has_room(reported) ? "" : " no", escape_markup(verdict(reported)));
  if (reported.bounds) out += paragraph(to_string(*reported.bounds, run.memory_limit));
  if (run.time) out += paragraph(to_string(*run.time));
  const std::string guesses = guesses_of(run);
  return out + (guesses.empty() ? "" : paragraph(guesses + "."));
}

/// Between the tags of an element that no reader of HTML takes for markup, and no reader of XML either.
std::string embedded(const nlohmann::json& json) {
  std::string out;
  for (const char c : json_text(json)) {
    if (c == '<' || c == '>' || c == '&') {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

std::optional<schedules::Drawing> drawing_of(const DryRun& run) {
  if (!run.time) return std::nullopt;
  schedules::Schedule schedule = run.pipeline.actions;
  std::vector<TimedClass> classes;
  for (const RankClass& ranks : run.ranks) classes.push_back({.pipeline_rank = ranks.pipeline_rank, .time = &ranks.time});
  if (schedule.actions.empty()) {
    const auto slowest = std::ranges::max_element(run.ranks, {}, [](const RankClass& ranks) { return ranks.time.step; });
    schedule = schedules::make_schedule({.name = "1f1b", .ranks = 1, .micro_batches = static_cast<int>(slowest->micro_batches)});
  }
  schedules::Costs costs = pipeline_costs(classes, schedule);
  constexpr double ms = 1e3;
  for (auto& stage : costs.stages) {
    for (double schedules::StageCosts::* cost : {&schedules::StageCosts::forward, &schedules::StageCosts::backward, &schedules::StageCosts::backward_input,
                                                 &schedules::StageCosts::backward_weight, &schedules::StageCosts::update})
      stage.*cost *= ms;
  }
  costs.communication *= ms;
  auto timeline = simulate(schedule, costs);
  const std::string name = run.pipeline.actions.actions.empty()
                               ? fmt::format("{} micro-batch{} of one rank", schedule.micro_batches, schedule.micro_batches == 1 ? "" : "es")
                               : fmt::format("{}, {} ranks, {} micro-batches", schedule.name, schedule.ranks(), schedule.micro_batches);
  return schedules::Drawing{.title = "planned: " + name, .schedule = std::move(schedule), .timeline = std::move(timeline), .unit = " ms"};
}

std::string html_report(const Reported& reported) {
  const DryRun& run = reported.run;
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>Plan: " + escape_markup(reported.config.name) +
         "</title>\n<style>" + std::string(kStyle) + "</style>\n</head>\n<body>\n<main>\n";
  out += summary(reported);
  out += section("memory-by-rank", "Memory by rank", memory_by_rank(run));
  out += section("memory-over-step", "Memory over the step", memory_over_step(run));
  out += section("timeline", "Timeline", timeline(run));
  out += section("traffic", "Traffic", traffic(reported));
  out += section("layout", "Layout", layout(reported));
  if (reported.scaling != nullptr) out += section("scaling", "The same step on more ranks", scaled(*reported.scaling));
  if (reported.search != nullptr) out += section("search", "Layouts in the order of their speed", searched(*reported.search));
  return out + "</main>\n<script type=\"application/json\" id=\"plan\">" + embedded(reported.json) + "</script>\n</body>\n</html>\n";
}

}  // namespace tessera::plan
