#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench/growth.h"
#include "cli/bench/pipeline.h"
#include "tessera/core/columns.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/svg.h"

namespace tessera::bench {
namespace {

using nlohmann::json;

std::vector<PipelineRow> rows_of(const std::vector<PipelineRow>& rows, const std::string& kind) {
  std::vector<PipelineRow> found;
  std::ranges::copy_if(rows, std::back_inserter(found), [&](const PipelineRow& row) { return row.kind == kind; });
  return found;
}

std::string in_milliseconds(double us) { return fmt::format("{:.3f}", us / 1000); }
std::string in_percent(double share) { return fmt::format("{:.2f}%", 100 * share); }
std::string duration_label(double us) { return format_duration(us * 1e-6); }

std::string model_text(const PipelineCase& what) {
  return fmt::format("{} blocks of {}, {} sequences of {} tokens", what.layers, what.hidden, what.global_size, what.tokens);
}

std::string overhead_text(const PipelineRow& row) {
  return fmt::format("The executor on one rank: {}, {} micro-batches\nplain loop {} ms, executor {} ms: {:+.2f}% (median of pairs)\n", model_text(row.what),
                     row.what.micro_batches, in_milliseconds(row.plain_us), in_milliseconds(row.step_us), 100 * row.overhead);
}

std::string steps_text(const std::vector<PipelineRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"schedule", "micro-batches", "of sequences", "step ms", "bubble", "by its costs", "F = B = W"}};
  for (const auto& row : rows) {
    const auto chunks = row.what.chunks > 1 ? fmt::format(", {} chunks", row.what.chunks) : "";
    lines.push_back({row.what.schedule + chunks, std::to_string(row.what.micro_batches), std::to_string(row.what.global_size / row.what.micro_batches),
                     in_milliseconds(row.step_us), in_percent(row.bubble), in_percent(row.foretold), in_percent(row.formula)});
  }
  return fmt::format("A step on {} ranks ({}): {}\n", rows.front().what.ranks, rows.front().backend, model_text(rows.front().what)) +
         format_columns(lines, {0});
}

std::vector<double> hidden_of(const std::vector<PipelineRow>& rows) {
  std::vector<double> sizes;
  for (const auto& row : rows) sizes.push_back(static_cast<double>(row.what.hidden));
  return sizes;
}

Growth boundary_growth(const std::vector<PipelineRow>& rows, const char* name, std::string (*label)(double), int law, double PipelineRow::* value) {
  Growth growth{.name = name, .label = label, .law = law};
  for (const auto& row : rows) growth.values.push_back(row.*value);
  return growth;
}

std::vector<Growth> boundary_counts(const std::vector<PipelineRow>& rows) {
  return {boundary_growth(rows, "FLOPs per token", format_count, 2, &PipelineRow::flops_per_token),
          boundary_growth(rows, "bytes per token", format_count, 1, &PipelineRow::bytes_per_token)};
}

std::vector<Growth> boundary_times(const std::vector<PipelineRow>& rows) {
  return {boundary_growth(rows, "compute time", duration_label, 2, &PipelineRow::compute_us),
          boundary_growth(rows, "message time", duration_label, 1, &PipelineRow::message_us)};
}

std::string boundary_text(const std::vector<PipelineRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"hidden", "FLOPs/token", "bytes/token", "FLOPs/byte", "compute ms", "message ms", "messages/compute"}};
  for (const auto& row : rows) {
    lines.push_back({std::to_string(row.what.hidden), format_count(row.flops_per_token), format_count(row.bytes_per_token),
                     fmt::format("{:.0f}", row.flops_per_token / row.bytes_per_token), in_milliseconds(row.compute_us), in_milliseconds(row.message_us),
                     fmt::format("{:.3g}", row.message_over_compute())});
  }
  const auto& what = rows.front().what;
  std::string text = fmt::format("A boundary between two stages of one block each ({}): a micro-batch of {} tokens, forward and backward\n",
                                 rows.front().backend, what.global_size / what.micro_batches * what.tokens) +
                     format_columns(lines);
  if (rows.size() < 2) return text;
  const auto sizes = hidden_of(rows);
  const auto counts = boundary_counts(rows), times = boundary_times(rows);
  return text + fmt::format("counted:   {}, {}\nmeasured:  {}, {}\n", growth_text(counts[0], sizes), growth_text(counts[1], sizes),
                            growth_text(times[0], sizes), growth_text(times[1], sizes));
}

/// One number of the curve, and what it should be, over the micro-batches.
void draw_curve(Svg& svg, double left, double top, const std::string& title, const std::vector<PipelineRow>& rows, std::string (*label)(double),
                const std::vector<double PipelineRow::*>& values) {
  LogPlot::Axis x{.base = 2, .label = [](double m) { return fmt::format("{:g}", m); }}, y{.base = 2, .label = label};
  for (const auto& row : rows) {
    x.values.push_back(static_cast<double>(row.what.micro_batches));
    for (const auto value : values) y.values.push_back(row.*value);
  }
  LogPlot panel(svg, left, top, title, x, y);
  for (size_t i = 0; i < values.size(); ++i) {
    LogPlot::Points points;
    for (const auto& row : rows) points.emplace_back(static_cast<double>(row.what.micro_batches), row.*values[i]);
    panel.series(std::move(points), i);
  }
}

}  // namespace

std::string json_lines(const std::vector<PipelineRow>& rows) {
  std::string text;
  for (const auto& row : rows) {
    const auto& what = row.what;
    json line{{"kind", row.kind},          {"hidden", what.hidden},
              {"heads", what.heads},       {"layers", what.layers},
              {"tokens", what.tokens},     {"global_size", what.global_size},
              {"ranks", what.ranks},       {"micro_batches", what.micro_batches},
              {"schedule", what.schedule}, {"chunks", what.chunks}};
    if (row.kind == "overhead") {
      line.update({{"step_us", row.step_us}, {"plain_us", row.plain_us}, {"overhead", row.overhead}});
    } else if (row.kind == "boundary") {
      line.update({{"backend", row.backend},
                   {"flops_per_token", row.flops_per_token},
                   {"bytes_per_token", row.bytes_per_token},
                   {"compute_us", row.compute_us},
                   {"message_us", row.message_us},
                   {"message_over_compute", row.message_over_compute()}});
    } else {
      line.update({{"backend", row.backend}, {"step_us", row.step_us}, {"bubble", row.bubble}, {"foretold", row.foretold}, {"formula", row.formula}});
    }
    text += json_text(line) + "\n";
  }
  return text;
}

std::vector<PipelineRow> read_pipeline_rows(const std::vector<std::string>& lines) {
  std::vector<PipelineRow> rows;
  for (const auto& text : lines) {
    const json line = json::parse(text);
    PipelineRow& row = rows.emplace_back();
    const auto read = [&](const char* key, auto& field) {
      if (const auto found = line.find(key); found != line.end()) found->get_to(field);
    };
    read("kind", row.kind), read("backend", row.backend), read("schedule", row.what.schedule);
    read("hidden", row.what.hidden), read("heads", row.what.heads), read("layers", row.what.layers), read("tokens", row.what.tokens);
    read("global_size", row.what.global_size), read("micro_batches", row.what.micro_batches);
    read("ranks", row.what.ranks), read("chunks", row.what.chunks);
    for (const auto& [key, field] : {std::pair("step_us", &PipelineRow::step_us),
                                     {"plain_us", &PipelineRow::plain_us},
                                     {"overhead", &PipelineRow::overhead},
                                     {"bubble", &PipelineRow::bubble},
                                     {"foretold", &PipelineRow::foretold},
                                     {"formula", &PipelineRow::formula},
                                     {"flops_per_token", &PipelineRow::flops_per_token},
                                     {"bytes_per_token", &PipelineRow::bytes_per_token},
                                     {"compute_us", &PipelineRow::compute_us},
                                     {"message_us", &PipelineRow::message_us}}) {
      read(key, row.*field);
    }
  }
  return rows;
}

std::string format_table(const std::vector<PipelineRow>& rows) {
  std::vector<std::string> parts;
  for (const auto& row : rows_of(rows, "overhead")) parts.push_back(overhead_text(row));
  for (const char* kind : {"schedule", "curve"}) {
    if (const auto steps = rows_of(rows, kind); !steps.empty()) parts.push_back(steps_text(steps));
  }
  if (const auto boundary = rows_of(rows, "boundary"); !boundary.empty()) parts.push_back(boundary_text(boundary));
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : "\n") + part;
  return text;
}

std::string plot(const std::vector<PipelineRow>& rows) {
  constexpr double margin = 24, gap = 40, heading = 34, legend_line = 22;
  const auto curve = rows_of(rows, "curve"), boundary = rows_of(rows, "boundary");
  const double row_height = heading + LogPlot::height + 3 * legend_line;
  const double right = margin + LogPlot::width + gap, indent = 64;
  Svg svg(2 * margin + 2 * LogPlot::width + gap, 2 * margin + 2 * row_height);
  const auto& steps = curve.front();
  svg.text(margin, margin + 10,
           fmt::format("{} on {} ranks ({}), {}, in more and smaller parts", steps.what.schedule, steps.what.ranks, steps.backend, model_text(steps.what)),
           {.size = 14, .bold = true});
  double top = margin + heading, below = top + LogPlot::height + 6;
  draw_curve(svg, margin, top, "idle share of a step, over micro-batches", curve, in_percent,
             {&PipelineRow::bubble, &PipelineRow::foretold, &PipelineRow::formula});
  draw_curve(svg, right, top, "time of a step, over micro-batches", curve, duration_label, {&PipelineRow::step_us});
  LogPlot::legend(svg, margin + indent, below, "measured", 0);
  LogPlot::legend(svg, margin + indent, below + legend_line, "foretold, by the stages' measured costs", 1);
  LogPlot::legend(svg, margin + indent, below + 2 * legend_line, "(p-1)/(m+p-1)", 2);
  LogPlot::legend(svg, right + indent, below, "measured", 0);

  top += row_height;
  below += row_height;
  const auto sizes = hidden_of(boundary);
  const auto counts = boundary_counts(boundary), times = boundary_times(boundary);
  const auto& pair = boundary.front().what;
  svg.text(margin, top - heading + 10,
           fmt::format("A boundary between two stages of one block each, a micro-batch of {} tokens: forward and backward",
                       pair.global_size / pair.micro_batches * pair.tokens),
           {.size = 14, .bold = true});
  draw_growth(svg, margin, top, "counted, over the hidden size h", sizes, counts, 0);
  draw_growth(svg, right, top, "measured, over the hidden size h", sizes, times, 2);
  for (size_t i = 0; i < 2; ++i) {
    LogPlot::legend(svg, margin + indent, below + legend_line * static_cast<double>(i), growth_text(counts[i], sizes), i);
    LogPlot::legend(svg, right + indent, below + legend_line * static_cast<double>(i), growth_text(times[i], sizes), 2 + i);
  }
  svg.text(margin + indent, below + 2 * legend_line + 4, "dashed: the square-cube law, slopes 2 and 1 through the first point",
           {.size = 11, .color = LogPlot::axis_color});
  return svg.str();
}

}  // namespace tessera::bench
