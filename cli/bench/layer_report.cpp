#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench/growth.h"
#include "cli/bench/layer.h"
#include "tessera/core/columns.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/svg.h"

namespace tessera::bench {
namespace {

const char* dtype_name(at::ScalarType dtype) {
  invariant(dtype == at::kFloat || dtype == at::kBFloat16, "a layer computes in fp32 or bf16");
  return dtype == at::kFloat ? "fp32" : "bf16";
}

std::string milliseconds(double us) { return fmt::format("{:.{}f}", us / 1000, us < 10'000 ? 3 : us < 100'000 ? 2 : 1); }
std::string time_label(double us) { return format_duration(us * 1e-6); }

/// One number of every row, as it grows with the hidden size.
Growth growth_of(const std::vector<LayerRow>& rows, const char* name, std::string (*label)(double), int law, auto&& value) {
  Growth growth{.name = name, .label = label, .law = law};
  for (const LayerRow& row : rows) growth.values.push_back(value(row));
  return growth;
}

std::vector<Growth> counted(const std::vector<LayerRow>& rows) {
  return {growth_of(rows, "FLOPs per token", format_count, 2, [](const LayerRow& row) { return row.flops_per_token(); }),
          growth_of(rows, "bytes per token", format_count, 1, [](const LayerRow& row) { return row.bytes_per_token(); })};
}

std::vector<Growth> timed(const std::vector<LayerRow>& rows) {
  return {growth_of(rows, "compute time", time_label, 2, [](const LayerRow& row) { return row.compute.median_us; }),
          growth_of(rows, "communication time", time_label, 1, [](const LayerRow& row) { return row.communication.median_us; })};
}

std::vector<double> sizes_of(const std::vector<LayerRow>& rows) {
  std::vector<double> sizes;
  for (const LayerRow& row : rows) sizes.push_back(static_cast<double>(row.what.hidden));
  return sizes;
}

std::string what_was_measured(const LayerRow& row) {
  return fmt::format("One LLaMA layer over {} ranks ({}{}{}), {} tokens, {}: forward and backward, per rank", row.ranks, row.backend,
                     row.what.sequence_parallel ? ", sequence parallel" : "", row.what.overlap ? ", overlapped" : "", row.what.tokens,
                     dtype_name(row.what.compute));
}

}  // namespace

double LayerRow::flops_per_token() const { return flops / static_cast<double>(what.tokens); }
double LayerRow::bytes_per_token() const { return static_cast<double>(sent_bytes) / static_cast<double>(what.tokens); }
double LayerRow::communication_over_compute() const { return communication.median_us / compute.median_us; }

std::vector<double> law_of(const std::vector<LayerRow>& rows) {
  std::vector<double> law;
  for (const LayerRow& row : rows) {
    law.push_back(rows.front().communication_over_compute() * static_cast<double>(rows.front().what.hidden) / static_cast<double>(row.what.hidden));
  }
  return law;
}

std::string json_lines(const std::vector<LayerRow>& rows) {
  const auto law = law_of(rows);
  std::string text;
  for (size_t i = 0; i < rows.size(); ++i) {
    const LayerRow& row = rows[i];
    const nlohmann::json json = {{"hidden", row.what.hidden},
                                 {"heads", row.what.heads},
                                 {"ffn_dim", row.ffn_dim},
                                 {"tokens", row.what.tokens},
                                 {"ranks", row.ranks},
                                 {"backend", row.backend},
                                 {"dtype", dtype_name(row.what.compute)},
                                 {"sequence_parallel", row.what.sequence_parallel},
                                 {"overlap", row.what.overlap},
                                 {"flops_per_token", row.flops_per_token()},
                                 {"bytes_per_token", row.bytes_per_token()},
                                 {"compute_us", row.compute.median_us},
                                 {"communication_us", row.communication.median_us},
                                 {"layer_us", row.layer.median_us},
                                 {"communication_over_compute", row.communication_over_compute()},
                                 {"law", law[i]}};
    text += json_text(json) + "\n";
  }
  return text;
}

std::vector<LayerRow> read_json_lines(const std::vector<std::string>& lines) {
  std::vector<LayerRow> rows;
  for (const auto& line : lines) {
    const auto json = nlohmann::json::parse(line);
    LayerRow& row = rows.emplace_back();
    json.at("hidden").get_to(row.what.hidden);
    json.at("heads").get_to(row.what.heads);
    json.at("ffn_dim").get_to(row.ffn_dim);
    json.at("tokens").get_to(row.what.tokens);
    json.at("ranks").get_to(row.ranks);
    json.at("backend").get_to(row.backend);
    row.what.compute = json.at("dtype") == "bf16" ? at::kBFloat16 : at::kFloat;
    json.at("sequence_parallel").get_to(row.what.sequence_parallel);
    json.at("overlap").get_to(row.what.overlap);
    row.flops = json.at("flops_per_token").get<double>() * static_cast<double>(row.what.tokens);
    row.sent_bytes = std::llround(json.at("bytes_per_token").get<double>() * static_cast<double>(row.what.tokens));
    json.at("compute_us").get_to(row.compute.median_us);
    json.at("communication_us").get_to(row.communication.median_us);
    json.at("layer_us").get_to(row.layer.median_us);
  }
  return rows;
}

std::string format_table(const std::vector<LayerRow>& rows) {
  std::vector<std::vector<std::string>> lines{
      {"hidden", "FLOPs/token", "bytes/token", "FLOPs/byte", "compute ms", "communication ms", "together ms", "communication/compute", "by law"}};
  const auto law = law_of(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const LayerRow& row = rows[i];
    lines.push_back({std::to_string(row.what.hidden), format_count(row.flops_per_token()), format_count(row.bytes_per_token()),
                     fmt::format("{:.0f}", row.flops_per_token() / row.bytes_per_token()), milliseconds(row.compute.median_us),
                     milliseconds(row.communication.median_us), milliseconds(row.layer.median_us), fmt::format("{:.3g}", row.communication_over_compute()),
                     fmt::format("{:.3g}", law[i])});
  }
  std::string text = what_was_measured(rows.front()) + "\n\n" + format_columns(lines);
  if (rows.size() < 2) return text;
  text +=
      "\nThe square-cube law: per token, computation grows with the square of the hidden size h, traffic with h, so their ratio falls as 1/h.\n"
      "(Attention's own products grow with h times the tokens, and count less the larger h is.)\n";
  const auto sizes = sizes_of(rows);
  const auto counts = counted(rows), times = timed(rows);
  text += fmt::format("counted:   {}, {}\n", growth_text(counts[0], sizes), growth_text(counts[1], sizes));
  text += fmt::format("measured:  {}, {}\n", growth_text(times[0], sizes), growth_text(times[1], sizes));
  return text;
}

std::string plot(const std::vector<LayerRow>& rows) {
  constexpr double margin = 24, gap = 40, heading = 34, legend_line = 22;
  Svg svg(2 * margin + 2 * LogPlot::width + gap, 2 * margin + heading + LogPlot::height + 3 * legend_line);
  svg.text(margin, margin + 10, what_was_measured(rows.front()), {.size = 14, .bold = true});
  const double right = margin + LogPlot::width + gap, top = margin + heading, below = top + LogPlot::height + 6;
  const auto sizes = sizes_of(rows);
  const auto counts = counted(rows), times = timed(rows);
  draw_growth(svg, margin, top, "counted, over the hidden size h", sizes, counts, 0);
  draw_growth(svg, right, top, "measured, over the hidden size h", sizes, times, 2);
  for (size_t i = 0; i < 2; ++i) {
    LogPlot::legend(svg, margin + 64, below + legend_line * static_cast<double>(i), growth_text(counts[i], sizes), i);
    LogPlot::legend(svg, right + 64, below + legend_line * static_cast<double>(i), growth_text(times[i], sizes), 2 + i);
  }
  svg.text(
      margin + 64, below + 2 * legend_line + 4,
      "dashed: the square-cube law, slopes 2 and 1 through the first point. Attention's own products grow with h alone, and times meet latency and caches.",
      {.size = 11, .color = LogPlot::axis_color});
  return svg.str();
}

}  // namespace tessera::bench
