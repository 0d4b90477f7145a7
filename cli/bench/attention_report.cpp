#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench/attention.h"
#include "tessera/core/columns.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/svg.h"

namespace tessera::bench {
namespace {

std::string in_milliseconds(double us) { return fmt::format("{:.2f}", us / 1000); }

std::string attention_table(const std::vector<AttentionRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"method", "length", "ranks", "ms", "one device, ms", "rate over one device's", "sent by a rank"}};
  for (const AttentionRow& row : rows) {
    if (row.kind != "attention") continue;
    lines.push_back({row.method, std::to_string(row.length), std::to_string(row.ranks), in_milliseconds(row.time_us), in_milliseconds(row.other_us),
                     fmt::format("{:.2f}", row.rate_over_one()), format_bytes(row.sent_bytes)});
  }
  return lines.size() == 1 ? "" : "Attention over ranks, causal, forward and backward\n\n" + format_columns(lines, {0});
}

std::string packed_table(const std::vector<AttentionRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"length", "documents", "tiles, ms", "all scores, ms", "times as fast"}};
  for (const AttentionRow& row : rows) {
    if (row.kind != "packed") continue;
    lines.push_back({std::to_string(row.length), std::to_string(row.documents), in_milliseconds(row.time_us), in_milliseconds(row.other_us),
                     fmt::format("{:.1f}", row.other_us / row.time_us)});
  }
  return lines.size() == 1 ? "" : "\nPacked documents on one device\n\n" + format_columns(lines);
}

std::string window_table(const std::vector<AttentionRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"length", "window", "ms", "whole sequence, ms", "masked, ms", "over the whole", "over the mask"}};
  for (const AttentionRow& row : rows) {
    if (row.kind != "window") continue;
    lines.push_back({std::to_string(row.length), std::to_string(row.window), in_milliseconds(row.time_us), in_milliseconds(row.whole_us),
                     in_milliseconds(row.other_us), fmt::format("{:.1f}", row.whole_us / row.time_us), fmt::format("{:.1f}", row.other_us / row.time_us)});
  }
  return lines.size() == 1 ? "" : "\nSliding windows on one device\n\n" + format_columns(lines);
}

std::string memory_table(const std::vector<AttentionRow>& rows) {
  std::vector<std::vector<std::string>> lines{{"length", "fused", "all scores held"}};
  for (const AttentionRow& row : rows) {
    if (row.kind != "memory") continue;
    lines.push_back({std::to_string(row.length), fmt::format("{:.1f}%", 100 * row.fused), fmt::format("{:.1f}%", 100 * row.unfused)});
  }
  return lines.size() == 1 ? "" : "\nAttention's share of what a block of LLaMA keeps for backward\n\n" + format_columns(lines);
}

}  // namespace

std::string json_lines(const std::vector<AttentionRow>& rows) {
  std::string text;
  for (const AttentionRow& row : rows) {
    nlohmann::json json{{"kind", row.kind}, {"length", row.length}};
    if (row.kind == "memory") {
      json.update({{"fused", row.fused}, {"unfused", row.unfused}});
    } else {
      json.update({{"dtype", row.dtype}, {"heads", row.heads}, {"kv_heads", row.kv_heads}, {"time_us", row.time_us}});
    }
    if (row.kind == "packed") json.update({{"documents", row.documents}, {"mask_us", row.other_us}, {"mask_over_tiles", row.other_us / row.time_us}});
    if (row.kind == "window") {
      json.update({{"window", row.window},
                   {"whole_us", row.whole_us},
                   {"mask_us", row.other_us},
                   {"whole_over_window", row.whole_us / row.time_us},
                   {"mask_over_window", row.other_us / row.time_us}});
    }
    if (row.kind == "attention") {
      json.update({{"method", row.method},
                   {"backend", row.backend},
                   {"ranks", row.ranks},
                   {"one_us", row.other_us},
                   {"rate_over_one", row.rate_over_one()},
                   {"sent_bytes", row.sent_bytes}});
    }
    text += json_text(json) + "\n";
  }
  return text;
}

std::vector<AttentionRow> read_attention_rows(const std::vector<std::string>& lines) {
  std::vector<AttentionRow> rows;
  for (const auto& line : lines) {
    const auto json = nlohmann::json::parse(line);
    AttentionRow& row = rows.emplace_back();
    const auto read = [&](const char* key, auto& field) {
      if (json.contains(key)) json.at(key).get_to(field);
    };
    read("kind", row.kind);
    read("method", row.method);
    read("backend", row.backend);
    read("dtype", row.dtype);
    read("length", row.length);
    read("heads", row.heads);
    read("kv_heads", row.kv_heads);
    read("documents", row.documents);
    read("window", row.window);
    read("whole_us", row.whole_us);
    read("ranks", row.ranks);
    read("time_us", row.time_us);
    read(row.kind == "attention" ? "one_us" : "mask_us", row.other_us);
    read("sent_bytes", row.sent_bytes);
    read("fused", row.fused);
    read("unfused", row.unfused);
  }
  return rows;
}

std::string format_table(const std::vector<AttentionRow>& rows) { return attention_table(rows) + packed_table(rows) + window_table(rows) + memory_table(rows); }

std::string plot(const std::vector<AttentionRow>& rows) {
  constexpr double margin = 24, legend_width = 190, legend_line = 18;
  std::map<std::string, LogPlot::Points> series;
  LogPlot::Axis x{.base = 2, .label = [](double length) { return fmt::format("{:g}", length); }},
      y{.label = [](double us) { return format_duration(us * 1e-6); }};
  for (const AttentionRow& row : rows) {
    if (row.kind != "attention") continue;
    for (const auto& [name, us] : {std::pair(row.method, row.time_us), std::pair(std::string("one device"), row.other_us)}) {
      auto& points = series[name];
      const auto length = static_cast<double>(row.length);
      if (points.empty() || points.back().first != length) points.emplace_back(length, us);
      x.values.push_back(length);
      y.values.push_back(us);
    }
  }
  if (series.empty()) return Svg(320, 60).text(margin, 34, "nothing was measured").str();
  Svg svg(2 * margin + LogPlot::width + legend_width, 2 * margin + LogPlot::height);
  LogPlot panel(svg, margin, margin, "forward and backward over the length", x, y);
  for (size_t style = 0; const auto& [name, points] : series) {
    panel.series(points, style);
    LogPlot::legend(svg, margin + LogPlot::width + margin, 2 * margin + legend_line * static_cast<double>(style), name, style);
    ++style;
  }
  return svg.str();
}

}  // namespace tessera::bench
