// What a pipeline did, as a run takes it down; and what crosses between its stages.

#include "tessera/train/timeline.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/backends/record.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tessera/train/observers/metrics_file.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

#ifdef TESSERA_SIM_DEVICE
#include "tests/train/slow_engine.h"
#endif

namespace tessera {
namespace {

using ::testing::ElementsAre;

class PipelineTimes : public testing_support::TrainFixture {
 protected:
  Config piped(std::vector<std::string> sets) const {
    sets.insert(sets.begin(), {"run.threads=1", "batch.micro_size=2", "batch.global_size=8", "model.layers=2"});
    return config("llama", sets);
  }

  /// One step of `world` ranks; `look` is given each rank's stepper, with what it took down.
  void step(const Config& config, int world, const std::function<void(comm::World&, Stepper&, pipeline::StepTimes&)>& look,
            const std::vector<comm::Decorator>& decorators = {}) const {
    const auto text = corpus(config);
    comm::run_ranks(world,
                    [&](comm::World& ranks) {
                      validate(config, ranks.size());
                      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
                      RankScope scope(config, ranks.local_size());
                      Stepper stepper(config, mesh, testing_support::test_device(), scope);
                      data::Loader loader(text, loader_options(config, mesh));
                      pipeline::StepTimes times;
                      stepper.step(loader.next(), {.times = &times});
                      look(ranks, stepper, times);
                    },
                    {.decorators = decorators});
  }
};

TEST_F(PipelineTimes, HoldEveryActionOfThePlannedOrder) {
  for (const char* name : {"1f1b", "zb_v"}) {
    const auto planned = schedules::make_schedule({.name = name, .ranks = 2, .micro_batches = 4});
    step(piped({"mesh.pp=2", std::string("pipeline.schedule=") + name, "pipeline.virtual_stages=" + std::to_string(planned.chunks(0))}), 2,
         [&](comm::World& world, Stepper& stepper, pipeline::StepTimes& times) {
           const auto timelines = gather_timelines(world.group(), stepper.run().pipeline, times, 3);
           ASSERT_EQ(timelines == nullptr, world.rank() > 0);
           if (world.rank() > 0) return;
           ASSERT_EQ(timelines->size(), 1U);
           const schedules::Timed& timed = timelines->front();
           EXPECT_EQ(timed.schedule, planned);
           EXPECT_EQ(timed.step, 3);
           double first = 1e9;
           for (size_t rank = 0; rank < 2; ++rank) {
             double last = 0;
             first = std::min(first, timed.timeline[rank].front().start);
             for (size_t i = 0; i < timed.timeline[rank].size(); ++i) {
               const auto& span = timed.timeline[rank][i];
               EXPECT_GE(span.start, timed.asked[rank][i]);
               if (i > 0) EXPECT_GE(timed.asked[rank][i], last);
               // The second halves of embedding and head have nothing left to compute, for which a device takes no time.
               EXPECT_GE(span.end, span.start);
               if (timed.schedule.actions[rank][i].kind != schedules::Kind::BackwardWeight) EXPECT_GT(span.end, span.start);
               last = span.end;
             }
           }
           EXPECT_EQ(first, 0);
           // By the one clock of two ranks, whatever an action takes from the other was made before it began. Simulated devices have a clock each.
           if (testing_support::test_device().is_cpu()) EXPECT_GE(message_time(timed), 0);
         });
  }
}

TEST_F(PipelineTimes, OfEachPipelineAreALine) {
  std::vector<int> firsts;
  step(piped({"mesh.pp=2", "mesh.dp_replicate=2"}), 4, [&](comm::World& world, Stepper& stepper, pipeline::StepTimes& times) {
    const auto timelines = gather_timelines(world.group(), stepper.run().pipeline, times, 1);
    if (world.rank() > 0) return;
    for (const auto& timed : *timelines) firsts.push_back(timed.rank);
    const auto log = folder_ / "log";
    std::filesystem::create_directories(log);
    std::ofstream(log / "timeline.jsonl") << "{\"step\": 1}\n{\"step\": 7}\n";  // an earlier run's, of which this one goes on at step 2
    MetricsFile file;
    file.on_start({.log_dir = log, .first_step = 2});
    file.after_step({.step = 2});
    file.after_step({.step = 3, .timelines = timelines});
    file.on_end({});
    std::ifstream in(log / "timeline.jsonl");
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    ASSERT_EQ(lines.size(), 3U);
    EXPECT_EQ(lines[0], "{\"step\": 1}");
    EXPECT_EQ(schedules::timed_from_json(nlohmann::json::parse(lines[2]), "").rank, 2);
  });
  EXPECT_THAT(firsts, ElementsAre(0, 2));
}

/// b s h elements of each micro-batch over each boundary, forward and back; one sum of what each stage has of the gradient's norm, and the report of the step,
/// which is of all ranks. Nothing else.
TEST_F(PipelineTimes, BoundariesCarryTheStreamAndNothingElse) {
  for (const int ranks : {2, 3}) {
    auto recorder = std::make_shared<comm::Recorder>();
    const auto config = piped({"mesh.pp=" + std::to_string(ranks)});
    step(config, ranks, [&](comm::World&, Stepper&, pipeline::StepTimes&) {}, {comm::recording(recorder)});
    const int64_t m = 4, stream = 2 * 16 * 24;
    std::map<std::string, int64_t> sends;
    std::map<std::string, int> others;
    for (const auto& record : recorder->records()) {
      const bool message = record.op == "send" || record.op == "recv";
      if (message) {
        EXPECT_EQ(record.shape, (std::vector<int64_t>{2, 16, 24}));
        EXPECT_EQ(record.elements, stream);
        EXPECT_EQ(record.dtype, at::kFloat);
        if (record.op == "send") ++sends[std::to_string(record.group_rank) + ">" + std::to_string(record.peer)];
      } else {
        ++others[record.op + " in " + record.site];
        if (record.site == "norm") EXPECT_EQ(record.elements, 1);
      }
    }
    for (int rank = 0; rank + 1 < ranks; ++rank) {
      EXPECT_EQ(sends[std::to_string(rank) + ">" + std::to_string(rank + 1)], m);
      EXPECT_EQ(sends[std::to_string(rank + 1) + ">" + std::to_string(rank)], m);
    }
    EXPECT_EQ(sends.size(), 2U * static_cast<size_t>(ranks - 1));
    EXPECT_EQ(others, (std::map<std::string, int>{{"all_gather in report", ranks}, {"all_reduce in norm", ranks}}));
  }
}

#ifdef TESSERA_SIM_DEVICE
/// Events of a device know to the microsecond what it waited for, and for how long; the host reads nothing in the step.
TEST_F(PipelineTimes, AreReadBeforeTheHostHasWaitedForAnything) {
  const at::Tensor x = at::ones({10});
  pipeline::StepTimes times;
  pipeline::LapTaker lap(times, {.kind = schedules::Kind::Forward, .stage = 0, .micro_batch = 0}, x.device());
  lap.compute([&] { x.add_(1); });
  x.add_(1);  // what follows the step is asked for, too
  times.read();
  ASSERT_EQ(times.laps.size(), 1U);
  EXPECT_LE(times.laps[0].asked, times.laps[0].start);
  EXPECT_LE(times.laps[0].start, times.laps[0].end);
}

TEST_F(PipelineTimes, OfADeviceAreItsOwn) {
  if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "the CPU's time is the host's";
  using schedules::Kind;
  const auto laps_of = [this](const Config& config, const std::shared_ptr<testing_support::Slowness>& slowness) {
    std::vector<pipeline::Lap> laps;
    step(config, 2,
         [&](comm::World& world, Stepper&, pipeline::StepTimes& times) {
           if (world.rank() > 0) return;
           for (const auto& lap : times.laps) EXPECT_EQ(lap.end, 0) << "before it is read";
           times.read();
           laps = times.laps;
         },
         {testing_support::slowing(slowness)});
    return laps;
  };
  constexpr double kLittle = 1e-3;  // a thousand pieces of work
  const auto late = std::make_shared<testing_support::Slowness>();
  late->seconds = [](std::string_view site) { return site.find("backward") != site.npos ? 1 : 0; };  // what rank 1 sends
  double last = 0;
  const auto laps = laps_of(piped({"mesh.pp=2"}), late);
  ASSERT_EQ(laps.size(), 8U);
  for (const auto& lap : laps) {
    const std::string name = to_string(lap.action);
    if (last > 0) EXPECT_NEAR(lap.start - last, lap.action.kind == Kind::Forward ? 0 : 1, kLittle) << name;
    EXPECT_NEAR(lap.start - lap.asked, lap.action.kind == Kind::Forward ? 0 : 1, kLittle) << name;
    EXPECT_GT(lap.end - lap.start, 10 * testing_support::kWork) << name;
    EXPECT_LT(lap.end - lap.start, kLittle) << name;
    EXPECT_EQ(lap.collectives, 0) << name;
    last = lap.end;
  }
  EXPECT_GT(last, 0);
  const auto slow = std::make_shared<testing_support::Slowness>();
  slow->seconds = [](std::string_view site) { return site == "norm" || site == "report" ? 0 : 1; };
  double collectives = 0;
  for (const auto& lap : laps_of(piped({"mesh.tp=2"}), slow)) {
    EXPECT_GT(lap.collectives, 1) << to_string(lap.action);
    EXPECT_NEAR(lap.end - lap.start, lap.collectives, kLittle) << to_string(lap.action);
    collectives += lap.collectives;
  }
  EXPECT_NEAR(collectives, slow->of_steps.at(0), 4 * kLittle);
}
#endif

}  // namespace
}  // namespace tessera
