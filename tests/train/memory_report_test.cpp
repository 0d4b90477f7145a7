#include "tessera/train/observers/memory_report.h"

#include <set>

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "tessera/comm/collectives.h"
#include "tessera/train/memory_watch.h"
#include "tests/data/files.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class MemoryWatchTest : public testing_support::TrainFixture {
 protected:
  struct Seen {
    MemoryHistory history;  ///< of the second step
    std::vector<int64_t> peaks;
    std::vector<double> losses;
  };

  /// Three steps of two micro-batches on `world` ranks, watched or not; what rank 0 saw. (Over shm: Gloo's worker may hold on to tensors for a while.)
  Seen steps(const std::vector<std::string>& sets, int world, bool watched) const {
    std::vector<std::string> all{"batch.global_size=" + std::to_string(4 * world)};
    all.insert(all.end(), sets.begin(), sets.end());
    const Config config = this->config("llama", all);
    Seen seen;
    const auto text = corpus(config);
    const auto body = [&](comm::World& ranks) {
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      if (watched) scope.memory().keep_details();
      Stepper stepper(config, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(config, mesh));
      std::optional<MemoryWatch> watch;
      if (watched) watch.emplace(scope.memory(), stepper.run());
      for (int step = 1; step <= 3; ++step) {
        const bool reported = watched && step == 2;
        reported ? scope.memory().start_timeline() : scope.memory().reset_peak();
        const auto outcome = stepper.step(loader.next());
        const int64_t peak = scope.memory().peak();
        const auto history = reported ? scope.memory().end_timeline() : MemoryHistory{};
        if (ranks.rank() > 0) continue;
        seen.losses.push_back(outcome.loss);
        seen.peaks.push_back(peak);
        if (reported) seen.history = history;
      }
    };
    comm::run_ranks(world, body, {.backend = "shm"});
    return seen;
  }

  static std::set<std::string> modules_of(const MemoryHistory& history, const std::string& phase) {
    std::set<std::string> modules;
    std::string now;
    size_t mark = 0;
    for (const auto& event : history.events) {
      while (mark < history.marks.size() && history.marks[mark].index <= event.index) now = history.marks[mark++].name;
      if (now == phase && event.bytes > 0) modules.insert(history.modules[static_cast<size_t>(event.module)]);
    }
    return modules;
  }
};

TEST_F(MemoryWatchTest, ChangesNeitherMemoryNorLosses) {
  for (const auto& [sets, world] :
       std::vector<std::pair<std::vector<std::string>, int>>{{{}, 1}, {{"recompute.mode=full"}, 1}, {{"zero.stage=3"}, 2}, {{"zero.stage=2"}, 2}}) {
    const auto plain = steps(sets, world, false), watched = steps(sets, world, true);
    EXPECT_EQ(plain.peaks, watched.peaks) << ::testing::PrintToString(sets);
    EXPECT_EQ(plain.losses, watched.losses) << ::testing::PrintToString(sets);
  }
}

TEST_F(MemoryWatchTest, KnowsModulesForwardAndBackward) {
  for (const auto& sets : std::vector<std::vector<std::string>>{{}, {"recompute.mode=full"}}) {
    const auto history = steps(sets, 1, true).history;
    for (const std::string phase : {"forward", "backward"}) {
      const auto modules = modules_of(history, phase);
      for (const std::string path : {"layers.0.attention", "layers.0.feed_forward", "layers.1.feed_forward.w2"}) {
        EXPECT_TRUE(modules.contains(path)) << path << " in " << phase << ::testing::PrintToString(modules);
      }
    }
    EXPECT_EQ(history.marks.size(), 2u * 2 + 1) << "forward and backward of each micro-batch, and the update";
    ASSERT_NE(history.peak(), nullptr);
  }
}

TEST_F(MemoryWatchTest, NamesTheLargestTensors) {
  const auto largest = steps({"model.dim=96"}, 1, true).history.largest;
  ASSERT_EQ(largest.size(), 10u);
  std::set<std::string> names;
  for (const auto& block : largest) {
    EXPECT_TRUE(block.dtype.has_value()) << place_text(block);
    names.insert(block.name);
  }
  EXPECT_TRUE(names.contains("embed_tokens.weight") && names.contains("head.weight.grad")) << ::testing::PrintToString(names);
  EXPECT_EQ(std::count_if(names.begin(), names.end(), [](const std::string& name) { return name.ends_with(".exp_avg"); }), 2)
      << ::testing::PrintToString(names);
}

// Buffers of collectives come from other allocators, and what a collective itself allocates is refused inside of it: it is an end of memory all the same, and
// no failure of the link.
TEST(MemoryLimit, HoldsForBuffersOfCollectives) {
  for (const std::string backend : {"shm", "gloo"}) {
    comm::run_ranks(2,
                    [](comm::World& world) {
                      MemoryTracker tracker;
                      const TrackMemory track(tracker);
                      tracker.set_limit(1 << 20);
                      EXPECT_THROW(comm::empty(world.group(), {1 << 20}, at::kFloat), c10::OutOfMemoryError);
                      EXPECT_EQ(tracker.current(), 0);
                      const auto fits = comm::empty(world.group(), {1 << 18}, at::kFloat);
                      EXPECT_EQ(tracker.current(), 1 << 20);
                      comm::all_reduce(world.group(), fits.fill_(1));
                    },
                    {.backend = backend});
  }
}

/// Four events: the peak is the second.
MemoryHistory small_history() {
  MemoryHistory history{.before = {1 << 20}, .modules = {"", "layers.0"}, .seconds = 0.1, .num_events = 4};
  history.marks = {{.name = "forward", .index = 0, .seconds = 0.01}, {.name = "backward", .index = 2, .seconds = 0.06}};
  const auto event = [&](int64_t index, double seconds, int64_t activations) {
    history.events.push_back(
        {.index = index, .seconds = seconds, .category = MemoryCategory::Activations, .bytes = 0, .module = 1, .after = {1 << 20, 0, 0, activations, 0, 0, 0}});
  };
  event(0, 0.02, 1 << 20), event(1, 0.04, 3 << 20), event(2, 0.07, 1 << 20), event(3, 0.09, 0);
  history.largest = {{.bytes = 3 << 20, .category = MemoryCategory::Activations, .module = "layers.0", .name = {}, .shape = {768, 1024}, .dtype = at::kFloat},
                     {.bytes = 1 << 20, .category = MemoryCategory::Parameters, .module = {}, .name = "head.weight", .shape = {512, 512}, .dtype = at::kFloat}};
  return history;
}

TEST(MemoryReport, DrawsAreasPhasesPeakAndTensors) {
  const std::string picture = draw_memory(small_history(), "run: memory of step 2").str();
  EXPECT_THAT(picture, AllOf(HasSubstr("run: memory of step 2"), HasSubstr("<title>params</title>"), HasSubstr("<title>activations</title>"),
                             HasSubstr("peak 4.00 MiB in forward, in layers.0"), HasSubstr(">forward<"), HasSubstr(">backward<"),
                             HasSubstr("[768, 1024] Float"), HasSubstr("head.weight"), HasSubstr(">100 ms<"), HasSubstr(">0<")));
  EXPECT_THAT(picture, Not(HasSubstr("0 ns")));
  EXPECT_THAT(picture, Not(HasSubstr("<title>comm</title>"))) << "there was none";
  EXPECT_THAT(picture, Not(HasSubstr("events"))) << "none was left out";
  auto thinned = small_history();
  thinned.events_per_point = 2;
  EXPECT_THAT(draw_memory(thinned, "t").str(), HasSubstr("4 of 4 events"));
}

TEST(MemoryReport, NamesThePhaseOfThePeakHoweverShort) {
  const auto names = [](const std::string& picture, const std::string& name) {
    size_t count = 0;
    for (size_t at = picture.find(name); at != std::string::npos; at = picture.find(name, at + 1)) ++count;
    return count;
  };
  auto history = small_history();
  history.marks[0].seconds = 0.039;
  history.marks[1].seconds = 0.041;  // forward is 14 pixels wide
  const std::string picture = draw_memory(history, "t").str();
  EXPECT_EQ(names(picture, ">forward</text>"), 1U);
  EXPECT_EQ(names(picture, ">backward</text>"), 1U);
  history.marks[0].seconds = 0.001;
  history.marks[1].seconds = 0.003;
  history.marks[0].index = history.marks[1].index = 0;
  EXPECT_EQ(names(draw_memory(history, "t").str(), ">forward</text>"), 0U) << "of short ones only that of the peak";
}

TEST(MemoryReport, OfAStepWithoutEventsIsFlat) {
  const MemoryHistory nothing{.before = {}, .events = {}};
  EXPECT_THAT(draw_memory(nothing, "t").str(), HasSubstr("peak 0 B before the step"));
  EXPECT_THAT(memory_text(nothing), HasSubstr("peak 0 B before the step"));
}

TEST(MemoryReport, SaysTheSameAsText) {
  const std::string text = memory_text(small_history());
  EXPECT_THAT(text, AllOf(HasSubstr("peak 4.00 MiB in forward, in layers.0, 40 ms of 100 ms into the step"), HasSubstr("[768, 1024] Float"),
                          HasSubstr("in layers.0\n"), HasSubstr("head.weight\n")));
}

TEST(MemoryReport, IsWrittenOnceAndNeverEndsARun) {
  data::Folder folder;
  StepResult result{.step = 2, .peak_bytes = 5 << 20, .memory_history = std::make_shared<const MemoryHistory>(small_history())};
  {
    MemoryReport report;
    report.on_start({.name = "demo", .log_dir = folder.path(), .ranks = 2});
    report.after_step({.step = 1});
    EXPECT_FALSE(std::filesystem::exists(folder / "memory_report.svg"));
    ::testing::internal::CaptureStdout();
    report.after_step(result);
    EXPECT_THAT(::testing::internal::GetCapturedStdout(), AllOf(HasSubstr("demo: memory of step 2, rank 0 of 2"),
                                                                HasSubstr("another rank held more at its peak: 5.00 MiB"), HasSubstr("memory_report.svg")));
    EXPECT_THAT(data::slurp(folder / "memory_report.svg"), HasSubstr("</svg>"));
  }
  MemoryReport nowhere(folder / "missing" / "report.svg");
  nowhere.on_start({.name = "demo", .log_dir = folder.path(), .ranks = 1});
  ::testing::internal::CaptureStdout();
  EXPECT_NO_THROW(nowhere.after_step(result));
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), Not(HasSubstr("picture")));
}

}  // namespace
}  // namespace tessera
