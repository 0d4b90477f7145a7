#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/algorithms/message_plan.h"
#include "tessera/comm/algorithms/simulate.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr int kMostRanks = 33;

bool in_parts(const std::string& op) { return op != "all_reduce" && op != "reduce" && op != "broadcast" && op != "barrier"; }
bool is_rooted(const std::string& op) { return op == "reduce" || op == "broadcast" || op == "gather" || op == "scatter"; }

// Lengths of the whole: odd ones, about the number of ranks, empty.
std::vector<int64_t> lengths(const std::string& op, int n) {
  if (in_parts(op)) return {0, n, int64_t{1001} * n};
  return {0, 1, 2, n - 1, n, n + 1, 1000, 1001};
}

// Simulates, and holds steps and traffic against the formula. Chunks that differ by one element leave the formula one element of play per chunk.
void expect_formula(const MessagePlanRequest& request, bool exact = true) {
  const auto plan = make_message_plan(request);
  const auto cost = formula(request);
  for (const int64_t length : lengths(request.op, request.ranks)) {
    const auto found = simulate(plan, length);
    const int64_t chunks = std::max(plan.chunks, 1);
    EXPECT_EQ(found.steps, cost.steps);
    EXPECT_LE(found.most_sent(), cost.chunks_sent * ((length + chunks - 1) / chunks));
    if (exact) EXPECT_GE(found.most_sent(), cost.chunks_sent * (length / chunks)) << "of " << length;
  }
  const auto even = simulate(plan, 12 * std::max(plan.chunks, 1));
  if (exact) EXPECT_EQ(even.most_sent(), 12 * cost.chunks_sent);
  if (exact && plan.chunks > 0) EXPECT_EQ(formula_bytes(request, 4.0 * 12 * plan.chunks), 4.0 * static_cast<double>(even.most_sent()));
}

struct OfOp : ::testing::TestWithParam<std::string> {};
struct OfRootedOp : OfOp {};
struct OfComposedOp : OfOp {};
const auto by_name = [](const auto& info) { return info.param; };
INSTANTIATE_TEST_SUITE_P(All, OfOp, ::testing::ValuesIn(planned_ops()), by_name);
INSTANTIATE_TEST_SUITE_P(All, OfRootedOp, ::testing::Values("reduce", "broadcast", "gather", "scatter"), by_name);
INSTANTIATE_TEST_SUITE_P(All, OfComposedOp, ::testing::Values("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"), by_name);

TEST_P(OfOp, IsRightAndCostsWhatItsFormulaSays) {
  for (const auto& algorithm : algorithms_for(GetParam())) {
    if (algorithm == "two_level") continue;  // below
    for (int n = 1; n <= kMostRanks; ++n) {
      SCOPED_TRACE(algorithm + " of " + std::to_string(n));
      expect_formula({.op = GetParam(), .algorithm = algorithm, .ranks = n});
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

TEST_P(OfRootedOp, AnyRankMayBeTheRoot) {
  for (const auto& algorithm : algorithms_for(GetParam())) {
    for (const int n : {2, 3, 5, 8, 13}) {
      for (int root = 0; root < n; ++root) {
        SCOPED_TRACE(algorithm + " of " + std::to_string(n) + " to " + std::to_string(root));
        expect_formula({.op = GetParam(), .algorithm = algorithm, .ranks = n, .root = root, .hosts = {}}, algorithm != "two_level");
      }
    }
  }
}

TEST_P(OfOp, SegmentsFollowOneAnother) {
  for (const auto& algorithm : algorithms_for(GetParam())) {
    for (const int n : {2, 3, 4, 7, 16}) {
      for (const int segments : {1, 2, 5}) {
        SCOPED_TRACE(algorithm + " of " + std::to_string(n) + " in " + std::to_string(segments));
        expect_formula({.op = GetParam(), .algorithm = algorithm, .ranks = n, .segments = segments}, algorithm != "two_level");
      }
    }
  }
}

const std::vector<std::vector<int>> kHosts{
    {0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1, 2, 2, 2}, {0, 1, 1, 2, 2, 2}, {0, 0, 0, 0, 1, 1, 2}, {0, 1, 2, 0, 1, 2, 0, 0}};

TEST_P(OfComposedOp, TwoLevelsOfAnyAlgorithms) {
  std::vector<std::string> compositions{"two_level"};
  for (const auto& inner : algorithm_names()) {
    for (const auto& outer : algorithm_names()) {
      const auto name = "two_level:" + inner + ":" + outer;
      if (has_algorithm(GetParam(), name)) compositions.push_back(name);
    }
  }
  EXPECT_GT(compositions.size(), 3U);
  for (const auto& hosts : kHosts) {
    const int n = static_cast<int>(hosts.size());
    for (const auto& name : compositions) {
      for (const int root : {0, is_rooted(GetParam()) ? n - 1 : 0}) {
        SCOPED_TRACE(name + " of " + std::to_string(n) + ::testing::PrintToString(hosts) + " to " + std::to_string(root));
        expect_formula({.op = GetParam(), .algorithm = name, .ranks = n, .root = root, .hosts = hosts}, false);
        if (HasNonfatalFailure()) return;
      }
    }
  }
}

// Between the hosts only a host's share of the data crosses, which is the point of it.
TEST(TwoLevel, SendsARingsBytesInFewerSteps) {
  for (const auto& [hosts, each] : std::vector<std::pair<int, int>>{{2, 2}, {2, 4}, {4, 2}, {3, 5}}) {
    MessagePlanRequest request{.op = "all_reduce", .algorithm = "two_level", .ranks = hosts * each};
    for (int rank = 0; rank < hosts * each; ++rank) request.hosts.push_back(rank / each);
    expect_formula(request);
    EXPECT_EQ(formula(request).steps, 2 * (each - 1) + 2 * (hosts - 1));
    EXPECT_NEAR(formula_bytes(request, 1), 2.0 * (hosts * each - 1) / (hosts * each), 1e-12);
    const auto plan = make_message_plan(request);
    int64_t abroad = 0;
    for (const auto& row : plan.rows[0]) abroad += row.send_to >= each ? static_cast<int64_t>(row.send.size()) : 0;
    EXPECT_EQ(abroad, 2 * (hosts - 1));  // of each * hosts chunks
  }
}

// The documented closed forms, in numbers for 6 ranks (p = 4, two guests): chunks sent of chunks.
TEST(Formula, SaysWhatThePageSays) {
  const auto cost = [](const char* op, const char* algorithm, int n = 6, int segments = 1) {
    return formula({.op = op, .algorithm = algorithm, .ranks = n, .segments = segments});
  };
  EXPECT_EQ(cost("all_reduce", "ring"), (MessagePlanCost{10, 10}));
  EXPECT_EQ(cost("all_reduce", "bidirectional_ring"), (MessagePlanCost{6, 10}));
  EXPECT_EQ(cost("all_reduce", "recursive_doubling"), (MessagePlanCost{4, 3}));
  EXPECT_EQ(cost("all_reduce", "recursive_doubling", 8), (MessagePlanCost{3, 3}));
  EXPECT_EQ(cost("all_reduce", "halving_doubling"), (MessagePlanCost{6, 10}));
  EXPECT_EQ(cost("all_reduce", "halving_doubling", 8), (MessagePlanCost{6, 14}));
  EXPECT_EQ(cost("all_reduce", "binomial_tree"), (MessagePlanCost{6, 3}));
  EXPECT_EQ(cost("all_reduce", "double_binary_tree", 6, 8), (MessagePlanCost{13, 32}));
  EXPECT_EQ(cost("broadcast", "ring", 6, 8), (MessagePlanCost{12, 8}));
  EXPECT_EQ(cost("broadcast", "double_binary_tree", 6, 8), (MessagePlanCost{10, 16}));
  EXPECT_EQ(cost("all_to_all", "bruck"), (MessagePlanCost{3, 7}));
  EXPECT_EQ(cost("gather", "binomial_tree"), (MessagePlanCost{3, 2}));
  EXPECT_EQ(cost("barrier", "dissemination"), (MessagePlanCost{3, 0}));
}

TEST(OrderOfSums, IsKnownBeforeAnythingRuns) {
  EXPECT_THAT(simulate(make_message_plan({.op = "all_reduce", .algorithm = "ring", .ranks = 4}), 4).order_of_sums,
              ::testing::ElementsAre("0+(3+(1+2))", "1+(0+(2+3))", "2+(1+(0+3))", "3+(2+(0+1))"));
  EXPECT_THAT(simulate(make_message_plan({.op = "all_reduce", .algorithm = "recursive_doubling", .ranks = 4}), 4).order_of_sums,
              ::testing::ElementsAre("(0+1)+(2+3)"));
}

// Each way in which a plan can be wrong, planted into a right one.
TEST(Simulation, FindsPlantedBugs) {
  const auto broken = [](const char* op, const char* algorithm, int n, const std::function<void(MessagePlan&)>& damage) {
    auto plan = make_message_plan({.op = op, .algorithm = algorithm, .ranks = n});
    simulate(plan, 12 * n);
    damage(plan);
    try {
      simulate(plan, 12 * n);
    } catch (const InternalError& error) {
      return std::string(error.what());
    }
    return std::string("found nothing");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(broken("all_reduce", "ring", 4, [](MessagePlan& p) { p.rows[1].pop_back(); }),
              HasSubstr("step 5: rank 2 receives from 1, which sends nothing to it"));
  EXPECT_THAT(broken("all_reduce", "ring", 4, [](MessagePlan& p) { p.rows[1][0].receive = {2}; }), HasSubstr("rank 1 expects other chunks than rank 0 sends"));
  EXPECT_THAT(broken("all_reduce", "ring", 4, [](MessagePlan& p) { p.rows[2][0].receive_from = -1; }), HasSubstr("rank 2 does not receive what rank 1 sends"));
  EXPECT_THAT(broken("all_gather", "ring", 4, [](MessagePlan& p) { std::swap(p.rows[0][0].send, p.rows[0][1].send); }), HasSubstr("which it does not hold"));
  EXPECT_THAT(broken("all_reduce", "recursive_doubling", 4, [](MessagePlan& p) { p.rows[3][0].reduce = false; }), HasSubstr("ends with an incomplete sum"));
  EXPECT_THAT(broken("all_reduce", "ring", 3,
                     [](MessagePlan& p) {
                       for (auto& rows : p.rows) rows[2].reduce = true;  // the gathering pass, too
                     }),
              HasSubstr("is added twice"));
  EXPECT_THAT(broken("barrier", "dissemination", 5,
                     [](MessagePlan& p) {
                       for (auto& rows : p.rows) rows.pop_back();
                     }),
              HasSubstr("leaves the barrier before all have come"));
  EXPECT_THAT(broken("all_to_all", "bruck", 4,
                     [](MessagePlan& p) {
                       for (auto& rows : p.rows) rows[1].send = rows[1].receive = {2};
                     }),
              HasSubstr("other data in chunk 3"));
  EXPECT_THAT(broken("all_reduce", "binomial_tree", 4, [](MessagePlan& p) { p.rows[0].back().step = 0; }), HasSubstr("not in the order of their steps"));
  // Rank 0 adds (0+1)+(2+3), and tells rank 1 instead of letting it add for itself in another order.
  EXPECT_THAT(broken("all_reduce", "recursive_doubling", 3,
                     [](MessagePlan& p) {
                       p.rows[0] = {{.step = 0, .send_to = 1, .send = {0}, .receive_from = 1, .receive = {0}, .reduce = true},
                                    {.step = 1, .send_to = 2, .send = {0}, .receive_from = 2, .receive = {0}, .reduce = true}};
                       p.rows[1] = {{.step = 0, .send_to = 0, .send = {0}, .receive_from = 0, .receive = {0}},
                                    {.step = 1, .send_to = 2, .send = {0}, .receive_from = 2, .receive = {0}, .reduce = true}};
                       p.rows[2] = {{.step = 1, .send_to = 0, .send = {0}, .receive_from = 0, .receive = {0}, .reduce = true},
                                    {.step = 1, .send_to = 1, .send = {0}, .receive_from = 1, .receive = {0}, .reduce = true}};
                     }),
              ::testing::Not(HasSubstr("found nothing")));
}

TEST(Names, AreRefusedWithTheNearestAndTheList) {
  const auto refusal = [](const std::function<void()>& ask) {
    try {
      ask();
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal([] { check_algorithm("comm.algorithm", "rign"); }),
              HasSubstr("comm.algorithm = rign: there is no such algorithm; did you mean ring? There are"));
  EXPECT_THAT(refusal([] { check_algorithm("comm.algorithm", "bruck", "all_reduce"); }), HasSubstr("all_reduce has no such algorithm"));
  EXPECT_THAT(refusal([] { check_algorithm("comm.algorithm", "ring", "all_redcue"); }),
              HasSubstr("there is no operation all_redcue; did you mean all_reduce?"));
  EXPECT_THAT(refusal([] { check_algorithm("comm.algorithm", "two_level:ring:bruck", "all_reduce"); }),
              HasSubstr("expected two_level, or two_level:INNER:OUTER"));
  EXPECT_THAT(refusal([] { check_algorithm("comm.algorithm", "ring:2"); }), HasSubstr("there is no such algorithm"));
  EXPECT_EQ(refusal([] { check_algorithm("comm.algorithm", "two_level:ring:halving_doubling", "all_reduce"); }), "taken");
  EXPECT_THROW(make_message_plan({.op = "all_reduce", .algorithm = "ring", .ranks = 0}), InternalError);
  EXPECT_THROW(make_message_plan({.op = "broadcast", .algorithm = "ring", .ranks = 3, .root = 3}), InternalError);
  EXPECT_THROW(make_message_plan({.op = "all_reduce", .algorithm = "two_level", .ranks = 2, .hosts = {1, 0}}), InternalError);
}

}  // namespace
}  // namespace tessera::comm
