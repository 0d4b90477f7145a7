// The rates of table 5 of "Zero Bubble Pipeline Parallelism" (Qi, Wan, Huang, Lin, ICLR 2024, arXiv:2401.10241), and those of 1F1B in its table 4: computed
// there, as here, from profiled times of the passes. c is the longest span of a stage from its first pass to its last, the rate (c - m (F + B + W)) / c.

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/pipeline/schedules/generators.h"

namespace tessera::schedules {
namespace {

struct Published {
  int ranks, micro_batches;
  Costs costs;  // milliseconds: F, B, W, message
  double one_f_one_b, zb_h1, zb_h2;
};

const std::vector<Published> kPublished{
    {8, 24, {18.522, 18.086, 9.337, 0.601}, 0.2431, 0.1585, 0.1083},   {8, 32, {18.513, 18.086, 9.331, 0.626}, 0.1985, 0.1242, 0.0837},
    {8, 64, {18.546, 18.097, 9.321, 0.762}, 0.1240, 0.0674, 0.0444},   {8, 24, {29.718, 29.444, 19.927, 0.527}, 0.2347, 0.1323, 0.0698},
    {8, 32, {29.802, 29.428, 19.53, 0.577}, 0.1898, 0.1045, 0.0559},   {8, 64, {29.935, 29.621, 19.388, 0.535}, 0.1091, 0.0554, 0.0294},
    {16, 48, {11.347, 11.248, 8.132, 0.377}, 0.2552, 0.1397, 0.0672},  {16, 64, {11.307, 11.254, 8.101, 0.379}, 0.2082, 0.1088, 0.0516},
    {16, 128, {11.325, 11.308, 8.109, 0.378}, 0.1251, 0.0576, 0.0266}, {32, 96, {10.419, 10.207, 7.715, 0.408}, 0.2646, 0.1421, 0.0641},
    {32, 128, {10.408, 10.204, 7.703, 0.408}, 0.2168, 0.1106, 0.0490}, {32, 256, {10.402, 10.248, 7.698, 0.46}, 0.1352, 0.0594, 0.0257},
};

double rate(const Schedule& schedule, const Costs& costs) { return measure(schedule, simulate(schedule, costs)).span_bubble_rate; }

double to_4_decimals(double rate) { return std::round(rate * 1e4) / 1e4; }

TEST(PublishedRates, AllThirtySixAreReproduced) {
  for (const auto& row : kPublished) {
    SCOPED_TRACE(std::to_string(row.ranks) + " ranks, " + std::to_string(row.micro_batches) + " micro-batches");
    EXPECT_DOUBLE_EQ(to_4_decimals(rate(one_f_one_b(row.ranks, row.micro_batches), row.costs)), row.one_f_one_b);
    EXPECT_DOUBLE_EQ(to_4_decimals(rate(zb_h1(row.ranks, row.micro_batches), row.costs)), row.zb_h1);
    EXPECT_DOUBLE_EQ(to_4_decimals(rate(zb_h2(row.ranks, row.micro_batches), row.costs)), row.zb_h2);
  }
}

// What the paper's search found (table 4, ZB-2p) depends on how much of a micro-batch's activations its backward of inputs frees, which it does not print. With
// a half of them, ours ends where theirs did.
TEST(PublishedRates, TheAutomaticScheduleComesCloseToTheirs) {
  const std::vector<double> zb_2p{0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010};
  for (size_t i = 0; i < zb_2p.size(); ++i) {
    const auto& row = kPublished[i];
    const double found = rate(automatic(row.ranks, row.micro_batches, row.costs, {.micro_batches = 2 * row.ranks, .kept = 0.5}), row.costs);
    EXPECT_LT(found, zb_2p[i] + 0.002) << row.ranks << " ranks, " << row.micro_batches << " micro-batches";
  }
}

TEST(PublishedRates, TheAutomaticScheduleIsNeverWorseThanThoseByHand) {
  for (const auto& row : kPublished) {
    if (row.ranks > 16) continue;
    EXPECT_LE(rate(automatic(row.ranks, row.micro_batches, row.costs, {.micro_batches = row.ranks}), row.costs), row.zb_h1 + 5e-5);
    EXPECT_LE(rate(automatic(row.ranks, row.micro_batches, row.costs, {.micro_batches = 2 * row.ranks}), row.costs), row.zb_h2 + 5e-5);
  }
}

}  // namespace
}  // namespace tessera::schedules
