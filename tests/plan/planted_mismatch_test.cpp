#include <algorithm>
#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/mesh.h"
#include "tessera/plan/agreement.h"
#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

// What would make a cluster hang, planted in what real ranks were recorded to do: each has to be found, with the call sites of both sides.

namespace tessera::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Holds = std::function<bool(const CollectiveEvent&)>;

Holds of(const std::string& op, const std::string& group) {
  return [=](const CollectiveEvent& call) { return call.op == op && call.group == group; };
}

Events::iterator found(Events& events, const Holds& holds) {
  return std::ranges::find_if(events, [&](const Event& event) {
    const auto* call = std::get_if<CollectiveEvent>(&event.what);
    return call != nullptr && holds(*call);
  });
}

CollectiveEvent& call_of(Events& events, const Holds& holds) {
  const auto at = found(events, holds);
  if (at == events.end()) throw std::logic_error("no such call was recorded");
  return std::get<CollectiveEvent>(at->what);
}

class PlantedMismatch : public testing_support::TrainFixture {
 protected:
  struct Recorded {
    MeshShape shape;
    std::vector<RankClass> ranks;
  };
  Recorded record(const std::vector<std::string>& sets, int world) const {
    const Config made = config("llama", sets);
    return {.shape = mesh_shape(made.mesh, made.zero.stage, world), .ranks = dry_run(made, world, {.events = true}).ranks};
  }
  /// What is said where rank `rank` and those like it do something else.
  static std::string after(Recorded recorded, int rank, const std::function<void(Events&)>& change) {
    Agreement agreement(recorded.shape);
    for (auto& one : recorded.ranks) {
      if (std::ranges::find(one.examples, rank) != one.examples.end()) change(one.events);
      agreement.add(one.examples, one.events);
    }
    return agreement.first_disagreement();
  }
};

TEST_F(PlantedMismatch, InWhatTwoStagesOfTwoRanksWereRecordedToDo) {
  const Recorded recorded = record({"mesh.tp=2", "mesh.pp=2", "batch.global_size=4", "batch.micro_size=1"}, 4);
  ASSERT_EQ(recorded.ranks.size(), 4);
  EXPECT_THAT(after(recorded, 1, [](Events&) {}), IsEmpty());
  const Holds reduced = of("all_reduce", "tp"), sent = [](const CollectiveEvent& call) { return call.op == "send"; },
              received = [](const CollectiveEvent& call) { return call.op == "recv"; };
  const std::vector<std::pair<const char*, std::function<void(Events&)>>> planted{
      {"skips a collective", [&](Events& events) { events.erase(found(events, reduced)); }},
      {"another dtype", [&](Events& events) { call_of(events, reduced).dtype = at::kBFloat16; }},
      {"another size", [&](Events& events) { ++call_of(events, reduced).elements; }},
      {"another operation", [&](Events& events) { call_of(events, reduced).op = "broadcast"; }},
      {"wrong root", [&](Events& events) { call_of(events, reduced).peer = 1; }},
      {"once more", [&](Events& events) { events.push_back(*found(events, reduced)); }},
      {"another group", [&](Events& events) { call_of(events, reduced).group = "pp"; }},
      {"receives what nobody sends",
       [&](Events& events) {
         Event event = *found(events, [&](const CollectiveEvent& call) { return sent(call) || received(call); });
         auto& call = std::get<CollectiveEvent>(event.what);
         call.op = "recv";
         events.push_back(std::move(event));
       }},
      {"loses a message", [&](Events& events) { events.erase(found(events, [&](const CollectiveEvent& call) { return sent(call) || received(call); })); }},
      {"half a message", [&](Events& events) { call_of(events, [&](const CollectiveEvent& call) { return sent(call) || received(call); }).bytes /= 2; }},
  };
  for (const auto& [what, change] : planted) {
    for (const int rank : {0, 1, 2, 3}) {
      EXPECT_THAT(after(recorded, rank, change), AllOf(HasSubstr("rank "), HasSubstr("#"), HasSubstr(" in a step: "))) << what << " on rank " << rank;
    }
  }
}

/// The head went through its columns in chunks of a size in bytes, so that a rank with one column more made one more all-reduce.
TEST_F(PlantedMismatch, ChunksOfAVocabularyThatDifferBetweenRanks) {
  const Recorded recorded = record({"model.vocab_size=4097", "mesh.tp=2", "data.seq_len=1024", "batch.micro_size=2", "batch.global_size=2"}, 2);
  const auto said = after(recorded, 0, [](Events& events) {
    const auto at = found(events, [](const CollectiveEvent& call) { return call.site.starts_with("head") && call.op == "all_reduce"; });
    ASSERT_NE(at, events.end());
    events.insert(at, *at);
  });
  EXPECT_THAT(said, AllOf(HasSubstr("of tp in a step"), HasSubstr("(head")));
}

/// Calls of which each is waited for before the next begins.
Events one_by_one(const std::vector<CollectiveEvent>& calls) {
  Events events;
  for (const auto& call : calls) {
    const auto number = -static_cast<int64_t>(events.size()) - 1;
    events.push_back({.what = call, .writes = {number}});
    events.push_back({.what = WaitEvent{}, .reads = {number}});
  }
  return events;
}

CollectiveEvent reduce(const std::string& group, const std::string& site) {
  return {.op = "all_reduce", .group = group, .shape = {3}, .elements = 3, .dtype = at::kFloat, .site = site};
}

CollectiveEvent message(const std::string& op, int here, int there, int tag = 0) {
  return {.op = op, .group = "pp", .group_rank = here, .peer = there, .tag = tag, .bytes = 12, .dtype = at::kFloat, .site = "stage"};
}

std::string together(const MeshShape& shape, const std::vector<Events>& ranks) {
  Agreement agreement(shape);
  for (size_t rank = 0; rank < ranks.size(); ++rank) agreement.add({static_cast<int>(rank)}, ranks[rank]);
  return agreement.first_disagreement();
}

/// As large messages do: neither asks for the other's before its own is gone.
TEST(CircularWaits, OfSendsToEachOther) {
  const MeshShape shape{{"pp", 2}};
  const auto exchanges = [](int here, bool sends_first) {
    std::vector<CollectiveEvent> calls{message("send", here, 1 - here), message("recv", here, 1 - here)};
    if (!sends_first) std::swap(calls[0], calls[1]);
    return one_by_one(calls);
  };
  EXPECT_THAT(together(shape, {exchanges(0, true), exchanges(1, false)}), IsEmpty());
  EXPECT_THAT(together(shape, {exchanges(0, true), exchanges(1, true)}), AllOf(StartsWith("waits in a circle: "), HasSubstr("send of pp (stage)")));
  Events asked = exchanges(0, true);  // whether it was over, before it waited
  asked.erase(asked.begin() + 1);
  EXPECT_THAT(together(shape, {asked, exchanges(1, true)}), IsEmpty());
}

/// In the real pair of calls, a wait of who has asked is none.
TEST(CircularWaits, AWaitBehindAQuestionIsNone) {
  const auto world = comm::World::dry(2, 0, std::make_shared<comm::Recorder>());
  const at::Tensor value = at::zeros({3});
  EventStream stream;
  {
    const ListenToEvents listening(stream);
    comm::Pending first = comm::send_async(world.group(), value, 1), second = comm::send_async(world.group(), value, 1);
    EXPECT_TRUE(first.done());
    first.wait();
    second.wait();
  }
  const Events events = stream.take();
  EXPECT_EQ(only<CollectiveEvent>(events).size(), 2);
  EXPECT_EQ(only<WaitEvent>(events).size(), 1);
}

TEST(CircularWaits, AcrossTwoGroups) {
  const MeshShape shape{{"dp_shard", 2}, {"tp", 2}};
  const auto rows_first = one_by_one({reduce("tp", "attention"), reduce("dp_shard", "bucket 0")}),
             columns_first = one_by_one({reduce("dp_shard", "bucket 0"), reduce("tp", "attention")});
  EXPECT_THAT(together(shape, {rows_first, rows_first, rows_first, rows_first}), IsEmpty());
  EXPECT_EQ(
      together(shape, {rows_first, columns_first, columns_first, rows_first}),
      "waits in a circle: rank 0 waits in all_reduce of tp (attention) (#1 of its kind) for rank 1; rank 1 waits in all_reduce of dp_shard (bucket 0) (#1 of "
      "its kind) for rank 3; rank 3 waits in all_reduce of tp (attention) (#1 of its kind) for rank 2; rank 2 waits in all_reduce of dp_shard (bucket 0) "
      "(#1 of its kind) for rank 0");
  // One rank that turns them round waits for others, who go on.
  EXPECT_THAT(together(shape, {rows_first, columns_first, rows_first, rows_first}), IsEmpty());
  // Begun in any order and waited for when all are: nobody holds anybody up.
  Events ahead = columns_first;
  std::swap(ahead[1], ahead[2]);
  EXPECT_THAT(together(shape, {rows_first, ahead, ahead, rows_first}), IsEmpty());
}

TEST(CircularWaits, OfTheWorldAndAPart) {
  const MeshShape shape{{"tp", 2}};
  EXPECT_THAT(together(shape, {one_by_one({reduce("tp", "norm"), reduce("world", "loss")}), one_by_one({reduce("world", "loss"), reduce("tp", "norm")})}),
              AllOf(StartsWith("waits in a circle: "), HasSubstr("(norm)"), HasSubstr("(loss)")));
}

TEST(CircularWaits, OfMessages) {
  const MeshShape two{{"pp", 2}}, three{{"pp", 3}};
  const auto sends_first = [](int here, int there) { return one_by_one({message("send", here, there), message("recv", here, there)}); };
  const auto receives_first = [](int here, int there) { return one_by_one({message("recv", here, there), message("send", here, there)}); };
  EXPECT_THAT(together(two, {sends_first(0, 1), receives_first(1, 0)}), IsEmpty());
  EXPECT_THAT(together(two, {receives_first(0, 1), receives_first(1, 0)}),
              AllOf(StartsWith("waits in a circle: rank 0 waits in recv of pp (stage) "), HasSubstr("rank 1 waits in recv of pp (stage) ")));
  std::vector<Events> ring, broken;
  for (const int rank : {0, 1, 2}) {
    const auto receive = message("recv", rank, (rank + 2) % 3), send = message("send", rank, (rank + 1) % 3);
    ring.push_back(one_by_one({receive, send}));
    broken.push_back(rank == 1 ? one_by_one({send, receive}) : ring.back());
  }
  EXPECT_THAT(together(three, ring), AllOf(StartsWith("waits in a circle"), HasSubstr("rank 0 "), HasSubstr("rank 1 "), HasSubstr("rank 2 ")));
  EXPECT_THAT(together(three, broken), IsEmpty());
  // A message on either side of a collective.
  EXPECT_THAT(together(two, {one_by_one({message("recv", 0, 1), reduce("pp", "tied")}), one_by_one({reduce("pp", "tied"), message("send", 1, 0)})}),
              AllOf(HasSubstr("rank 0 waits in recv of pp (stage)"), HasSubstr("rank 1 waits in all_reduce of pp (tied)")));
}

}  // namespace
}  // namespace tessera::plan
