// Copies of one parameter, cut in whatever way on the ranks of each holder: their gradients become one sum, with the same bits everywhere.

#include "tessera/pipeline/tied.h"

#include <numeric>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include "tessera/comm/testing.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/names.h"
#include "tessera/nn/parameter.h"
#include "tests/comm/order_alone.h"
#include "tests/refusal.h"

namespace tessera::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<int64_t> kShape{23, 9};
using Cuts = std::vector<std::vector<Slice>>;  ///< of each holder, those of its ranks, one after the other

Slice all_of_it() { return Slice::whole("w", kShape); }

/// The elements between `cuts`.
std::vector<Slice> cut_in_runs(std::vector<int64_t> cuts) {
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(23 * 9);
  std::vector<Slice> slices;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) slices.push_back(elements(all_of_it(), cuts[i], cuts[i + 1] - cuts[i]));
  return slices;
}

std::vector<Slice> cut_in_columns(std::vector<int64_t> cuts) {
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(9);
  std::vector<Slice> slices;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) slices.push_back(Slice::along("w", kShape, 1, cuts[i], cuts[i + 1] - cuts[i]));
  return slices;
}

/// Runs of rows: of the parts, boxes that lie one behind the other.
Slice rows(const std::vector<std::pair<int64_t, int64_t>>& runs) {
  Slice slice{.name = "w", .shape = kShape, .boxes = {}};
  for (const auto& [begin, size] : runs) slice.boxes.push_back({.offset = {begin, 0}, .size = {size, 9}});
  return slice;
}

at::Tensor term_of(size_t holder, int round = 0) {
  return at::randn(kShape, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * round + 7) + holder));
}

/// From the last holder's to the first one's.
at::Tensor sum_of(size_t holders, int round = 0) {
  at::Tensor sum = term_of(holders - 1, round);
  for (size_t holder = holders - 1; holder-- > 0;) sum = sum + term_of(holder, round);
  return sum;
}

at::Tensor parameter_of(const Slice& slice, const at::Tensor& values) {
  const at::Tensor tensor = take(values, slice).clone().requires_grad_();
  nn::set_slice(tensor, slice);
  return tensor;
}

/// This rank's copy.
TiedCopies::Copy copy_on(const Cuts& cuts, int rank) {
  int holder = 0;
  for (; rank >= static_cast<int>(cuts[holder].size()); ++holder) rank -= static_cast<int>(cuts[holder].size());
  return {.holder = holder, .tensor = parameter_of(cuts[holder][rank], at::zeros(kShape))};
}

int ranks_of(const Cuts& cuts) {
  return std::accumulate(cuts.begin(), cuts.end(), 0, [](int count, const auto& slices) { return count + static_cast<int>(slices.size()); });
}

void set_term(const TiedCopies::Copy& copy, int round = 0) {
  copy.tensor.mutable_grad() = take(term_of(static_cast<size_t>(copy.holder), round), nn::slice_of(copy.tensor)).clone();
}

void expect_sum(const TiedCopies::Copy& copy, size_t holders, int round = 0) {
  EXPECT_TRUE(at::equal(copy.tensor.grad(), take(sum_of(holders, round), nn::slice_of(copy.tensor)))) << "holder " << copy.holder;
}

void expect_sums(const Cuts& cuts, const comm::RunOptions& options = {}) {
  comm::run_ranks(
      ranks_of(cuts),
      [&](comm::World& world) {
        const TiedCopies::Copy copy = copy_on(cuts, world.rank());
        TiedCopies tied(world.group(), static_cast<int>(cuts.size()), {copy});
        tied.check_complete("w");
        for (const int round : {0, 1}) {
          set_term(copy, round);
          tied.sum();
          expect_sum(copy, cuts.size(), round);
        }
      },
      options);
}

const std::vector<Cuts>& all_cuts() {
  static const std::vector<Cuts> all{{{all_of_it()}, {all_of_it()}},
                                     {cut_in_runs({70, 141}), cut_in_runs({32, 32})},
                                     {cut_in_runs({5}), {all_of_it()}, cut_in_runs({100, 150})},
                                     {cut_in_columns({4}), cut_in_columns({4})},
                                     {{rows({{0, 1}, {2, 1}, {5, 1}}), rows({{1, 1}, {3, 2}, {6, 17}})}, cut_in_runs({40})},
                                     {cut_in_columns({2, 5}), cut_in_runs({64}), cut_in_columns({7})}};
  return all;
}

TEST(TiedCopies, SumWhateverIsCut) {
  for (const Cuts& cuts : all_cuts()) expect_sums(cuts);
}

TEST(TiedCopies, SumWhereMessagesMeetByTheirOrderAlone) {
  for (const Cuts& cuts : all_cuts()) expect_sums(cuts, {.decorators = {testing_support::order_alone()}});
}

/// The one end has started three sums before it finishes the first, the other finishes each at once, as the two ends of an asynchronous pipeline.
TEST(TiedCopies, SeveralSumsMayBeUnderWay) {
  const Cuts cuts{cut_in_runs({70}), cut_in_runs({32})};
  comm::run_ranks(4,
                  [&](comm::World& world) {
                    std::vector<int> all(4);
                    std::iota(all.begin(), all.end(), 0);
                    const TiedCopies::Copy copy = copy_on(cuts, world.rank());
                    TiedCopies tied({world.group(), world.subgroup(all, "back"), {}}, 2, {copy});
                    std::vector<at::Tensor> started;
                    for (int round = 0; round < 3; ++round) {
                      set_term(copy, round);
                      tied.start_sum();
                      started.push_back(copy.tensor.grad());
                      if (copy.holder > 0) continue;
                      tied.finish_sum();
                      expect_sum(copy, 2, round);
                    }
                    for (int round = 0; copy.holder == 1 && round < 3; ++round) {
                      copy.tensor.mutable_grad() = started[static_cast<size_t>(round)];
                      tied.finish_sum();
                      expect_sum(copy, 2, round);
                    }
                  },
                  {.decorators = {testing_support::order_alone()}});
}

/// Both ends on the same ranks, each cut in its own way.
TEST(TiedCopies, TheLastFollowsTheFirst) {
  comm::run_ranks(2, [](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const TiedCopies::Copy first{.holder = 0, .tensor = parameter_of(cut_in_runs({70})[rank], at::zeros(kShape))};
    const TiedCopies::Copy last{.holder = 1, .tensor = parameter_of(cut_in_runs({32})[rank], at::zeros(kShape))};
    TiedCopies tied(world.group(), 2, {first, last}, /*last_follows=*/true);
    set_term(first), set_term(last);
    tied.sum();
    expect_sum(first, 2);
    EXPECT_TRUE(at::equal(last.tensor.grad(), take(term_of(1), nn::slice_of(last.tensor))));
    {
      const at::NoGradGuard no_grad;
      first.tensor.copy_(first.tensor.grad());
    }
    tied.follow();
    EXPECT_TRUE(at::equal(last.tensor.detach(), take(sum_of(2), nn::slice_of(last.tensor))));
  });
}

/// Parts of both are brought together behind an update of the first that was begun before, though nobody has a gradient by now.
TEST(TiedCopies, WhatTheLastFollowsLateIsSaidOfItToo) {
  comm::run_ranks(2, [](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const std::vector<at::Tensor> wholes{parameter_of(all_of_it(), at::zeros(kShape)), parameter_of(all_of_it(), at::zeros(kShape))};
    const TiedCopies::Copy first{.holder = 0, .tensor = parameter_of(cut_in_runs({70})[rank], at::zeros(kShape))};
    const TiedCopies::Copy last{.holder = 1, .tensor = parameter_of(cut_in_runs({32})[rank], at::zeros(kShape))};
    nn::set_updated_for(first.tensor, wholes[0]);
    nn::set_updated_for(last.tensor, wholes[1]);
    TiedCopies tied(world.group(), 2, {first, last}, /*last_follows=*/true);
    for (const int64_t said : {0, 1, 1, 2}) {
      if (nn::late_updates(wholes[0]) < said) nn::note_late_update(first.tensor);
      tied.follow();
      EXPECT_EQ(nn::late_updates(wholes[1]), said);
    }
  });
}

TEST(TiedCopies, WhatIsNotThereOnceIsRefusedOnEveryRank) {
  struct Case {
    Cuts cuts;
    const char *found, *way_out;
  };
  const std::vector<Case> cases{
      {{{all_of_it()}, {all_of_it(), all_of_it()}},
       "the others have 414",
       "give the ranks of the pipeline alone, sum_shared_gradients(split, schedule, mesh[\"pp\"])"},
      {{cut_in_runs({70}), {cut_in_runs({32})[0]}}, "the others have 32", "sum_shared_gradients(split, schedule, mesh[\"pp\"], mesh[{\"dp\", \"pp\"}])"}};
  for (const auto& [cuts, found, way_out] : cases) {
    comm::run_ranks(ranks_of(cuts), [&, &cuts = cuts, found = found, way_out = way_out](comm::World& world) {
      const TiedCopies tied(world.group(), 2, {copy_on(cuts, world.rank())});
      EXPECT_THAT(testing_support::refusal([&] { tied.check_complete("w"); }),
                  AllOf(HasSubstr("'w' is shared by stages"), HasSubstr(found), HasSubstr(way_out)));
    });
  }
}

}  // namespace
}  // namespace tessera::pipeline
