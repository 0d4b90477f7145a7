#include "tessera/plan/rehearsal.h"

#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/data/loader.h"
#include "tessera/nn/record_events.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/plan/alike_stages.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/machine.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using Sets = std::vector<std::string>;

class RehearsalTest : public testing_support::TrainFixture {
 protected:
  /// Few micro-batches run for many give the plan of all.
  void expect_the_same(const std::string& family, Sets sets, int world) {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets));
    sets.insert(sets.begin(), {"batch.micro_size=1", "run.threads=1"});
    const Config asked = config(family, sets);
    const DryRun few = dry_run(asked, world, {.events = true}), all = dry_run(asked, world, {.events = true, .rehearse = false});
    ASSERT_EQ(few.ranks.size(), all.ranks.size());
    for (size_t i = 0; i < few.ranks.size(); ++i) {
      RankClass a = few.ranks[i], b = all.ranks[i];
      const auto of_few = shown(a.events), of_all = shown(b.events);
      EXPECT_EQ(of_few.size(), of_all.size()) << "rank " << a.examples.front();
      const auto [at_few, at_all] = std::ranges::mismatch(of_few, of_all);
      EXPECT_TRUE(at_few == of_few.end()) << "rank " << a.examples.front() << ", event " << at_few - of_few.begin() << ": " << *at_few << "; of all "
                                          << *at_all;
      expect_sound(a.events);
    }
    EXPECT_EQ(without_events(few), without_events(all));
  }

  static nlohmann::json without_events(DryRun run) {
    for (auto& ranks : run.ranks) ranks.events.clear();
    return to_json(run);
  }

  /// What happens, whatever the storages are called.
  static std::vector<nlohmann::json> shown(const Events& events) {
    std::vector<nlohmann::json> list;
    for (nlohmann::json& event : to_json(events)) {
      for (const char* key : {"index", "reads", "writes", "after"}) event.erase(key);
      list.push_back(std::move(event));
    }
    return list;
  }

  /// Nothing waits for what comes later; what is given back was taken, once.
  static void expect_sound(const Events& events) {
    const auto after = dependencies(events);
    for (size_t i = 0; i < events.size(); ++i) {
      if (!after[i].empty()) ASSERT_LT(after[i].back(), static_cast<int64_t>(i));
    }
    std::map<int64_t, int64_t> bytes;
    for (const Event& event : events) {
      const auto* change = std::get_if<MemoryChange>(&event.what);
      if (change == nullptr) continue;
      ASSERT_EQ(event.writes.size(), 1);
      int64_t& alive = bytes[event.writes[0]];
      if (change->bytes > 0) {
        EXPECT_EQ(alive, 0) << "storage " << event.writes[0];
      }
      alive += change->bytes;
    }
  }
};

/// One list, read by all: held against what counts by itself.
TEST_F(RehearsalTest, EventsAreWhatCounterRecorderAndTrackerSee) {
  for (const Sets& sets :
       std::vector<Sets>{{}, {"zero.stage=1"}, {"zero.stage=2"}, {"zero.stage=3"}, {"mesh.tp=2"}, {"recompute.mode=full"}, {"mesh.pp=2"}, {"mesh.cp=2"}}) {
    SCOPED_TRACE(::testing::PrintToString(sets));
    const Config asked = config("llama", sets);
    const auto recorder = std::make_shared<comm::Recorder>();
    const auto world = comm::World::dry(2, 1, recorder, comm::world_options(asked.comm));
    const Mesh mesh(world, mesh_shape(asked.mesh, asked.zero.stage, 2));
    MemoryTracker memory;
    RankScope scope(asked, 1, memory);
    Stepper stepper(asked, mesh, at::kMeta, scope);
    for (int step = 1; step <= 2; ++step) {
      recorder->clear();
      memory.reset_peak();
      const Alive before{.device = memory.current_by_category(), .host = memory.host_by_category()};
      const auto counter = std::make_shared<nn::FlopCounter>();
      EventStream stream;
      {
        const nn::RecordEvents listening(stream);
        const nn::OperatorScope counted(counter);
        stepper.step(data::dry_batch(loader_options(asked, mesh), step, at::kMeta));
      }
      const Events events = stream.take();
      expect_sound(events);
      EventReader counted(before);
      counted.read(events);
      EXPECT_EQ(counted.flops(), counter->flops());
      EXPECT_EQ(counted.recomputed_flops(), counter->recomputed_flops());
      EXPECT_EQ(counted.peak().device, memory.peak_by_category());
      EXPECT_EQ(counted.alive().device, memory.current_by_category());
      auto calls = only<CollectiveEvent>(events);
      for (size_t i = 0; i < calls.size(); ++i) calls[i].sequence = static_cast<int64_t>(i);
      EXPECT_EQ(calls, recorder->records());
    }
  }
}

TEST_F(RehearsalTest, EventsTellWhatCrossesBetweenHostAndDevice) {
  const auto crossing_bytes = [&](const Sets& sets) {
    int64_t bytes = 0;
    for (const auto& ran : only<OperatorEvent>(dry_run(config("llama", sets), 2, {.events = true}).ranks.at(0).events))
      bytes += ran.crosses ? ran.written_bytes : 0;
    return bytes;
  };
  EXPECT_EQ(crossing_bytes({"zero.stage=3"}), 0);
  EXPECT_GT(crossing_bytes({"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"}), 0);
}

TEST_F(RehearsalTest, GivesThePlanOfAllMicroBatches) {
  expect_the_same("llama", {"batch.global_size=7"}, 1);
  expect_the_same("gpt2", {"batch.global_size=10", "model.dropout=0.1", "recompute.mode=full"}, 2);
  expect_the_same("llama", {"batch.global_size=10", "zero.stage=1", "zero.bucket_bytes=20000"}, 2);
  expect_the_same("llama", {"batch.global_size=10", "zero.stage=2", "zero.bucket_bytes=20000", "precision.compute=bf16"}, 2);
  expect_the_same("llama", {"batch.global_size=10", "zero.stage=3"}, 2);
  expect_the_same("llama", {"batch.global_size=12", "zero.stage=3", "zero.prefetch=2", "zero.reshard_after_forward=false"}, 2);
  expect_the_same("llama", {"batch.global_size=6", "mesh.tp=3"}, 3);
  expect_the_same("llama", {"batch.global_size=6", "mesh.cp=2"}, 2);
  expect_the_same("mixtral", {"batch.global_size=10"}, 2);
}

/// To the byte and the microsecond, on hosts that the groups of different stages meet in different ways.
TEST_F(RehearsalTest, TellsStagesBetweenTheEndsFromOneAnother) {
  const Machine machine = [] {
    Machine made = machine_of(find_device("h100"));
    made.devices_per_host = 3;
    return made;
  }();
  using Case = std::tuple<std::string, Sets, int>;
  for (const auto& [family, sets, world] : std::vector<Case>{
           {"llama", {"mesh.pp=5", "batch.global_size=7"}, 5},
           {"llama", {"mesh.pp=5", "mesh.dp_shard=2", "zero.stage=2", "batch.global_size=12"}, 10},
           {"gpt2", {"mesh.pp=5", "pipeline.schedule=zb_h1", "batch.global_size=8"}, 5},
           {"llama", {"mesh.pp=4", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}, 4},
           {"llama", {"mesh.pp=4", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2"}, 4},
           {"llama", {"mesh.pp=5", "pipeline.schedule=v_min", "pipeline.virtual_stages=2"}, 5},
           {"llama",
            {"mesh.pp=8", "model.layers=46", "batch.global_size=16", "precision.compute=bf16", "pipeline.schedule=v_min", "pipeline.virtual_stages=2"},
            8},
           {"llama", {"mesh.pp=5", "mesh.dp_shard=2", "zero.stage=1", "batch.global_size=32"}, 10},
           {"llama", {"mesh.pp=4", "recompute.mode=full", "recompute.every=2"}, 4}}) {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets));
    Sets all{"model.layers=10", "batch.global_size=8", "batch.micro_size=1", "run.threads=1"};
    all.insert(all.end(), sets.begin(), sets.end());
    const Config asked = config(family, all);
    EXPECT_EQ(to_json(dry_run(asked, world, {.machine = machine})), to_json(dry_run(asked, world, {.machine = machine, .share_traces = false})));
  }
}

/// However differently they warm up: what each does with a micro-batch is the same, but that some have other micro-batches beside it in a stage, and some none.
TEST_F(RehearsalTest, RunsFewOfTheRanksBetweenTheEnds) {
  using Case = std::tuple<std::string, std::string, std::set<int>>;
  for (const auto& [schedule, stages, expected] :
       std::vector<Case>{{"1f1b", "1", {1, 2, 8}}, {"zb_h1", "1", {1, 2, 8}}, {"interleaved", "2", {1, 2, 4, 8}}, {"v_min", "2", {1, 2, 4, 8}}}) {
    SCOPED_TRACE(schedule);
    const Sets sets{"mesh.pp=8",
                    "zero.stage=0",
                    "batch.micro_size=1",
                    "batch.global_size=24",
                    "run.threads=1",
                    "pipeline.schedule=" + schedule,
                    "pipeline.virtual_stages=" + stages,
                    "model.layers=" + std::to_string(stages == "1" ? 30 : 46)};
    std::set<int> run;
    DryRunOptions options;
    options.progress = [&](const DryRunProgress& progress) { run.insert(progress.kind); };
    EXPECT_EQ(dry_run(config("llama", sets), 8, options).ranks.size(), 8);
    EXPECT_EQ(run, expected);
  }
}

/// What the second of five ranks sends and receives, told of the fourth.
TEST(AlikeStages, MessagesGetTheirOwnPeersAndTags) {
  const auto schedule = schedules::one_f_one_b(5, 4);
  const auto legs = [&](int rank) { return pipeline::itinerary(schedule, pipeline::chain(5), rank); };
  const auto events = [&](int rank) {
    Events found;
    const int of_crossing = pipeline::end_of_tags(1, pipeline::chain(2)), of_micro_batch = pipeline::end_of_tags(1, pipeline::chain(5));
    const auto add = [&](const char* op, const pipeline::Message& message) {
      const int tag = message.micro_batch * of_micro_batch + message.crossing * of_crossing + (message.gradient ? 1 : 0);
      found.push_back({.what = CollectiveEvent{.op = op, .group = "pp", .group_size = 5, .group_rank = rank, .peer = message.peer, .tag = tag}});
    };
    for (const auto& leg : legs(rank)) {
      for (const auto& post : leg.posts) add("recv", post);
      for (const auto& sent : leg.sends) add("send", sent);
    }
    return found;
  };
  Events told = events(1);
  for (Event& event : told) std::get<CollectiveEvent>(event.what).peer = 0;
  ASSERT_TRUE(readdress(told, legs(1), 1, 5, {"pp"}));
  EXPECT_EQ(told, events(1));
  // Of one micro-batch the second and the third do the same.
  const auto one = schedules::one_f_one_b(5, 1);
  const auto of = [&](int rank) { return pipeline::itinerary(one, pipeline::chain(5), rank); };
  const auto own = of(2), told_of = renamed_legs(of(1), {1}, {2});
  ASSERT_EQ(told_of.size(), own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_EQ(told_of[i].action.stage, 2);
    const auto without_peers = [](std::vector<pipeline::Message> messages) {
      for (auto& message : messages) message.peer = 0;
      return messages;
    };
    EXPECT_EQ(without_peers(told_of[i].posts), without_peers(own[i].posts));
    EXPECT_EQ(without_peers(told_of[i].needs), without_peers(own[i].needs));
    EXPECT_EQ(without_peers(told_of[i].sends), without_peers(own[i].sends));
  }
  Events moved;
  for (const auto& leg : of(1)) {
    for (const auto& post : leg.posts)
      moved.push_back({.what = CollectiveEvent{.op = "recv", .group = "pp", .tag = 3 * post.crossing + (post.gradient ? 1 : 0)}});
    for (const auto& sent : leg.sends)
      moved.push_back({.what = CollectiveEvent{.op = "send", .group = "pp", .tag = 3 * sent.crossing + (sent.gradient ? 1 : 0)}});
  }
  ASSERT_TRUE(readdress(moved, of(2), 2, 5, {"pp"}));
  std::vector<int> tags, peers;
  for (const auto& call : only<CollectiveEvent>(moved)) tags.push_back(call.tag), peers.push_back(call.peer);
  EXPECT_EQ(peers, (std::vector<int>{1, 3, 3, 1}));
  EXPECT_EQ(tags, (std::vector<int>{3, 6, 7, 4}));
}

TEST_F(RehearsalTest, GivesThePlanOfAPipeline) {
  const Sets three{"model.layers=3", "batch.global_size=9", "mesh.pp=3"};
  for (const auto& [schedule, stage] : std::vector<std::pair<std::string, std::string>>{{"gpipe", "2"}, {"1f1b", "0"}, {"zb_h1", "0"}}) {
    Sets sets{"pipeline.schedule=" + schedule, "zero.stage=" + stage};
    sets.insert(sets.end(), three.begin(), three.end());
    expect_the_same("llama", sets, 3);
  }
  expect_the_same("llama", {"batch.global_size=18", "mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3", "pipeline.schedule=1f1b"}, 4);
  expect_the_same("gpt2", {"model.layers=4", "batch.global_size=12", "mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}, 2);
  expect_the_same("llama", {"model.layers=4", "batch.global_size=12", "mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2", "mesh.tp=2"}, 4);
  expect_the_same("mlp", {"model.layers=4", "batch.global_size=9", "mesh.pp=2", "pipeline.schedule=pipedream"}, 2);
  for (const std::string schedule : {"1f1b", "interleaved", "zb_v", "v_min"}) {  // whose micro-batches share copies of weights
    expect_the_same("llama",
                    {"model.layers=6", "batch.global_size=9", "mesh.pp=3", "precision.compute=bf16", "pipeline.schedule=" + schedule,
                     "pipeline.virtual_stages=" + std::string(schedule == "1f1b" ? "1" : "2")},
                    3);
  }
}

/// What a check of messages needs belongs to the message, wherever it is posted.
TEST_F(RehearsalTest, GivesThePlanOfCheckedMessages) {
  const Sets checked{"comm.check=true", "mesh.pp=3", "batch.global_size=9", "model.layers=6"};
  for (const Sets& schedule : std::vector<Sets>{{"pipeline.schedule=1f1b"}, {"pipeline.schedule=v_min", "pipeline.virtual_stages=2"}}) {
    Sets sets = checked;
    sets.insert(sets.end(), schedule.begin(), schedule.end());
    expect_the_same("llama", sets, 3);
  }
}

TEST(Rehearsal, RunsAsFewMicroBatchesAsThereAreKinds) {
  const auto one = [](int micro_batches) {
    schedules::Schedule schedule{.name = "one", .micro_batches = micro_batches, .rank_of = {0}, .actions = {{}}};
    for (int i = 0; i < micro_batches; ++i) {
      schedule.actions[0].push_back({.kind = schedules::Kind::Forward, .micro_batch = i});
      schedule.actions[0].push_back({.kind = schedules::Kind::Backward, .micro_batch = i});
    }
    return schedule;
  };
  const auto found = shortest_rehearsal(one, 6, /*rank=*/0, {}, /*neighbours=*/false);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->micro_batches, 3);
  EXPECT_EQ(found->stands_for, (std::vector<int>{0, 1, 1, 1, 1, 2}));
  EXPECT_FALSE(shortest_rehearsal(one, 3, /*rank=*/0, {}, /*neighbours=*/false)) << "all are run as it is";
  const auto looking = shortest_rehearsal(one, 6, /*rank=*/0, {}, /*neighbours=*/true);
  ASSERT_TRUE(looking);
  EXPECT_EQ(looking->stands_for, (std::vector<int>{0, 1, 2, 2, 2, 3}));
}

/// One that comes to a stage alone makes what it shares with those behind it, and the last to leave takes it away: neither is the other's.
TEST(Rehearsal, KnowsWhoMeetsOthersInAStage) {
  const auto schedule_of = [](const std::string& actions) {
    schedules::Schedule schedule{.name = "one", .micro_batches = static_cast<int>(actions.size()) / 4, .rank_of = {0}, .actions = {{}}};
    for (size_t i = 0; i < actions.size(); i += 2) {
      schedule.actions[0].push_back({.kind = actions[i] == 'F' ? schedules::Kind::Forward : schedules::Kind::Backward, .micro_batch = actions[i + 1] - '0'});
    }
    return schedule;
  };
  const auto told_by = [&](const std::string& shown, const std::string& whole) {
    return rehearsal_by(
        pipeline::itinerary(schedule_of(shown), pipeline::chain(1), 0), [&](int) { return schedule_of(whole); }, static_cast<int>(whole.size()) / 4, /*rank=*/0,
        {}, /*neighbours=*/false);
  };
  const std::string last_first = "F0B0F1F2B2B1F3B3", first_first = "F0B0F1F2B1B2F3B3";
  EXPECT_FALSE(told_by(last_first, first_first));
  EXPECT_FALSE(told_by(first_first, last_first));
  const auto twice = told_by(first_first, "F0B0F1F2B1B2F3F4B3B4F5B5");
  ASSERT_TRUE(twice);
  EXPECT_EQ(twice->stands_for, (std::vector<int>{0, 1, 2, 1, 2, 3}));
}

}  // namespace
}  // namespace tessera::plan
