// Outputs that the ranks of a layout hold in slices, as tensor and sequence parallelism leave them.

#include "tessera/verify/outputs.h"

#include <algorithm>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/recompute/recompute.h"

namespace tessera {
namespace {

/// Twice a layer.
struct HeardImpl : nn::Module {
  HeardImpl() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(layer(at::tanh(layer(x)))); }
  nn::Linear layer{3, 3};
};
TESSERA_MODULE(Heard);

/// A module that is computed again in backward is heard once.
TEST(Tap, HearsACallOnce) {
  struct Sink : OutputSink {
    void output(const OutputKey& key, const at::Tensor&, const nn::OutputLayout&) override { keys.push_back(key); }
    std::vector<OutputKey> keys;
  };
  Heard module;
  nn::assign_paths(*module);
  for (const char* recomputed : {"", "layer"}) {
    Sink plain, again;
    const auto run = [&](Sink& sink) {
      const Attachment tap = tap_outputs(*module, {.begin = 0, .end = 4}, sink);
      const nn::SampleScope sample({.seed = 1, .step = 1});
      module(at::ones({2, 3}).requires_grad_()).sum().backward();
    };
    run(plain);
    const Attachment recomputing = recompute(*module, {.modules = recomputed});
    run(again);
    EXPECT_EQ(plain.keys.size(), 6) << "three calls, forward and backward";
    EXPECT_EQ(again.keys.size(), plain.keys.size()) << recomputed;
    for (const OutputKey& key : again.keys) EXPECT_EQ(std::ranges::count(plain.keys, key), 1) << key.module << " " << key.call;
  }
}

constexpr BatchShape kBatch{.global_size = 8, .micro_size = 2};
constexpr int64_t kRows = 6, kColumns = 5;

/// Two ranks and one device; a module "wq" whose output is [6, 5].
class SlicedOutputs : public ::testing::Test {
 protected:
  static OutputKey key(int64_t sample, bool backward = false) { return {.backward = backward, .module = "wq", .first_sample = sample}; }
  static nn::OutputLayout part(int64_t dim, int64_t begin, int64_t size) {
    return {.boxes = Slice::along("wq", {kRows, kColumns}, dim, begin, size).boxes, .partial_over = {}};
  }
  void give(int rank, int64_t sample, const at::Tensor& values, const nn::OutputLayout& layout) { ranks_[rank].output(key(sample), values, layout); }
  OutputComparison compared(int64_t sample) {
    OutputComparer comparer({&ranks_[0], &ranks_[1]}, bounds_, kBatch);
    comparer.output(key(sample), whole_, {});
    return comparer.forward();
  }

  const at::Tensor whole_ = at::arange(kRows * kColumns, at::kFloat).reshape({kRows, kColumns});
  const VerifyBounds bounds_{.output_roundoff = roundoff("fp32")};
  RecordedOutputs ranks_[2]{RecordedOutputs(1 << 20), RecordedOutputs(1 << 20)};
};

TEST_F(SlicedOutputs, OfFeaturesAndOfTheSequenceAreHeldAgainstTheirPart) {
  give(0, 0, whole_.narrow(1, 0, 3), part(1, 0, 3));
  give(1, 0, whole_.narrow(1, 3, 2), part(1, 3, 2));
  auto result = compared(0);
  EXPECT_EQ(result.compared, 2);
  EXPECT_EQ(result.bit_equal, 2);
  EXPECT_EQ(result.unseen, 0);
  give(0, 2, whole_.narrow(0, 0, 5), part(0, 0, 5));
  give(1, 2, whole_.narrow(0, 5, 1), part(0, 5, 1));
  result = compared(2);
  EXPECT_EQ(result.bit_equal, 2);
  EXPECT_EQ(result.unseen, 0);
}

TEST_F(SlicedOutputs, ASliceThatIsOffIsNamedWithItsRankAndStep) {
  give(0, 12, whole_.narrow(1, 0, 3), part(1, 0, 3));
  give(1, 12, whole_.narrow(1, 2, 2), part(1, 3, 2));  // a column too early
  const auto result = compared(12);
  ASSERT_TRUE(result.first);
  EXPECT_EQ(result.first->module, "wq");
  EXPECT_EQ(result.first->rank, 1);
  EXPECT_EQ(result.first->step, 2);
  EXPECT_EQ(result.first->micro_batch, 2);
  EXPECT_NEAR(result.first->value, 1.0 / 29, 1e-6) << "of the largest entry of the whole";
}

TEST_F(SlicedOutputs, WhatIsNotMadeUpIsUnseen) {
  give(0, 0, whole_.narrow(1, 0, 3), part(1, 0, 3));
  EXPECT_EQ(compared(0).unseen, 1) << "two columns are nobody's";
}

TEST_F(SlicedOutputs, TermsOfASumAreAddedUpWhereTheyAreOfTheSamePart) {
  const nn::OutputLayout term{.boxes = {}, .partial_over = {"tp"}};
  give(0, 0, whole_ * 0.25, term);
  give(1, 0, whole_ * 0.75, term);
  auto result = compared(0);
  EXPECT_EQ(result.compared, 1) << "a summand says nothing by itself";
  EXPECT_EQ(result.bit_equal, 1);
  EXPECT_EQ(result.unseen, 0);
  give(1, 2, whole_ * 0.25, term);  // the other's is missing
  EXPECT_NEAR(compared(2).first.value().value, 0.75, 1e-6);
  // Of the output final, of the gradient that arrives at it partial.
  nn::OutputLayout shared = part(1, 0, 3);
  shared.gradient_partial_over = {"tp"};
  for (const int rank : {0, 1}) {
    ranks_[rank].output(key(4), whole_.narrow(1, 0, 3), shared);
    ranks_[rank].output(key(4, /*backward=*/true), whole_.narrow(1, 0, 3) * 0.5, shared);
  }
  OutputComparer comparer({&ranks_[0], &ranks_[1]}, bounds_, kBatch);
  comparer.output(key(4), whole_, {});
  comparer.output(key(4, /*backward=*/true), whole_, {});
  EXPECT_EQ(comparer.forward().bit_equal, 2);
  EXPECT_EQ(comparer.backward().compared, 1);
  EXPECT_EQ(comparer.backward().bit_equal, 1);
  EXPECT_EQ(comparer.backward().unseen, 1) << "two columns are nobody's";
}

/// Four ranks, cp by tp: those of tp have the same term, and make up a sum each with the others of cp.
TEST_F(SlicedOutputs, TermsAreAddedUpOverTheAxesThatTheyAreTermsOver) {
  std::vector<RecordedOutputs> four(4, RecordedOutputs(1 << 20));
  const double parts[] = {0.25, 0.25, 0.75, 0.5};  // the last one is wrong
  std::vector<RecordedOutputs*> ranks;
  for (size_t rank = 0; rank < four.size(); ++rank) {
    four[rank].output(key(0), whole_ * parts[rank], {.boxes = {}, .partial_over = {"cp"}});
    ranks.push_back(&four[rank]);
  }
  OutputComparer comparer(ranks, bounds_, kBatch, {{"cp", 2}, {"tp", 2}});
  comparer.output(key(0), whole_, {});
  EXPECT_EQ(comparer.forward().compared, 2);
  EXPECT_EQ(comparer.forward().bit_equal, 1);
  EXPECT_EQ(comparer.forward().first->rank, 1);
}

TEST_F(SlicedOutputs, ASumOfTermsThatWereNotKeptIsUnknown) {
  const nn::OutputLayout term{.boxes = {}, .partial_over = {"tp"}};
  RecordedOutputs full[2]{RecordedOutputs(1 << 20), RecordedOutputs(0)};
  for (auto& rank : full) rank.output(key(0), whole_ * 0.5, term);
  OutputComparer comparer({&full[0], &full[1]}, bounds_, kBatch);
  comparer.output(key(0), whole_, {});
  EXPECT_EQ(comparer.forward().compared, 1);
  EXPECT_EQ(comparer.forward().beyond_budget, 1);
  EXPECT_FALSE(comparer.forward().first);
}

TEST_F(SlicedOutputs, AnotherShapeThanStatedIsInfinitelyFar) {
  give(0, 0, whole_.narrow(1, 0, 2), part(1, 0, 3));
  const auto result = compared(0);
  ASSERT_TRUE(result.first);
  EXPECT_EQ(result.first->note, "has the shape [6, 2] in place of [6, 3]");
}

TEST_F(SlicedOutputs, APartThatCannotBeIsOurBug) {
  give(0, 0, whole_, {.boxes = {{{0, 0}, {kRows, kColumns + 1}}}, .partial_over = {}});
  EXPECT_THROW(compared(0), InternalError);
}

TEST_F(SlicedOutputs, AStepBeginsWithItsWholeBudget) {
  RecordedOutputs outputs(static_cast<int64_t>(whole_.nbytes()));
  for (const int64_t sample : {0, 8}) {
    outputs.begin_step();
    outputs.output(key(sample), whole_, {});
    outputs.output(key(sample + 2), whole_, {});
    ASSERT_EQ(outputs.outputs().size(), 2);
    EXPECT_TRUE(outputs.outputs().at(key(sample)).values.defined());
    EXPECT_FALSE(outputs.outputs().at(key(sample + 2)).values.defined()) << "beyond the budget";
  }
}

/// A softmax over one key is 1 whatever the scores: what comes back to queries and keys is rounding of what came back to their attention.
TEST_F(SlicedOutputs, GradientsOfQueriesThatSeeOneKeyAreMeasuredByTheirAttentions) {
  const auto parts = [&](int64_t keys, const char* module, double noise) {
    RecordedOutputs rank(1 << 20);
    BatchShape batch = kBatch;
    batch.keys = keys;
    OutputComparer comparer({&rank}, bounds_, batch);
    comparer.begin_step();
    const auto output = [&](const std::string& name, const at::Tensor& got, const at::Tensor& want) {
      const OutputKey at{.backward = true, .module = name, .first_sample = 0};
      rank.output(at, got, {});
      comparer.output(at, want, {});
    };
    output("layers.0.attention.core", whole_, whole_);
    output(module, whole_ * noise, whole_ * -noise);
    return comparer.backward().first.has_value();
  };
  for (const char* module : {"layers.0.attention.wq", "layers.0.attention.wk"}) {
    EXPECT_FALSE(parts(1, module, 1e-8)) << module;
    EXPECT_TRUE(parts(1, module, 1e-3)) << module << ": more than rounding";
    EXPECT_TRUE(parts(2, module, 1e-8)) << module;
  }
  EXPECT_TRUE(parts(1, "layers.0.attention.wv", 1e-8));
  EXPECT_TRUE(parts(1, "layers.1.attention.wk", 1e-8)) << "of another layer";
}

TEST_F(SlicedOutputs, TheEarliestStepIsNamedThenTheInnermostModule) {
  OutputComparer comparer({&ranks_[0]}, bounds_, kBatch);
  const auto output = [&](const char* module, int64_t sample, bool wrong) {
    const OutputKey at{.backward = false, .module = module, .first_sample = sample};
    ranks_[0].output(at, wrong ? whole_ + 1 : whole_, {});
    comparer.output(at, whole_, {});
  };
  output("a", 0, false);
  output("b", 0, true);
  output("a", 2, true);
  EXPECT_EQ(comparer.forward().first->module, "a") << "runs before b, though in a later micro-batch";
  EXPECT_EQ(comparer.forward().first->micro_batch, 1);
  output("a", 8, true);
  EXPECT_EQ(comparer.forward().first->step, 1);
}

}  // namespace
}  // namespace tessera
