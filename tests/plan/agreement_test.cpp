#include "tessera/plan/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using ::testing::HasSubstr;

CollectiveEvent call(const std::string& op, const std::string& group, int64_t elements) {
  return {.op = op, .group = group, .shape = {elements}, .elements = elements, .bytes = 4 * elements, .dtype = at::kFloat, .site = "head"};
}

CollectiveEvent message(const std::string& op, const std::string& group, int from, int to, int64_t elements) {
  CollectiveEvent record = call(op, group, elements);
  record.group_rank = op == "send" ? from : to;
  record.peer = op == "send" ? to : from;
  return record;
}

using Calls = std::vector<CollectiveEvent>;

Events events_of(const Calls& calls) {
  Events events;
  for (const auto& each : calls) events.push_back({.what = each});
  return events;
}

/// Ranks 0, 2 are one class and 1, 3 the other, of a mesh of dp 2 x tp 2.
std::string compared(const Calls& even, const Calls& odd) {
  Agreement agreement({{"dp_replicate", 2}, {"tp", 2}});
  agreement.add({0, 2}, events_of(even));
  agreement.add({1, 3}, events_of(odd));
  return agreement.first_disagreement();
}

TEST(Agreement, OfRanksThatShareAGroup) {
  const Calls some{call("all_reduce", "tp", 8), call("all_gather", "dp_replicate", 6), call("all_reduce", "tp", 4)};
  EXPECT_EQ(compared(some, some), "");
  const Calls longer{some[0], some[1], some[2], call("all_reduce", "tp", 4)};
  EXPECT_EQ(compared(longer, some), "collective #3 of tp in a step: rank 0 asks for all_reduce of [4] float32 (head); rank 1 makes 2 in all");
  EXPECT_EQ(compared(some, longer), "collective #3 of tp in a step: rank 0 makes 2 in all; rank 1 asks for all_reduce of [4] float32 (head)");
  const Calls turned{some[2], some[1], some[0]};
  EXPECT_EQ(compared(some, turned),
            "collective #1 of tp in a step: rank 0 asks for all_reduce of [8] float32 (head); rank 1 asks for all_reduce of [4] float32 (head)");
  EXPECT_THAT(compared({call("all_reduce", "tp", 8)}, {call("all_gather", "tp", 8)}), HasSubstr("rank 1 asks for all_gather of [8]"));
  // Each by where it comes from, also where the like was asked for before from elsewhere.
  CollectiveEvent elsewhere = call("all_reduce", "tp", 8);
  elsewhere.site = "layers.0";
  EXPECT_EQ(compared({some[0], elsewhere}, {some[0], some[2]}),
            "collective #2 of tp in a step: rank 0 asks for all_reduce of [8] float32 (layers.0); rank 1 asks for all_reduce of [4] float32 (head)");
  EXPECT_THAT(compared({call("barrier", "world", 0)}, {}), HasSubstr("collective #1 of world"));
  // The two classes never meet along dp_replicate: there each meets itself.
  EXPECT_EQ(compared({call("all_reduce", "dp_replicate", 8)}, {}), "");
  // What each rank gives the others of an all_to_all it knows alone.
  EXPECT_EQ(compared({call("all_to_all", "tp", 8)}, {call("all_to_all", "tp", 7)}), "");
}

TEST(Agreement, OfMessages) {
  const Calls ring0{message("send", "tp", 0, 1, 8), message("recv", "tp", 1, 0, 8)}, ring1{message("recv", "tp", 0, 1, 8), message("send", "tp", 1, 0, 8)};
  EXPECT_EQ(compared(ring0, ring1), "");
  EXPECT_EQ(compared(ring0, {ring1[1]}), "message #1 of tp with tag 0 from rank 0 to rank 1 in a step: sent 32 bytes (head), received none");
  EXPECT_THAT(compared({ring0[0], message("recv", "tp", 1, 0, 7)}, ring1),
              HasSubstr("from rank 1 to rank 0 in a step: sent 32 bytes (head), received 28 bytes (head)"));
}

class DryRunAgreement : public testing_support::TrainFixture {};

TEST_F(DryRunAgreement, OfAVocabularyThatCannotBeCutEvenly) {
  // 2,048 tokens of 2049 columns take two chunks, of 2048 columns one; with those of the former all meet equally often.
  const auto run = dry_run(config("llama", {"model.vocab_size=4097", "mesh.tp=2", "data.seq_len=1024", "batch.micro_size=2", "batch.global_size=2"}), 2);
  ASSERT_EQ(run.ranks.size(), 2);
  const auto reductions = [](const RankClass& ranks) {
    int64_t count = 0;
    for (const auto& sum : ranks.collectives) count += sum.op == "all_reduce" && sum.axis == "tp" ? sum.count : 0;
    return count;
  };
  EXPECT_EQ(reductions(run.ranks[0]), reductions(run.ranks[1]));
}

TEST_F(DryRunAgreement, OfEveryKindOfRank) {
  for (const std::vector<std::string>& sets : std::vector<std::vector<std::string>>{{"mesh.tp=3"},
                                                                                    {"mesh.tp=3", "tensor.sequence_parallel=true", "tensor.overlap=true"},
                                                                                    {"run.deterministic=true", "mesh.tp=2"},
                                                                                    {"mesh.cp=3", "data.seq_len=17"},
                                                                                    {"mesh.cp=3", "context.method=all_gather", "zero.stage=3"},
                                                                                    {"mesh.cp=3", "context.method=ulysses", "run.deterministic=true"},
                                                                                    {"mesh.tp=2", "zero.stage=3"},
                                                                                    {"zero.stage=2", "mesh.dp_replicate=2"}}) {
    EXPECT_NO_THROW(dry_run(config("llama", sets), 6)) << ::testing::PrintToString(sets);
  }
}

TEST_F(DryRunAgreement, OfExpertsThatOtherRanksShare) {
  const std::vector<std::string> mixture{"model.experts=4", "model.experts_per_token=2", "model.ffn_dim=24", "zero.stage=3"};
  for (const std::vector<std::string>& sets :
       std::vector<std::vector<std::string>>{{"mesh.ep=4"},
                                             {"mesh.ep=2"},
                                             {"mesh.ep=2", "mesh.dp_replicate=2"},
                                             {"mesh.ep=2", "mesh.pp=2", "mesh.cp=2"},
                                             {"mesh.tp=2"},
                                             {"mesh.tp=2", "mesh.ep=4", "mesh.expert_tp=2", "tensor.sequence_parallel=true"},
                                             {"mesh.tp=2", "mesh.ep=2", "model.shared_ffn_dim=20"},
                                             {"mesh.expert_tp=2", "mesh.ep=2", "mesh.pp=2"},
                                             {"mesh.tp=4", "mesh.ep=2", "zero.stage=0"},
                                             {"mesh.ep=2", "zero.stage=0", "run.deterministic=true"},
                                             {"mesh.ep=2", "mesh.pp=2", "zero.stage=0", "run.deterministic=true", "batch.global_size=14", "batch.micro_size=2"},
                                             {"mesh.tp=4", "mesh.expert_tp=2", "zero.stage=0", "mesh.dp_replicate=2"}}) {
    auto all = mixture;
    all.insert(all.end(), sets.begin(), sets.end());
    EXPECT_NO_THROW(dry_run(config("mixtral", all), 8)) << ::testing::PrintToString(sets);
  }
}

/// Ranks 0 to 7 as dp_shard 2 x pp 2 x cp 2: ranks 0 and 1 share out experts, and so do 2 and 3; the experts of rank 0 are those of rank 4.
TEST(Agreement, KnowsTheGridOfExperts) {
  const auto call = [](const std::string& group, int64_t elements) {
    return CollectiveEvent{.op = "all_reduce", .group = group, .shape = {elements}, .elements = elements, .dtype = at::kFloat};
  };
  for (const auto& [group, met] : {std::pair{"ep", 1}, {"edp", 4}, {"edp+ep", 5}, {"pp", 2}}) {
    for (int other = 1; other < 8; ++other) {
      if (std::string(group) == "edp+ep" && (other == 1 || other == 4)) continue;  // they meet, too
      Agreement agreement({{"dp_shard", 2}, {"pp", 2}, {"cp", 2}});
      agreement.regroup({"dp_shard", "cp"}, {{"edp", 2}, {"ep", 2}, {"expert_tp", 1}});
      agreement.add({0}, events_of({call(group, 3)}));
      agreement.add({other}, events_of({call(group, 5)}));
      EXPECT_EQ(agreement.first_disagreement().empty(), other != met) << group << " of ranks 0 and " << other;
    }
  }
}

}  // namespace
}  // namespace tessera::plan
