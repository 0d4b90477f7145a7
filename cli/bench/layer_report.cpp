#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench/layer.h"
#include "tessera/core/columns.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/svg.h"

namespace tessera::bench {
namespace {

const char* dtype_name(at::ScalarType dtype) {
  invariant(dtype == at::kFloat || dtype == at::kBFloat16, "a layer computes in fp32 or bf16");
  return dtype == at::kFloat ? "fp32" : "bf16";
}

/// What grows with the hidden size: how it is named and shown, and the power with which it grows by the law.
struct Quantity {
  const char* name;
  double (*value)(const LayerRow&);
  std::string (*label)(double);
  int law;
};

std::string milliseconds(double us) { return fmt::format("{:.{}f}", us / 1000, us < 10'000 ? 3 : us < 100'000 ? 2 : 1); }
std::string time_label(double us) { return format_duration(us * 1e-6); }

constexpr std::array<Quantity, 2> counted{{{"FLOPs per token", [](const LayerRow& row) { return row.flops_per_token(); }, format_count, 2},
                                           {"bytes per token", [](const LayerRow& row) { return row.bytes_per_token(); }, format_count, 1}}};
constexpr std::array<Quantity, 2> timed{{{"compute time", [](const LayerRow& row) { return row.compute.median_us; }, time_label, 2},
                                         {"communication time", [](const LayerRow& row) { return row.communication.median_us; }, time_label, 1}}};

std::string what_was_measured(const LayerRow& row) {
  return fmt::format("One LLaMA layer over {} ranks ({}{}{}), {} tokens, {}: forward and backward, per rank", row.ranks, row.backend,
                     row.what.sequence_parallel ? ", sequence parallel" : "", row.what.overlap ? ", overlapped" : "", row.what.tokens,
                     dtype_name(row.what.compute));
}

void draw_panel(Svg& svg, double left, double top, const std::string& title, const std::vector<LayerRow>& rows, const std::array<Quantity, 2>& quantities,
                size_t first_style) {
  LogPlot::Axis x{.base = 2, .label = [](double hidden) { return fmt::format("{:g}", hidden); }}, y{.label = quantities[0].label};
  for (const LayerRow& row : rows) {
    x.values.push_back(static_cast<double>(row.what.hidden));
    for (const auto& quantity : quantities) y.values.push_back(quantity.value(row));
  }
  const auto by_law = [&](const Quantity& quantity, const LayerRow& row) {
    return quantity.value(rows.front()) * std::pow(static_cast<double>(row.what.hidden) / static_cast<double>(rows.front().what.hidden), quantity.law);
  };
  for (const auto& quantity : quantities) y.values.push_back(by_law(quantity, rows.back()));
  LogPlot panel(svg, left, top, title, x, y);
  const double first = x.values.front(), last = x.values.back();
  for (size_t i = 0; i < quantities.size(); ++i) {
    const Quantity& quantity = quantities[i];
    if (rows.size() > 1) panel.dashes({first, quantity.value(rows.front())}, {last, by_law(quantity, rows.back())}, "");
    LogPlot::Points points;
    for (const LayerRow& row : rows) points.emplace_back(static_cast<double>(row.what.hidden), quantity.value(row));
    panel.series(std::move(points), first_style + i);
  }
}

std::string slope(const Quantity& quantity, const std::vector<LayerRow>& rows) {
  if (rows.front().what.hidden == rows.back().what.hidden) return quantity.name;
  return fmt::format("{} ~ h^{:.2f} (law: {})", quantity.name, exponent(rows, quantity.value), quantity.law);
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

double exponent(const std::vector<LayerRow>& rows, double (*value)(const LayerRow&)) {
  const auto mean = [&](auto&& of) {
    double sum = 0;
    for (const LayerRow& row : rows) sum += of(row);
    return sum / static_cast<double>(rows.size());
  };
  const auto x = [](const LayerRow& row) { return std::log(static_cast<double>(row.what.hidden)); };
  const auto y = [&](const LayerRow& row) { return std::log(value(row)); };
  const double x_mean = mean(x), y_mean = mean(y);
  const double variance = mean([&](const LayerRow& row) { return (x(row) - x_mean) * (x(row) - x_mean); });
  return variance > 0 ? mean([&](const LayerRow& row) { return (x(row) - x_mean) * (y(row) - y_mean); }) / variance : 0;
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
    text += json.dump() + "\n";
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
  text += fmt::format("counted:   {}, {}\n", slope(counted[0], rows), slope(counted[1], rows));
  text += fmt::format("measured:  {}, {}\n", slope(timed[0], rows), slope(timed[1], rows));
  return text;
}

std::string plot(const std::vector<LayerRow>& rows) {
  constexpr double margin = 24, gap = 40, heading = 34, legend_line = 22;
  Svg svg(2 * margin + 2 * LogPlot::width + gap, 2 * margin + heading + LogPlot::height + 3 * legend_line);
  svg.text(margin, margin + 10, what_was_measured(rows.front()), {.size = 14, .bold = true});
  const double right = margin + LogPlot::width + gap, top = margin + heading, below = top + LogPlot::height + 6;
  draw_panel(svg, margin, top, "counted, over the hidden size h", rows, counted, 0);
  draw_panel(svg, right, top, "measured, over the hidden size h", rows, timed, 2);
  for (size_t i = 0; i < 2; ++i) {
    LogPlot::legend(svg, margin + 64, below + legend_line * static_cast<double>(i), slope(counted[i], rows), i);
    LogPlot::legend(svg, right + 64, below + legend_line * static_cast<double>(i), slope(timed[i], rows), 2 + i);
  }
  svg.text(
      margin + 64, below + 2 * legend_line + 4,
      "dashed: the square-cube law, slopes 2 and 1 through the first point. Attention's own products grow with h alone, and times meet latency and caches.",
      {.size = 11, .color = LogPlot::axis_color});
  return svg.str();
}

}  // namespace tessera::bench
