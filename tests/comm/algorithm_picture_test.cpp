#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/algorithms/picture.h"
#include "tests/made_docs.h"

namespace tessera::comm {
namespace {

// The pictures of docs/communication.md: drawn from the plans that run.
const std::vector<MessagePlanRequest> kPictures{
    {.op = "all_reduce", .algorithm = "ring", .ranks = 4},
    {.op = "all_reduce", .algorithm = "bidirectional_ring", .ranks = 5},
    {.op = "all_reduce", .algorithm = "recursive_doubling", .ranks = 6},
    {.op = "all_reduce", .algorithm = "halving_doubling", .ranks = 4},
    {.op = "broadcast", .algorithm = "binomial_tree", .ranks = 8},
    {.op = "broadcast", .algorithm = "double_binary_tree", .ranks = 8, .segments = 2},
    {.op = "broadcast", .algorithm = "ring", .ranks = 4, .segments = 3},
    {.op = "all_gather", .algorithm = "bruck", .ranks = 5},
    {.op = "all_to_all", .algorithm = "bruck", .ranks = 5},
    {.op = "all_to_all", .algorithm = "pairwise", .ranks = 4},
    {.op = "reduce_scatter", .algorithm = "pairwise", .ranks = 4},
    {.op = "all_reduce", .algorithm = "two_level", .ranks = 6, .hosts = {0, 0, 0, 1, 1, 1}},
    {.op = "barrier", .algorithm = "dissemination", .ranks = 5},
};

TEST(Picture, ThePageShowsThePlansThatRun) {
  for (const auto& request : kPictures) {
    testing_support::expect_picture_in_docs(request.op + "-" + request.algorithm + ".svg", svg_of(make_message_plan(request)), "communication.md");
  }
}

TEST(Picture, HasAnArrowPerMessage) {
  const auto svg = svg_of(make_message_plan({.op = "all_reduce", .algorithm = "ring", .ranks = 3}));
  size_t arrows = 0;
  for (size_t at = svg.find("<polyline"); at != std::string::npos; at = svg.find("<polyline", at + 1)) ++arrows;
  EXPECT_EQ(arrows, 3 * 4);  // 2 (n-1) steps of n messages
}

TEST(Table, ReadsLikeThePlan) {
  EXPECT_EQ(table_of(make_message_plan({.op = "all_reduce", .algorithm = "ring", .ranks = 2})),
            "all_reduce, ring, 2 ranks, 2 chunks\n"
            "step  rank 0          rank 1\n"
            "   0  >1 [1] <1 +[0]  >0 [0] <0 +[1]\n"
            "   1  >1 [0] <1 [1]   >0 [1] <0 [0]\n");
  EXPECT_EQ(table_of(make_message_plan({.op = "barrier", .algorithm = "dissemination", .ranks = 1})), "barrier, dissemination, 1 ranks\nstep  rank 0\n");
}

}  // namespace
}  // namespace tessera::comm
