#include <filesystem>
#include <fstream>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

class File {
 public:
  explicit File(const std::string& text) : path_(std::filesystem::temp_directory_path() / ("table-" + std::to_string(::getpid()) + ".jsonl")) {
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TableRow row(const std::string& algorithm, int64_t bytes, double time_us, const std::string& op = "all_reduce", int ranks = 4) {
  return {.op = op, .backend = "gloo", .algorithm = algorithm, .bytes = bytes, .ranks = ranks, .time_us = time_us};
}

template <class Ask>
std::string refusal_to_choose(Ask ask) {
  try {
    ask();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "taken";
}

std::string choice_of(const AlgorithmChoice& choice, const std::string& op, int64_t elements, int ranks = 4, const std::string& backend = "gloo") {
  const auto tensor = at::empty({elements}, at::kMeta);
  const auto named = std::ranges::find(kOperationNames, op) - kOperationNames.begin();
  const Call call{.op = static_cast<Operation>(named), .inputs = {tensor}, .outputs = {tensor}, .peer = 0, .reduction = Op::Sum};
  const auto plan = choice.plan_for(call, {.name = "test", .rank = 0, .size = ranks}, backend);
  return plan ? plan->algorithm : "engine";
}

TEST(Table, KeepsItsRowsAndPassesOverWhatItDoesNotKnow) {
  const File file("");
  const std::vector<TableRow> rows{row("engine", 4096, 12.5), row("ring", 4096, 7.25), row("bruck", 64, 3, "all_gather")};
  write_table(file.path(), rows);
  EXPECT_EQ(read_table(file.path()), rows);
  const File measured(R"({"op":"send","backend":"gloo","algorithm":"engine","bytes":8,"ranks":2,"time_us":1})"
                      "\n\n"
                      R"({"op":"all_reduce","backend":"gloo","algorithm":"ring","bytes":4096,"ranks":4,"time_us":7.25,"bus_gb_s":1.5})"
                      "\n");
  EXPECT_EQ(read_table(measured.path()), std::vector<TableRow>{row("ring", 4096, 7.25)});
}

TEST(Table, RefusesDamageWithFileAndLine) {
  const auto reading = [](const std::string& line) {
    const File file(R"({"op":"all_reduce","backend":"gloo","algorithm":"ring","bytes":4096,"ranks":4,"time_us":7.25})" + ("\n" + line) + "\n");
    return refusal_to_choose([&] { read_table(file.path()); });
  };
  EXPECT_THAT(reading("{"), HasSubstr(", line 2: "));
  EXPECT_THAT(reading("[1]"), HasSubstr("line 2: expected op, backend, algorithm, bytes, ranks and time_us"));
  EXPECT_THAT(reading(R"({"op":"all_reduce"})"), HasSubstr("line 2: expected op, backend, algorithm, bytes, ranks and time_us"));
  EXPECT_THAT(reading(R"({"op":"all_reduce","backend":"gloo","algorithm":"rign","bytes":4096,"ranks":4,"time_us":7})"),
              HasSubstr("line 2: algorithm = rign: all_reduce has no such algorithm; did you mean ring?"));
  EXPECT_THAT(reading(R"({"op":"all_reduce","backend":"gloo","algorithm":"ring","bytes":4096,"ranks":4,"time_us":0})"), HasSubstr("a positive time"));
  for (const std::string ranks : {"4294967298", "18446744073709551615", "2.5", "true"}) {
    EXPECT_THAT(reading(R"({"op":"all_reduce","backend":"gloo","algorithm":"ring","bytes":4096,"ranks":)" + ranks + R"(,"time_us":7})"),
                HasSubstr("line 2: ranks = " + ranks + ": expected a whole number from 1 to 2147483647"));
  }
  EXPECT_THAT(refusal_to_choose([] { read_table("/nowhere/table.jsonl"); }), HasSubstr("comm.table = /nowhere/table.jsonl: cannot be read"));
  const File empty("\n");
  EXPECT_THAT(refusal_to_choose([&] { read_table(empty.path()); }), HasSubstr("there are no rows in it"));
}

TEST(Table, ChoosesTheFastestOfTheNearestSize) {
  const std::vector<TableRow> rows{row("engine", 1024, 5), row("recursive_doubling", 1024, 4), row("engine", 1 << 20, 50), row("ring", 1 << 20, 50),
                                   row("ring", 1 << 20, 70, "all_reduce", 2)};
  const auto chosen = winners(rows);
  EXPECT_EQ(chosen.size(), 3U);
  const auto at = [&](int64_t bytes, int ranks = 4) {
    const auto* found = best(chosen, "all_reduce", "gloo", ranks, bytes);
    return found ? found->algorithm : "none";
  };
  EXPECT_EQ(at(0), "recursive_doubling");
  EXPECT_EQ(at(1024), "recursive_doubling");
  EXPECT_EQ(at(1 << 15), "recursive_doubling");  // as near to both: the smaller
  EXPECT_EQ(at((1 << 15) + 4), "engine");        // as fast as the ring
  EXPECT_EQ(at(1 << 30), "engine");
  EXPECT_EQ(at(4, 2), "ring");
  EXPECT_EQ(at(4, 3), "none");
  EXPECT_EQ(best(chosen, "broadcast", "gloo", 4, 4), nullptr);
  EXPECT_EQ(best(chosen, "all_reduce", "shm", 4, 4), nullptr);
}

TEST(Choice, IsTheEnginesOwnUnlessAsked) {
  EXPECT_TRUE(AlgorithmChoice(WorldOptions{}).engine_only());
  EXPECT_TRUE(AlgorithmChoice(WorldOptions{.algorithm = "engine"}).engine_only());
  const AlgorithmChoice ring(WorldOptions{.algorithm = "ring"});
  EXPECT_EQ(choice_of(ring, "all_reduce", 10), "ring");
  EXPECT_EQ(choice_of(ring, "all_to_all", 10), "engine");  // has none
  EXPECT_EQ(choice_of(ring, "send", 10), "engine");
  const AlgorithmChoice some(WorldOptions{.algorithm = "all_reduce=halving_doubling, broadcast=engine"});
  EXPECT_EQ(choice_of(some, "all_reduce", 10), "halving_doubling");
  EXPECT_EQ(choice_of(some, "broadcast", 10), "engine");
  EXPECT_EQ(choice_of(some, "reduce", 10), "engine");
}

TEST(Choice, FollowsTheTableWhereTheNameDoesNotSay) {
  const std::vector<TableRow> rows{row("ring", 1 << 20, 50), row("engine", 1 << 20, 60), row("engine", 1024, 5), row("binomial_tree", 64, 1, "broadcast")};
  const AlgorithmChoice automatic(WorldOptions{.rows = rows});
  EXPECT_EQ(choice_of(automatic, "all_reduce", 1 << 18), "ring");
  EXPECT_EQ(choice_of(automatic, "all_reduce", 16), "engine");
  EXPECT_EQ(choice_of(automatic, "all_reduce", 1 << 18, 3), "engine");
  EXPECT_EQ(choice_of(automatic, "all_reduce", 1 << 18, 4, "shm"), "engine");
  EXPECT_EQ(choice_of(automatic, "broadcast", 16), "binomial_tree");
  const AlgorithmChoice named(WorldOptions{.algorithm = "all_reduce=recursive_doubling", .rows = rows});
  EXPECT_EQ(choice_of(named, "all_reduce", 1 << 18), "recursive_doubling");
  EXPECT_EQ(choice_of(named, "broadcast", 16), "binomial_tree");
}

// Each rank would look up another size, and one might send what another does not expect.
TEST(Choice, OfUnevenPartsDoesNotFollowSizes) {
  const std::vector<TableRow> rows{row("pairwise", 1 << 20, 50, "all_to_all"), row("bruck", 64, 1, "all_to_all")};
  const auto tensor = at::empty({8}, at::kMeta);
  Call call{.op = Operation::AllToAll, .inputs = {tensor}, .outputs = {tensor}};
  const auto chosen = [&](const AlgorithmChoice& choice) {
    const auto plan = choice.plan_for(call, {.name = "test", .rank = 0, .size = 4}, "gloo");
    return plan ? plan->algorithm : "engine";
  };
  EXPECT_EQ(chosen(AlgorithmChoice(WorldOptions{.rows = rows})), "bruck");
  call.out_splits = {2, 2, 2, 2};  // of a rank that gives equal parts, where others do not
  EXPECT_EQ(chosen(AlgorithmChoice(WorldOptions{.rows = rows})), "engine");
  EXPECT_EQ(chosen(AlgorithmChoice(WorldOptions{.algorithm = "bruck"})), "engine");
  EXPECT_EQ(chosen(AlgorithmChoice(WorldOptions{.algorithm = "pairwise"})), "pairwise");
}

TEST(Choice, RefusesBeforeAnybodyMeets) {
  const auto asking = [](const std::string& algorithm, const std::string& backend = "gloo") {
    return refusal_to_choose([&] { check_choice({.backend = backend, .algorithm = algorithm}); });
  };
  EXPECT_THAT(asking("rign"), HasSubstr("comm.algorithm = rign: there is no such algorithm; did you mean ring?"));
  EXPECT_THAT(asking("all_reduce=ring,all_gather=pairwise"), HasSubstr("comm.algorithm = pairwise: all_gather has no such algorithm; did you mean"));
  EXPECT_THAT(asking("allreduce=ring"), HasSubstr("there is no operation allreduce; did you mean all_reduce?"));
  EXPECT_THAT(asking("alreduce=engine"), HasSubstr("there is no operation alreduce"));
  EXPECT_THAT(asking("all_reduce=ring,ring"), HasSubstr("\"ring\" is not op=algorithm"));
  EXPECT_THAT(asking("all_reduce=ring,all_reduce=ring"), HasSubstr("all_reduce is named twice"));
  EXPECT_THAT(asking(""), HasSubstr("comm.algorithm is empty"));
  EXPECT_THAT(asking("ring", "nccl"), HasSubstr("set comm.algorithm = auto"));
  EXPECT_EQ(asking("two_level:ring:recursive_doubling"), "taken");
  EXPECT_THAT(refusal_to_choose([] { World::dry(2, 0, std::make_shared<Recorder>(), {.algorithm = "rign"}); }), HasSubstr("did you mean ring?"));
}

TEST(Choice, IsKeptAndTakenUpAgain) {
  const WorldOptions options{.backend = "gloo", .rows = {row("ring", 1 << 20, 50), row("engine", 1 << 20, 60)}};
  const auto kept = recorded_choice(options);
  EXPECT_EQ(kept.at("algorithm"), "auto");
  EXPECT_EQ(kept.at("rows").size(), 1U);  // the loser orders no sums
  const auto again = with_recorded_choice({.backend = "gloo", .table = "/nowhere/newer.jsonl"}, kept, "checkpoint");
  EXPECT_EQ(recorded_choice(again), kept);
  EXPECT_EQ(choice_of(AlgorithmChoice(again), "all_reduce", 1 << 18), "ring");
  EXPECT_THAT(refusal_to_choose([&] { with_recorded_choice({}, {{"algorithm", 3}}, "folder"); }),
              HasSubstr("folder: progress.comm in manifest.json cannot be read"));
}

TEST(Choice, AWorldReadsItsTableOnce) {
  auto file = std::make_unique<File>("");
  write_table(file->path(), {row("ring", 1 << 20, 50)});
  const auto world = World::dry(4, 0, std::make_shared<Recorder>(), {.backend = "gloo", .table = file->path()});
  file.reset();  // what happens to it later is nothing to a run that has begun
  EXPECT_EQ(recorded_choice(world.options()).at("rows").size(), 1U);
}

// Through a world, as train makes it.
TEST(Choice, AWorldRunsWhatItsOptionsSay) {
  const auto sums = [](const std::string& algorithm, int n) {
    std::vector<at::Tensor> results(n);
    run_ranks(n,
              [&](World& world) {
                auto tensor = at::arange(11, at::kFloat) / 3 + world.rank();
                all_reduce(world.group(), tensor);
                if (world.rank() != 1) {
                  auto ones = at::ones({5});
                  all_reduce(world.subgroup({2, 0}, "two"), ones);
                  EXPECT_TRUE(ones.equal(at::full({5}, 2.0F)));
                }
                results[world.rank()] = tensor;
              },
              {.backend = "gloo", .algorithm = algorithm, .hosts = {0, 1, 0}});
    for (const auto& result : results) EXPECT_TRUE(result.equal(results[0])) << algorithm;
    return results[0];
  };
  const auto expected = at::arange(11, at::kFloat) + 3;
  for (const auto& algorithm : algorithms_for("all_reduce")) EXPECT_TRUE(at::allclose(sums(algorithm, 3), expected)) << algorithm;
}

}  // namespace
}  // namespace tessera::comm
