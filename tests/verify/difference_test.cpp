#include "tessera/verify/difference.h"

#include <cmath>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/verify/bounds.h"
#include "tessera/verify/meeting.h"
#include "tessera/verify/verify.h"

namespace tessera {
namespace {

using checkpoint::SlicedTensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor numbers(std::vector<float> values) { return at::tensor(values); }

TEST(Difference, OfTensors) {
  EXPECT_EQ(largest_difference(numbers({1, 2, 3}), numbers({1, 2, 3})), 0);
  EXPECT_EQ(largest_difference(numbers({1, 2, 3.5}), numbers({1, 3, 3})), 1);
  EXPECT_EQ(largest_difference(numbers({}), numbers({})), 0);
  EXPECT_EQ(largest_difference(at::tensor(2.0), at::tensor(2.5)), 0.5);
  EXPECT_EQ(largest_difference(numbers({-0.f}), numbers({0.f})), 0);
  EXPECT_NEAR(largest_difference(numbers({1.001f}).to(at::kBFloat16), numbers({1.001f})), 1e-3, 1e-6);
  const auto inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(largest_difference(numbers({inf, 1}), numbers({inf, 1})), 0);
  EXPECT_EQ(largest_difference(numbers({inf}), numbers({-inf})), kInfinity);
  EXPECT_EQ(largest_difference(numbers({inf}), numbers({1})), kInfinity);
  EXPECT_EQ(largest_difference(numbers({1, nan}), numbers({1, 2})), kInfinity);
  EXPECT_EQ(largest_difference(numbers({nan}), numbers({nan})), kInfinity);
}

TEST(Difference, Relative) {
  EXPECT_EQ(relative(0, 0), 0);
  EXPECT_EQ(relative(1, 0), kInfinity);
  EXPECT_EQ(relative(1, 4), 0.25);
  EXPECT_EQ(relative(kInfinity, kInfinity), kInfinity);
  EXPECT_EQ(relative(1, kInfinity), kInfinity) << "nothing is small beside it";
  EXPECT_EQ(relative(1, std::nan("")), kInfinity);
  EXPECT_EQ(relative(std::nan(""), 1), kInfinity);
}

TEST(Difference, ABiasIsMeasuredByItsWeightToo) {
  const std::vector<SlicedTensor> reference{{numbers({10, -20}), Slice::whole("w1.weight", {2})},
                                            {numbers({1e-9f}), Slice::whole("w1.bias", {1})},
                                            {numbers({1e-3f}), Slice::whole("norm.weight", {1})},
                                            {at::Tensor(), Slice::whole("unused", {1})}};
  auto scales = gradient_scales(reference, 8);
  EXPECT_EQ(scales["w1.weight"], 20);
  EXPECT_EQ(scales["w1.bias"], 2);
  EXPECT_FLOAT_EQ(static_cast<float>(scales["norm.weight"]), 1e-3f);
  EXPECT_EQ(scales["unused"], 0);
}

TEST(Difference, WhatIsZeroInExactArithmeticIsMeasuredByWhatItIsTheRoundingOf) {
  const std::vector<SlicedTensor> reference{{numbers({1e-9f}), Slice::whole("0.attention.wq.weight", {1})},
                                            {numbers({0.5f}), Slice::whole("0.attention.wk.weight", {1})},
                                            {numbers({1e-9f}), Slice::whole("0.attention.wk.bias", {1})},
                                            {numbers({20}), Slice::whole("0.attention.wv.weight", {1})},
                                            {numbers({30}), Slice::whole("1.attention.wv.weight", {1})}};
  auto some = gradient_scales(reference, 2), one = gradient_scales(reference, 1);
  EXPECT_EQ(some["0.attention.wk.bias"], 0.5);
  EXPECT_EQ(some["0.attention.wk.weight"], 0.5);
  EXPECT_FLOAT_EQ(static_cast<float>(some["0.attention.wq.weight"]), 1e-9f);
  for (const char* name : {"wq.weight", "wk.weight", "wk.bias", "wv.weight"}) EXPECT_EQ(one["0.attention." + std::string(name)], 20) << name;
}

class Slices : public ::testing::Test {
 protected:
  // Rows of a [5, 2] tensor over three ranks: 2, 0 and 3; the last two rows twice.
  SlicedTensor part(int64_t begin, int64_t size) const { return {whole_.narrow(0, begin, size).clone(), Slice::along("w", {5, 2}, 0, begin, size)}; }
  const at::Tensor whole_ = at::arange(10, at::kFloat).reshape({5, 2});
  const std::vector<SlicedTensor> reference_{{whole_, Slice::whole("w", {5, 2})}};
  const Scales scales_{{"w", 9}};
};

TEST_F(Slices, EqualOnesAreEqual) {
  TensorComparer comparer(0);
  comparer.compare(1, reference_, {{part(0, 2)}, {part(2, 0)}, {part(2, 3)}, {part(3, 2)}}, scales_);
  EXPECT_EQ(comparer.list().worst().value, 0);
  EXPECT_TRUE(comparer.list().within());
}

TEST_F(Slices, TheFarthestRankAndStepAreNamed) {
  TensorComparer comparer(1e-5);
  std::vector<std::vector<SlicedTensor>> ranks{{part(0, 2)}, {part(2, 3)}, {part(3, 2)}};
  comparer.compare(1, reference_, ranks, scales_);
  ranks[2][0].tensor[1][1] += 0.9;  // a replica that has drifted; the logical tensor is taken from rank 1
  comparer.compare(2, reference_, ranks, scales_);
  ranks[1][0].tensor[0][0] += 0.09;
  comparer.compare(3, reference_, ranks, scales_);
  const auto& worst = comparer.list().worst();
  EXPECT_NEAR(worst.value, 0.1, 1e-6);
  EXPECT_EQ(worst.step, 2);
  EXPECT_EQ(worst.rank, 2);
  EXPECT_FALSE(comparer.list().within());
}

TEST_F(Slices, WhatIsFarIsMeasuredByHowMuchFartherFromTheExactItIs) {
  int asked = 0;
  const auto value = [&](double rank_off, double device_off, at::ScalarType type = at::kFloat) {
    const at::Tensor exact = (whole_ - device_off).to(type);
    const Exact ask = [&](const std::string&) { return ++asked, exact; };
    auto ranks = std::vector<std::vector<SlicedTensor>>{{part(0, 2)}, {part(2, 3)}};
    ranks[1][0].tensor[0][0] = exact[2][0] + rank_off;
    TensorComparer comparer(0.1);
    comparer.compare(1, reference_, ranks, scales_, 0, ask);
    return comparer.list().worst().value;
  };
  EXPECT_NEAR(value(-0.3, 0.4), 0.7 / 9, 1e-6) << "within the bound";
  EXPECT_EQ(asked, 0);
  EXPECT_NEAR(value(-0.9, 0.9), 0, 1e-6) << "as far off as the device, on the other side";
  EXPECT_NEAR(value(-2.7, 0.9), 1.8 / 9, 1e-6);
  EXPECT_NEAR(value(2.7, 0.9), 1.8 / 9, 1e-6) << "never more than the two are apart";
  EXPECT_EQ(asked, 3);
  EXPECT_NEAR(value(-0.96, 0.13, at::kDouble), 0, 1e-6) << "seven times as far, by another order of additions in fp32";
  EXPECT_NEAR(value(-2.7, 0.13, at::kDouble), (2.7 - 8 * 0.13) / 9, 1e-6);
  EXPECT_NEAR(value(-2.7, 0.9, at::kDouble), 1.8 / 9, 0.03) << "no large part of the gradient";
  EXPECT_EQ(value(-2.7, kInfinity), kInfinity) << "what one device has not says nothing";
}

TEST_F(Slices, WhatNoRankHoldsAndWrongShapesAreInfinitelyFar) {
  TensorComparer gap(1e-5), missing(1e-5), shape(1e-5);
  gap.compare(1, reference_, {{part(0, 2)}, {part(3, 2)}}, scales_);
  EXPECT_EQ(gap.list().worst().value, kInfinity);
  EXPECT_NE(gap.list().worst().note.find("w"), std::string::npos);
  missing.compare(1, reference_, {{}, {}}, scales_);
  EXPECT_EQ(missing.list().worst().value, kInfinity);
  auto wrong = part(0, 5);
  wrong.tensor = wrong.tensor.narrow(0, 0, 4);
  shape.compare(1, reference_, {{wrong}}, scales_);
  EXPECT_EQ(shape.list().worst().note, "has the shape [4, 2]");
}

TEST_F(Slices, UndefinedIsZero) {
  TensorComparer comparer(1e-5);
  comparer.compare(1, {{at::zeros({5, 2}), Slice::whole("w", {5, 2})}}, {{{at::Tensor(), Slice::whole("w", {5, 2})}}}, {{"w", 0}});
  EXPECT_EQ(comparer.list().worst().value, 0);
  comparer.compare(2, reference_, {{{at::Tensor(), Slice::whole("w", {5, 2})}}}, scales_);
  EXPECT_EQ(comparer.list().worst().value, 1);
}

TEST_F(Slices, TheReferenceFollows) {
  const at::Tensor target = at::zeros({5, 2});
  follow({target, Slice::whole("w", {5, 2})}, {{part(0, 2)}, {part(3, 2)}});  // a gap: nothing to follow
  EXPECT_EQ(largest_entry(target), 0);
  follow({target, Slice::whole("w", {5, 2})}, {{part(0, 2)}, {part(2, 3)}});
  EXPECT_TRUE(at::equal(target, whole_));
}

Config with(const std::vector<std::string>& sets) { return parse_config("[batch]\nglobal_size = 12\nmicro_size = 2\n", ".", sets); }

TEST(VerifyBounds, FollowTheNumberFormats) {
  const auto fp32 = bounds_of(with({}), 3, 3);
  EXPECT_EQ(fp32.losses, 5e-6);
  EXPECT_EQ(fp32.gradients, 1e-5);
  EXPECT_EQ(fp32.weights, 1e-5);
  // Data ranks repeat one device's products, whatever their type; what crosses the network decides.
  EXPECT_EQ(bounds_of(with({"precision.compute=bf16"}), 3, 3).gradients, 1e-5);
  EXPECT_EQ(bounds_of(with({"precision.reduce=bf16"}), 3, 3).gradients, 4 * std::ldexp(1, -8));
  EXPECT_EQ(bounds_of(with({"comm.compression=fp16"}), 2, 2).gradients, 3 * std::ldexp(1, -11));
  EXPECT_EQ(bounds_of(with({"precision.params=bf16"}), 2, 2).weights, std::ldexp(1, -7));
  // Experts cross between ranks of tensor parallelism where they are sharded, unless each holds others.
  const auto experts = [](const std::string& stage, const std::string& ep) {
    return bounds_of(with({"model.experts=4", "mesh.tp=2", "mesh.ep=" + ep, "precision.reduce=bf16", "zero.stage=" + stage}), 2, 1).gradients;
  };
  EXPECT_EQ(experts("2", "1"), 3 * std::ldexp(1, -8));
  EXPECT_EQ(experts("2", "2"), 1e-5);
  EXPECT_EQ(experts("0", "1"), 1e-5);
  const auto split = bounds_of(with({"precision.compute=bf16"}), 6, 3);
  EXPECT_EQ(split.gradients, std::ldexp(1, -5));
  EXPECT_EQ(split.losses, std::ldexp(1, -8));
  // Rows of several ranks under one scale are rounded otherwise, each under its own are not.
  const auto scaled = [](const std::string& by, const std::string& ep) {
    return bounds_of(with({"model.experts=4", "mesh.ep=" + ep, "zero.stage=1", "precision.compute=fp8", "precision.fp8_scales=" + by}), 2, 2).losses;
  };
  EXPECT_EQ(scaled("tensor", "2"), std::ldexp(1, -4));
  EXPECT_EQ(scaled("row", "2"), 5e-6);
  EXPECT_EQ(scaled("tensor", "1"), 5e-6);
}

TEST(VerifyBounds, AreBitsWhereTheArithmeticIsTheSame) {
  const auto coarse = bounds_of(with({"precision.compute=fp8"}), 6, 3);
  EXPECT_EQ(coarse.routing, 0.5) << "what scores can exceed";
  EXPECT_EQ(coarse.routing_share, std::ldexp(1, -4));
  EXPECT_TRUE(bounds_of(with({}), 1, 1).bit_for_bit);
  EXPECT_TRUE(bounds_of(with({"run.deterministic=true"}), 5, 5).bit_for_bit);
  EXPECT_FALSE(bounds_of(with({"run.deterministic=true"}), 6, 3).bit_for_bit);  // products are split, too
  EXPECT_FALSE(bounds_of(with({"run.deterministic=true", "precision.reduce=bf16"}), 3, 3).bit_for_bit);
  EXPECT_EQ(bounds_of(with({}), 1, 1).gradients, 0);
  EXPECT_EQ(bounds_of(with({}), 1, 1).output(at::kFloat, 100), 0);
}

TEST(VerifyBounds, OutputsMayBeOffByARandomWalkOfRounding) {
  const auto bounds = bounds_of(with({}), 2, 2);
  EXPECT_EQ(bounds.output(at::kFloat, 0), 8 * std::ldexp(1, -24));
  EXPECT_EQ(bounds.output(at::kFloat, 99), 10 * bounds.output(at::kFloat, 0));
  EXPECT_EQ(bounds.output(at::kBFloat16, 0), 8 * std::ldexp(1, -8));
  EXPECT_LT(bounds.output(at::kFloat, 10000), 1e-3);
}

TEST(Meeting, TakesTurns) {
  for (int ranks : {1, 2, 5}) {
    Meeting meeting(ranks);
    std::atomic<int> working{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&] {
        for (int round = 0; round < 20; ++round) {
          ++working;
          meeting.show();
        }
      });
    }
    for (int round = 1; round <= 20; ++round) {
      meeting.wait_for_ranks();
      EXPECT_EQ(working, round * ranks);
      meeting.dismiss();
    }
    for (auto& thread : threads) thread.join();
    meeting.rethrow();
  }
}

TEST(Meeting, AFailureWakesEverybodyAndTheFirstCauseCounts) {
  Meeting meeting(3);
  std::thread rank([&] { EXPECT_THROW(meeting.show(), CommError); });
  std::thread reference([&] { EXPECT_THROW(meeting.wait_for_ranks(), CommError); });
  meeting.fail(std::make_exception_ptr(ConfigError("first")));
  meeting.fail(std::make_exception_ptr(InternalError("second")));
  rank.join();
  reference.join();
  EXPECT_THROW(meeting.show(), CommError);
  EXPECT_THROW(meeting.rethrow(), ConfigError);
}

TEST(Difference, OfWhatOverflowsOnOneSideAloneIsNoFaultOfSums) {
  VerifyReport report;
  report.steps = 2;
  report.gradients = {.bound = 1e-2, .each = {{.name = "head.weight", .value = kInfinity, .step = 1}}};
  EXPECT_NE(to_string(report).find("how gradients are added up"), std::string::npos) << "without a loss scale";
  report.scaled = true;
  EXPECT_NE(to_string(report).find("of head.weight overflowed in fp16 on one side alone"), std::string::npos) << to_string(report);
  report.gradients.each[0].note = "elements that no rank holds";
  EXPECT_NE(to_string(report).find("how gradients are added up"), std::string::npos);
}

}  // namespace
}  // namespace tessera
