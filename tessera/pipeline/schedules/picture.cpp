#include "tessera/pipeline/schedules/picture.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/core/svg.h"

namespace tessera::schedules {
namespace {

constexpr double kRow = 26, kLeft = 64, kRight = 74, kTop = 58, kBottom = 30, kWidest = 1060, kShortest = 17, kLine = 2;
constexpr std::string_view kIdle = "#f2f2f2", kGray = "#666666", kDark = "#222222", kWhite = "#ffffff";

using Rgb = std::array<int, 3>;

/// Blue, vermilion, orange and green of Okabe and Ito: a backward's halves stay apart from the whole, and from forwards, for all eyes.
Rgb color_of(Kind kind) {
  switch (kind) {
    case Kind::Forward:
      return {0x00, 0x72, 0xb2};
    case Kind::Backward:
      return {0xd5, 0x5e, 0x00};
    case Kind::BackwardInput:
      return {0xe6, 0x9f, 0x00};
    default:
      return {0x00, 0x9e, 0x73};
  }
}

/// The first chunk of a rank has the full color, later ones are lighter, down to a third of it.
std::string fill_of(Kind kind, int chunk, int chunks) {
  const double lighter = chunks > 1 ? 0.62 * chunk / (chunks - 1) : 0;
  std::string text = "#";
  for (const int part : color_of(kind)) text += fmt::format("{:02x}", static_cast<int>(std::lround(part + lighter * (255 - part))));
  return text;
}

struct Painter {
  Svg& svg;
  const Schedule& schedule;
  double scale;  // pixels of a unit of time

  double x(double time) const { return kLeft + scale * time; }

  void box(const Action& part, double left, double right, double top, double height) const {
    const auto held = schedule.stages_of(schedule.rank_of[part.stage]);
    const int chunks = static_cast<int>(held.size());
    const int chunk = static_cast<int>(std::ranges::find(held, part.stage) - held.begin());
    const double gap = 0.5;
    svg.rect(left + gap, top + gap, right - left - 2 * gap, height - 2 * gap, fill_of(part.kind, chunk, chunks), to_string(part));
    const auto text = std::to_string(part.micro_batch);
    const double size = std::min({11.0, height - 3, (right - left - 2) / (0.6 * static_cast<double>(text.size()))});
    if (size < 5) return;
    const bool dark = 2 * chunk > chunks - 1 || part.kind == Kind::BackwardInput;
    svg.text((left + right) / 2, top + height / 2 + 0.36 * size, text, {.size = size, .color = dark ? kDark : kWhite, .anchor = "middle"});
  }

  void row(int rank, const std::vector<Span>& spans, double top) const {
    for (size_t i = 0; i < spans.size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      const double left = x(spans[i].start), right = x(spans[i].end);
      if (action.kind == Kind::Update && right - left < kLine) svg.line(left, top + 1, left, top + kRow - 1, kDark, kLine);
      if (action.kind == Kind::Update && right - left >= kLine) svg.rect(left, top + 1, right - left, kRow - 2, kDark, to_string(action));
      if (!action.computes() || right <= left) continue;
      const auto drawn = parts(action);
      const double height = (kRow - 2) / static_cast<double>(drawn.size());
      for (size_t part = 0; part < drawn.size(); ++part) box(drawn[part], left, right, top + 1 + height * static_cast<double>(part), height);
    }
  }
};

void draw_legend(Svg& svg, const std::vector<Drawing>& drawings, double top) {
  struct Entry {
    Kind kind;
    std::string_view text;
  };
  double left = kLeft;
  for (const Entry& entry : {Entry{Kind::Forward, "forward"}, Entry{Kind::Backward, "backward"}, Entry{Kind::BackwardInput, "backward of inputs"},
                             Entry{Kind::BackwardWeight, "gradients of weights"}}) {
    const auto has = [&](const Action& action) { return std::ranges::any_of(parts(action), [&](const Action& part) { return part.kind == entry.kind; }); };
    const bool used = std::ranges::any_of(drawings, [&](const Drawing& drawing) {
      return std::ranges::any_of(drawing.schedule.actions, [&](const RankActions& actions) { return std::ranges::any_of(actions, has); });
    });
    if (!used) continue;
    svg.rect(left, top - 9, 11, 11, fill_of(entry.kind, 0, 1));
    svg.text(left + 16, top, entry.text, {.size = 11, .color = kGray});
    left += 34 + 6.2 * static_cast<double>(entry.text.size());
  }
  const auto some = [&](auto&& predicate) { return std::ranges::any_of(drawings, [&](const Drawing& drawing) { return predicate(drawing.schedule); }); };
  std::string text = "numbers: micro-batches";
  if (some([](const Schedule& schedule) { return schedule.stages() > schedule.ranks(); })) text += "; lighter: later chunks of a rank";
  if (some([](const Schedule& schedule) { return schedule.is_asynchronous(); })) text += "; black lines: updates of the weights";
  svg.text(left, top, text, {.size = 11, .color = kGray});
}

double makespan_of(const Timeline& timeline) {
  double end = 0;
  for (const auto& spans : timeline) {
    if (!spans.empty()) end = std::max(end, spans.back().end);
  }
  return end;
}

double shortest_of(const Drawing& drawing) {
  double shortest = makespan_of(drawing.timeline);
  for (size_t rank = 0; rank < drawing.timeline.size(); ++rank) {
    for (size_t i = 0; i < drawing.timeline[rank].size(); ++i) {
      const Span& span = drawing.timeline[rank][i];
      if (drawing.schedule.actions[rank][i].computes() && span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    }
  }
  return shortest;
}

void draw(Svg& svg, const Drawing& drawing, double scale, double top) {
  const auto measures = measure(drawing.schedule, drawing.timeline);
  svg.text(kLeft, top - 10, drawing.title, {.size = 13, .bold = true});
  svg.text(kLeft + scale * makespan_of(drawing.timeline) + 8, top - 10, "peak", {.size = 11, .color = kGray});
  for (int rank = 0; rank < drawing.schedule.ranks(); ++rank) {
    const double row = top + kRow * rank;
    svg.text(14, row + kRow / 2 + 4, fmt::format("rank {}", rank), {.size = 12});
    svg.rect(kLeft, row + 1, scale * makespan_of(drawing.timeline), kRow - 2, kIdle);
    Painter{svg, drawing.schedule, scale}.row(rank, drawing.timeline[rank], row);
    svg.text(kLeft + scale * makespan_of(drawing.timeline) + 8, row + kRow / 2 + 4, fmt::format("{:.3g}", measures.peak_activations[rank]), {.size = 12});
  }
  svg.text(kLeft, top + kRow * drawing.schedule.ranks() + 16,
           fmt::format("makespan {}{}, bubble {:.1f}% of it; peak: activations in micro-batches of a rank's whole share",
                       measures.makespan < 1e4 ? fmt::format("{:.4g}", measures.makespan) : fmt::format("{:.0f}", measures.makespan), drawing.unit,
                       100 * measures.bubble_fraction),
           {.size = 11, .color = kGray});
}

}  // namespace

std::string svg_of(const std::vector<Drawing>& drawings) {
  double longest = 0, shortest = 0;
  for (const auto& drawing : drawings) {
    longest = std::max(longest, makespan_of(drawing.timeline));
    const double own = shortest_of(drawing);
    shortest = shortest == 0 ? own : std::min(shortest, own);
  }
  // Boxes wide enough for their numbers, where the page is.
  const double scale = longest > 0 ? std::min(kWidest / longest, std::max(kShortest / shortest, 0.5 * kWidest / longest)) : 1;
  double height = kTop;
  for (const auto& drawing : drawings) height += kRow * drawing.schedule.ranks() + kBottom + 22;
  Svg svg(std::max(kLeft + scale * longest + kRight, 640.0), height - 14);
  svg.rect(0, 0, std::max(kLeft + scale * longest + kRight, 640.0), height - 14, kWhite);
  draw_legend(svg, drawings, 20);
  double top = kTop;
  for (const auto& drawing : drawings) {
    draw(svg, drawing, scale, top);
    top += kRow * drawing.schedule.ranks() + kBottom + 22;
  }
  return svg.str();
}

}  // namespace tessera::schedules
