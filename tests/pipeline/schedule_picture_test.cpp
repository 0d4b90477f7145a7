#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/picture.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tests/made_docs.h"
#include "tests/pipeline/schedules.h"

namespace tessera::schedules {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t times = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
  return times;
}

// The pictures of docs/pipeline-schedules.md: what the generators make, four ranks, F = B = W.
TEST(SchedulePicture, ThePageShowsWhatTheGeneratorsMake) {
  for (const auto& known : known_schedules()) {
    auto request = testing_support::request_of(known.name, 4, 8);
    if (known.name == "interleaved" || known.name == "breadth_first") request.chunks = 2;
    if (known.name == "zb_auto") continue;  // zb_1p and zb_2p are two of it
    if (known.name == "zb_1p" || known.name == "zb_2p") request.costs = {.forward = 2, .backward_input = 2, .backward_weight = 1};
    if (known.name == "naive") request.micro_batches = 2;
    const auto schedule = make_schedule(request);
    const bool unequal = request.costs.backward_weight != request.costs.forward;
    const auto title = fmt::format("{}: 4 ranks, {} micro-batches{}", known.name, request.micro_batches, unequal ? ", F = B = 2 W" : "");
    testing_support::expect_picture_in_docs("pipeline-" + known.name + ".svg", svg_of({{title, schedule, simulate(schedule, request.costs)}}),
                                            "pipeline-schedules.md");
  }
}

// So is its table, which `tessera schedule --list` prints too.
TEST(SchedulePicture, ThePageHasTheTableOfTheList) {
  const auto page = testing_support::text_of_docs("pipeline-schedules.md");
  for (const auto& known : known_schedules()) {
    const auto row = fmt::format("| `{}` | {} | {} | {} | {} |", known.name, known.what, known.domain, known.bubble, known.peak);
    EXPECT_NE(page.find(row), std::string::npos) << "docs/pipeline-schedules.md lacks\n" << row;
  }
}

TEST(SchedulePicture, TheGridHasAColumnPerUnitOfTime) {
  const auto schedule = one_f_one_b(2, 2);
  EXPECT_EQ(grid_of(schedule, simulate(schedule)),
            "rank 0 F0 F1 .  .  B0 =  .  B1 =\n"
            "rank 1 .  F0 B0 =  F1 B1 =  .  .\n");
  EXPECT_EQ(grid_of(schedule, simulate(schedule, {.communication = 0.5})),
            "rank 0 F0 =  F1 =  .  .  .  .  .  .  B0 =  =  =  .  .  B1 =  =  =\n"
            "rank 1 .  .  .  F0 =  B0 =  =  =  F1 =  B1 =  =  =  .  .  .  .  .\n");
  const auto chunks = dualpipev(1, 2);
  EXPECT_EQ(grid_of(chunks, simulate(chunks)), "rank 0 0F0     1F0     0F1     1B0     =       1F1&0B0 =       =       1B1     =       0I1     0W1\n");
  EXPECT_EQ(grid_of(schedule, simulate(schedule, {.forward = 1.01}), 100),
            "(a grid of 903 columns is not drawn: costs that are multiples of each other need fewer)\n");
}

TEST(SchedulePicture, HasABoxPerComputation) {
  const auto schedule = zb_v(2, 3);
  const auto svg = svg_of({{"zb_v", schedule, simulate(schedule)}});
  EXPECT_EQ(count(svg, "</title></rect>"), 2 * 2 * 3 * 3);  // ranks, chunks, micro-batches, F I W
  const auto overlapped = dualpipev(1, 2);
  EXPECT_EQ(count(svg_of({{"a", overlapped, simulate(overlapped)}, {"b", overlapped, simulate(overlapped)}}), "</title></rect>"), 2 * 9);
}

TEST(ScheduleTrace, HasAnEventPerActionAndAnArrowPerMessage) {
  const auto schedule = pipedream(2, 3);
  const auto trace = nlohmann::json::parse(trace_of({{"pipedream", schedule, simulate(schedule)}}, 1000));
  int boxes = 0, arrows = 0;
  double last = 0;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string phase = event.at("ph");
    if (phase == "X") ++boxes, last = std::max(last, event.at("ts").get<double>() + event.at("dur").get<double>());
    if (phase == "s") ++arrows;
  }
  EXPECT_EQ(boxes, 2 * 3 * 3);  // forward, backward, update
  EXPECT_EQ(arrows, 2 * 3);
  EXPECT_EQ(last, 1000 * measure(schedule, simulate(schedule)).makespan);
}

}  // namespace
}  // namespace tessera::schedules
