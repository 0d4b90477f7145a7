#include "tessera/comm/algorithms/picture.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "tessera/core/svg.h"

namespace tessera::comm {
namespace {

constexpr double kColumn = 96, kStep = 64, kLeft = 70, kTop = 64, kArrowHead = 8;
constexpr std::string_view kGray = "#cccccc", kDark = "#222222";

// "0", "2-4", "1 3": runs of consecutive numbers together.
std::string chunks_text(const std::vector<int>& chunks) {
  std::string text;
  for (size_t i = 0; i < chunks.size();) {
    size_t end = i + 1;
    while (end < chunks.size() && chunks[end] == chunks[end - 1] + 1) ++end;
    if (!text.empty()) text += ' ';
    text += end == i + 1 ? fmt::format("{}", chunks[i]) : fmt::format("{}-{}", chunks[i], chunks[end - 1]);
    i = end;
  }
  return text;
}

int num_steps(const MessagePlan& plan) {
  int steps = 0;
  for (const auto& rows : plan.rows) {
    for (const auto& row : rows) steps = std::max(steps, row.step + 1);
  }
  return steps;
}

std::string title(const MessagePlan& plan) {
  const auto& request = plan.request;
  auto text = fmt::format("{}, {}, {} ranks", request.op, request.algorithm, request.ranks);
  if (plan.chunks > 0) text += fmt::format(", {} chunk{}", plan.chunks, plan.chunks == 1 ? "" : "s");
  return text;
}

// Whether what `from` sends in this row is added at the other end: said there.
bool is_added(const MessagePlan& plan, int from, const Transfer& sent) {
  const auto& rows = plan.rows[sent.send_to];
  return std::any_of(rows.begin(), rows.end(),
                     [&](const Transfer& row) { return row.step == sent.step && row.receive_from == from && row.receive == sent.send && row.reduce; });
}

void draw_arrow(Svg& svg, double x1, double y1, double x2, double y2, std::string_view color, double width) {
  const double length = std::hypot(x2 - x1, y2 - y1), along_x = (x2 - x1) / length, along_y = (y2 - y1) / length;
  svg.line(x1, y1, x2, y2, color, width);
  const double back_x = x2 - kArrowHead * along_x, back_y = y2 - kArrowHead * along_y, half = kArrowHead / 2;
  svg.polyline({{back_x - half * along_y, back_y + half * along_x}, {x2, y2}, {back_x + half * along_y, back_y - half * along_x}}, color, width);
}

}  // namespace

std::string svg_of(const MessagePlan& plan) {
  const int steps = num_steps(plan), ranks = plan.request.ranks;
  const auto column = [](int rank) { return kLeft + kColumn * (rank + 0.5); };
  const auto level = [](double step) { return kTop + kStep * step; };
  Svg svg(kLeft + kColumn * ranks + 20, kTop + kStep * steps + 34);
  svg.text(14, 20, title(plan), {.size = 14, .bold = true});
  for (int step = 0; step < steps; ++step) {
    if (step % 2 == 0) svg.rect(0, level(step), kLeft + kColumn * ranks + 20, kStep, "#f5f5f5");
    svg.text(14, level(step + 0.5) + 4, fmt::format("step {}", step), {.color = "#666666"});
  }
  for (int rank = 0; rank < ranks; ++rank) {
    svg.line(column(rank), kTop, column(rank), level(steps), kGray, 2);
    svg.text(column(rank), kTop - 12, fmt::format("rank {}", rank), {.anchor = "middle", .bold = true});
  }
  for (int rank = 0; rank < ranks; ++rank) {
    std::map<int, int> nth;  // message of this rank in a step
    for (const auto& row : plan.rows[rank]) {
      if (row.send_to < 0) continue;
      const bool added = is_added(plan, rank, row);
      const auto color = row.send.empty() ? kDark : Svg::color(row.send[0]);
      const double x1 = column(rank), y1 = level(row.step + 0.12), x2 = column(row.send_to), y2 = level(row.step + 0.9);
      draw_arrow(svg, x1, y1, x2, y2, color, added ? 2.6 : 1.2);
      // Near the sender, one behind the other, where arrows that cross have not met yet.
      const bool to_right = x2 > x1;
      const double away = kColumn * ((to_right ? 0.32 : 0.12) + 0.3 * nth[row.step]++), share = std::min(away / std::abs(x2 - x1), 0.8);
      svg.text(x1 + share * (x2 - x1) + (to_right ? 3 : -3), y1 + share * (y2 - y1) - 4, (added ? "+" : "") + chunks_text(row.send),
               {.size = 11, .color = color, .anchor = to_right ? "start" : "end", .bold = true});
    }
  }
  svg.text(14, kTop + kStep * steps + 22,
           plan.chunks == 0 ? "arrows carry no data" : "numbers: chunks; thick, with +: added to what is held; thin: takes its place",
           {.size = 11, .color = "#666666"});
  return svg.str();
}

std::string table_of(const MessagePlan& plan) {
  const int steps = num_steps(plan), ranks = plan.request.ranks;
  std::vector<std::vector<std::string>> cells(steps, std::vector<std::string>(ranks));
  std::vector<size_t> widths(ranks, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& row : plan.rows[rank]) {
      auto& cell = cells[row.step][rank];
      const auto add = [&](const std::string& text) { cell += (cell.empty() ? "" : " ") + text; };
      if (row.send_to >= 0) add(fmt::format(">{} [{}]", row.send_to, chunks_text(row.send)));
      if (row.receive_from >= 0) add(fmt::format("<{} {}[{}]", row.receive_from, row.reduce ? "+" : "", chunks_text(row.receive)));
      widths[rank] = std::max(widths[rank], cell.size());
    }
  }
  std::string text = title(plan) + "\nstep";
  for (int rank = 0; rank < ranks; ++rank) text += fmt::format("  {:<{}}", fmt::format("rank {}", rank), std::max<size_t>(widths[rank], 6));
  text.erase(text.find_last_not_of(' ') + 1);
  for (int step = 0; step < steps; ++step) {
    text += fmt::format("\n{:>4}", step);
    for (int rank = 0; rank < ranks; ++rank) text += fmt::format("  {:<{}}", cells[step][rank], std::max<size_t>(widths[rank], 6));
    text.erase(text.find_last_not_of(' ') + 1);
  }
  return text + "\n";
}

}  // namespace tessera::comm
