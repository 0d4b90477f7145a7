#include <cmath>

#include <fmt/format.h>

#include "tessera/context_parallel/ring_plan.h"
#include "tessera/core/svg.h"

namespace tessera::context {

namespace {

constexpr double kPlaceWidth = 130, kStepHeight = 104, kPlanLeft = 76, kPlanTop = 70, kCell = 56, kHead = 7;
constexpr std::string_view kUnseen = "#e4e4e4", kSumColor = "#222222";

double middle(int place) { return kPlanLeft + kPlaceWidth * (place + 0.5); }
double level(int step) { return kPlanTop + kStepHeight * step; }

void arrow(Svg& svg, double x1, double y1, double x2, double y2, std::string_view color, double width) {
  const double length = std::hypot(x2 - x1, y2 - y1), along_x = (x2 - x1) / length, along_y = (y2 - y1) / length;
  const double back_x = x2 - kHead * along_x, back_y = y2 - kHead * along_y, half = kHead / 2;
  svg.line(x1, y1, x2, y2, color, width);
  svg.polyline({{back_x - half * along_y, back_y + half * along_x}, {x2, y2}, {back_x + half * along_y, back_y - half * along_x}}, color, width);
}

/// Queries downwards, keys of the block to the right; what is seen has the block's color.
void draw_cell(Svg& svg, double left, double top, const RingStep& step, int64_t queries, int64_t keys) {
  svg.rect(left, top, kCell, kCell, kUnseen, fmt::format("{} pairs", step.pairs()));
  const auto x = [&](int64_t key) { return left + kCell * static_cast<double>(key) / static_cast<double>(keys); };
  const auto y = [&](int64_t query) { return top + kCell * static_cast<double>(query) / static_cast<double>(queries); };
  const auto color = Svg::color(static_cast<size_t>(step.block));
  const auto draw = [&](const nn::AttentionTile& tile) {
    const double left_edge = x(tile.keys.begin), right = x(tile.keys.begin + tile.keys.size);
    const double upper = y(tile.queries.begin), bottom = y(tile.queries.begin + tile.queries.size);
    if (tile.form == nn::TileForm::Whole) {
      svg.rect(left_edge, upper, right - left_edge, bottom - upper, color);
    } else {
      svg.polygon({{left_edge, upper}, {right, bottom}, tile.form == nn::TileForm::UpTo ? std::pair{left_edge, bottom} : std::pair{right, upper}}, color);
    }
  };
  for (const nn::AttentionTile& tiles : step.tiles) {
    for (int64_t time = 0; time < tiles.times; ++time) draw(tiles.single(time));
  }
}

}  // namespace

std::string ring_picture(const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach, const std::string& title) {
  const int places = static_cast<int>(columns.size()), steps = static_cast<int>(ring_plan(columns, 0, reach).size());
  const double width = kPlanLeft + kPlaceWidth * places + 20;
  Svg svg(width, level(steps) + 46);
  svg.text(14, 20, title, {.size = 14, .bold = true});
  svg.text(14, 38, "colored: a block of keys and values, and what is seen of it; dark: its gradients, in backward", {.size = 11, .color = "#666666"});
  for (int step = 0; step < steps; ++step) {
    if (step % 2 == 0) svg.rect(0, level(step) - 8, width, kStepHeight, "#f7f7f7");
    svg.text(14, level(step) + kCell / 2, fmt::format("step {}", step), {.color = "#666666"});
  }
  svg.text(14, level(steps) + 20, "home", {.color = "#666666"});
  for (int place = 0; place < places; ++place) {
    svg.text(middle(place), kPlanTop - 14, fmt::format("rank {}", place), {.anchor = "middle", .bold = true});
    const auto plan = ring_plan(columns, place, reach);
    for (int index = 0; index < steps; ++index) {
      const RingStep& step = plan[static_cast<size_t>(index)];
      draw_cell(svg, middle(place) - kCell / 2, level(index), step, columns[static_cast<size_t>(place)].size(),
                columns[static_cast<size_t>(step.block)].size());
      const double below = level(index) + kCell + 3;
      const auto arrow_to = [&](int other, double beside, std::string_view color, double wide) {
        arrow(svg, middle(place) + beside, below, middle(other) + beside, level(index + 1) - 3, color, wide);
      };
      if (step.keys_go_on) arrow_to((place + 1) % places, -8, Svg::color(static_cast<size_t>(step.block)), 2);
      if (step.sum_goes_on) arrow_to(step.sum_to, 8, kSumColor, 1);
    }
    if (steps > 1) svg.text(middle(place), level(steps) + 20, fmt::format("dK, dV of {}", place), {.anchor = "middle"});
  }
  return svg.str();
}

}  // namespace tessera::context
