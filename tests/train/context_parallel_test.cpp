// Sequences cut over ranks in a run: what it reads, sums, saves and repeats.

#include <gmock/gmock.h>

#include "tessera/mesh/roles.h"
#include "tessera/train/evaluate.h"
#include "tests/train/resume_fixture.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using testing_support::difference;
using testing_support::kGradients;
using testing_support::kLosses;
using testing_support::Sets;
using testing_support::TrainFixture;

const std::vector<std::string> kMethods{"all_gather", "ring", "ring_full", "ulysses", "ulysses_ring"};

class ContextRuns : public TrainFixture {
 protected:
  Config cut(const std::string& family, Sets sets, const std::string& method = "all_gather") const {
    sets.push_back("context.method=" + method);
    sets.insert(sets.end(), {"data.seq_len=15", "run.steps=3"});
    return config(family, sets);
  }

  void expect_equal(const std::string& family, const Sets& common, const std::vector<std::pair<int, Sets>>& layouts, const std::string& method) {
    // Of the first step: in the second, Adam has made of the rounding of gradients near zero a step of full size (tests/verify compares every step from equal
    // weights).
    const Trace one = train(cut(family, common), 1, {}, /*recorded_step=*/1);
    for (const auto& [ranks, sets] : layouts) {
      Sets all = common;
      all.insert(all.end(), sets.begin(), sets.end());
      SCOPED_TRACE(family + " " + method + " on " + std::to_string(ranks) + " ranks: " + sets.front());
      const Trace many = train(cut(family, all, method), ranks, {}, /*recorded_step=*/1);
      EXPECT_LE(difference(many.gradients, one.gradients), kGradients);
      for (size_t i = 0; i < one.steps.size(); ++i) {
        EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, kLosses * one.steps[i].loss) << "step " << i + 1;
        EXPECT_NEAR(many.steps[i].grad_norm, one.steps[i].grad_norm, 2e-5 * one.steps[i].grad_norm) << "step " << i + 1;
      }
    }
  }
};

TEST_F(ContextRuns, TrainAsOneDeviceDoes) {
  for (const auto& method : kMethods) {
    expect_equal("llama", {"model.kv_heads=2"}, {{2, {"mesh.cp=2"}}, {4, {"mesh.cp=4", "zero.stage=3", "context.balance=contiguous"}}}, method);
    expect_equal("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true"}, {{3, {"mesh.cp=3"}}}, method);
  }
}

/// Whole gradients of micro-batches are summed in the tree, then over the parts of the sequence: for one mesh.cp the same bits on any number of data ranks.
TEST_F(ContextRuns, AreTheSameBitsForAnyNumberOfDataRanks) {
  const Sets fixed{"run.deterministic=true", "mesh.cp=2", "model.dropout=0.1"};
  const Trace one = train(cut("llama", fixed, "ring"), 2), three = train(cut("llama", fixed, "ring"), 6);
  EXPECT_EQ(difference(three.gradients, one.gradients), 0);
  EXPECT_EQ(difference(three.weights, one.weights), 0);
  for (size_t i = 0; i < one.steps.size(); ++i) {
    EXPECT_EQ(three.steps[i].grad_norm, one.steps[i].grad_norm);
    EXPECT_EQ(three.steps[i].loss, one.steps[i].loss);
  }
  const Trace whole = train(cut("llama", {"run.deterministic=true", "model.dropout=0.1"}), 1);
  EXPECT_LE(difference(one.gradients, whole.gradients), kGradients);
}

TEST_F(ContextRuns, RecomputeBitForBit) {
  for (const auto& method : kMethods) {
    const Trace kept = train(cut("llama", {"mesh.cp=2", "model.dropout=0.1"}, method), 2);
    for (const char* mode : {"recompute.mode=full", "recompute.mode=selective"}) {
      const Trace again = train(cut("llama", {"mesh.cp=2", "model.dropout=0.1", mode}, method), 2);
      EXPECT_EQ(difference(again.gradients, kept.gradients), 0) << mode << " " << method;
      EXPECT_EQ(again.steps.back().loss, kept.steps.back().loss) << mode << " " << method;
      constexpr auto kActivations = static_cast<size_t>(MemoryCategory::Activations);
      EXPECT_EQ(again.steps.back().memory.current[kActivations], kept.steps.back().memory.current[kActivations]) << "left behind: " << mode << " " << method;
    }
  }
}

/// Sequences of another length in between, as validation and evaluation have them.
TEST_F(ContextRuns, ValidateOnSequencesOfAnyLength) {
  const auto losses = [&](const Config& settings, int ranks) {
    std::vector<double> found;
    const auto text = corpus(settings);
    comm::run_ranks(ranks, [&](comm::World& world) {
      const Mesh mesh(world, mesh_shape(settings.mesh, settings.zero.stage, ranks));
      RankScope scope(settings, ranks);
      Stepper stepper(settings, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(settings, mesh));
      std::vector<double> mine;
      for (const int64_t length : {5, 13, 15}) {
        mine.push_back(evaluate(stepper.forward_only(), text, length, 77, mesh[mesh_roles(settings).batch]).loss);
        mine.push_back(stepper.step(loader.next()).loss);
      }
      const at::Tensor tokens = at::arange(7).unsqueeze(0);
      mine.push_back(stepper.forward_only().logits(tokens).select(1, 6).sum().item<double>());
      if (world.rank() == ranks - 1) found = mine;
    });
    return found;
  };
  const auto one = losses(cut("llama", {}), 1);
  for (const auto& [ranks, sets] :
       std::vector<std::pair<int, Sets>>{{3, {"mesh.cp=3"}}, {4, {"mesh.cp=2"}}, {4, {"mesh.cp=2", "mesh.pp=2"}}, {4, {"mesh.cp=2", "mesh.tp=2"}}}) {
    const auto many = losses(cut("llama", sets, "ring"), ranks);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(many.at(i), one[i], 1e-5 * std::abs(one[i])) << ranks << " ranks, number " << i;
  }
}

/// Weights, state of the optimizer and place in the data do not depend on how sequences are cut.
using ContextResume = testing_support::ResumeFixture;

TEST_F(ContextResume, ARunMovesFromAnyLayoutToAnyOther) {
  const std::vector<testing_support::Layout> layouts{{"one", 1, {}},
                                                     {"cp2", 2, {"mesh.cp=2"}},
                                                     {"cp3 by stage 3", 3, {"mesh.cp=3", "zero.stage=3", "context.method=all_gather"}},
                                                     {"cp2 tp2", 4, {"mesh.cp=2", "mesh.tp=2"}},
                                                     {"cp2 dp2 by stage 1", 4, {"mesh.cp=2", "zero.stage=1"}}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto& from = layouts[i];
    const auto& to = layouts[(i + 1) % layouts.size()];
    SCOPED_TRACE(std::string(from.name) + " to " + to.name);
    const auto straight = run_saving(from, {});
    const auto resumed = run(to, {"checkpoint.resume=" + saved(from, testing_support::kSaved).string()});
    ASSERT_EQ(resumed.size(), static_cast<size_t>(testing_support::kLast - testing_support::kSaved));
    for (size_t step = 0; step < resumed.size(); ++step) {
      const auto& before = straight[step + testing_support::kSaved];
      EXPECT_EQ(resumed[step].step, before.step);
      EXPECT_EQ(resumed[step].tokens, before.tokens);
      EXPECT_NEAR(resumed[step].loss, before.loss, kLosses * before.loss);
    }
    const auto again = run(from, {"checkpoint.resume=" + saved(from, testing_support::kSaved).string()});
    for (size_t step = 0; step < again.size(); ++step)
      EXPECT_EQ(again[step].loss, straight[step + testing_support::kSaved].loss) << "the same layout: the same bits";
  }
}

}  // namespace
}  // namespace tessera
