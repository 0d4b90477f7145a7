// The page that a plan is drawn into: each section shows the numbers of the plan's JSON, which the page itself holds.

#include "tessera/plan/html_report.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tessera/core/format.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::HasSubstr;
using testing::Not;

Device device_for_reports() {
  Device device = find_device("h100");
  device.devices_per_node = 2;
  return device;
}

/// Tags that are opened are closed, in order; what is left over, or the first that is not right.
std::string problem_of_tags(const std::string& text) {
  std::vector<std::string> open;
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at + 1)) {
    const size_t end = text.find('>', at);
    if (end == std::string::npos) return "a tag without an end";
    const std::string tag = text.substr(at + 1, end - at - 1);
    if (tag.starts_with("!")) continue;
    if (tag.ends_with("/")) continue;
    if (!tag.starts_with("/")) {
      open.push_back(tag.substr(0, tag.find(' ')));
    } else if (open.empty() || open.back() != tag.substr(1)) {
      return "</" + tag.substr(1) + "> closes " + (open.empty() ? "nothing" : open.back());
    } else {
      open.pop_back();
    }
  }
  return open.empty() ? "" : open.back() + " is never closed";
}

std::string section_of(const std::string& page, const std::string& id) {
  const auto begin = page.find("<section id=\"" + id + "\">");
  if (begin == std::string::npos) return "";
  return page.substr(begin, page.find("</section>", begin) - begin);
}

class HtmlReport : public testing_support::TrainFixture {
 protected:
  DryRun run_of(const Config& config, int world, bool timed = true) const {
    const auto machine = timed ? std::optional(machine_of(device)) : std::nullopt;
    return dry_run(config, world, {.machine = machine, .history = true});
  }
  Device device = device_for_reports();
};

TEST_F(HtmlReport, HasTheNumbersOfThePlanInEachSection) {
  const Config config = this->config("llama", {"mesh.pp=2", "mesh.dp_shard=2", "zero.stage=1", "run.memory_limit_bytes=1000000000"});
  const DryRun run = run_of(config, 4);
  const auto page = html_report({.config = config, .run = run, .device = &device, .json = to_json(run)});
  EXPECT_EQ(problem_of_tags(page), "");
  const auto begin = page.find("id=\"plan\">") + 10;
  const auto json = nlohmann::json::parse(page.substr(begin, page.find("</script>") - begin));
  EXPECT_EQ(json, to_json(run));
  ASSERT_EQ(json["ranks"].size(), run.ranks.size());
  for (const auto& ranks : json["ranks"]) {
    EXPECT_THAT(section_of(page, "memory-by-rank"), HasSubstr(">" + std::to_string(ranks["peak_bytes"]["total"].get<int64_t>()) + "<"));
    for (const auto& sum : ranks["collectives"]) {
      EXPECT_THAT(section_of(page, "traffic"), HasSubstr(">" + std::to_string(sum["sent_bytes"].get<int64_t>()) + "<"));
    }
  }
  EXPECT_THAT(section_of(page, "timeline"), HasSubstr(fmt::format(">{:.6g}<", json["time"]["seconds"].get<double>())));
  EXPECT_THAT(section_of(page, "timeline"), HasSubstr("1f1b, 2 ranks, 4 micro-batches"));
  EXPECT_THAT(section_of(page, "traffic"), AllOf(HasSubstr("inside a node: NVLink"), HasSubstr("between 2 nodes")));
  EXPECT_THAT(section_of(page, "layout"), AllOf(HasSubstr("<td>mesh.pp</td><td>2</td>"), HasSubstr("<td>zero.stage</td><td>1</td>")));
  EXPECT_THAT(page, AllOf(HasSubstr("the step fits"), HasSubstr("prefers-color-scheme: dark"), HasSubstr("role=\"img\""),
                          Not(HasSubstr("http://www.w3.org/TR")), Not(HasSubstr(" src=")), Not(HasSubstr("<link"))));
}

TEST_F(HtmlReport, TheCurveOfMemoryReachesThePeak) {
  for (const bool timed : {true, false}) {
    const DryRun run = run_of(config("llama", {"mesh.tp=3"}), 3, timed);
    const RankClass& most = largest_class(run);
    ASSERT_NE(most.history.peak(), nullptr);
    EXPECT_EQ(most.history.peak()->after, most.peak_bytes) << "of three steps that are alike";
    EXPECT_TRUE(std::ranges::is_sorted(most.history.events, {}, &MemoryEvent::seconds));
    EXPECT_EQ(most.history.marks.size(), 14U) << "a forward and a backward of seven micro-batches";
    if (timed) EXPECT_NEAR(most.history.seconds, most.time.step, 0.01 * most.time.step);
  }
}

TEST_F(HtmlReport, SaysWhatIsMissingWithoutADevice) {
  const Config config = this->config("mlp");
  const DryRun run = run_of(config, 1, /*timed=*/false);
  const auto page = html_report({.config = config, .run = run, .json = to_json(run)});
  EXPECT_EQ(problem_of_tags(page), "");
  EXPECT_THAT(section_of(page, "timeline"), HasSubstr("--device NAME"));
  EXPECT_THAT(section_of(page, "traffic"), HasSubstr("Nothing is sent."));
  EXPECT_FALSE(drawing_of(run).has_value());
}

TEST_F(HtmlReport, ShowsRankedLayoutsAndWhyOthersLose) {
  const Config config = this->config("llama", {"mesh.dp_shard=2", "zero.stage=3"});
  const DryRun run = run_of(config, 2);
  const LayoutSearch search{.world = 2,
                            .possible = 17,
                            .ranked = {{.choice = {.stage = 3, .shard = 2}, .needed_bytes = 123457, .fits = true, .time = {.seconds = 0.25}},
                                       {.choice = {.tp = 2}, .needed_bytes = 7654321, .time = {.seconds = 0.5}}},
                            .losing = {{.what = "tp 2", .reason = "needs <more>"}}};
  const auto page = html_report({.config = config, .run = run, .device = &device, .search = &search, .json = to_json(run)});
  EXPECT_EQ(problem_of_tags(page), "");
  EXPECT_THAT(section_of(page, "search"), AllOf(HasSubstr(">123457<"), HasSubstr(">7654321<"), HasSubstr("needs &lt;more&gt;"), HasSubstr("17 layouts")));
}

TEST_F(HtmlReport, AnotherFrameworksVerdictIsOfWhatItReserves) {
  Config config = this->config("llama");
  config.run.memory_limit_bytes = 1'500'000'000;  // more than our tensors need, and less than its contexts
  const DryRun run = run_of(config, 1);
  ASSERT_TRUE(run.fits());
  const Framework framework = find_framework("nanotron");
  const auto page = html_report({.config = config, .run = run, .device = &device, .framework = &framework, .json = to_json(run)});
  EXPECT_THAT(page, AllOf(HasSubstr("class=\"verdict no\""), HasSubstr("framework Nanotron: "), HasSubstr("which do not fit 1.40 GiB"),
                          Not(HasSubstr("the step fits"))));
}

TEST_F(HtmlReport, SaysWhatDocumentsAndRoutersMayMakeOfIt) {
  const Config config = this->config("llama", {"data.documents=lines", "mesh.cp=2"});
  const DryRun run = run_of(config, 2);
  const auto bounds = find_bounds(config, run, {});
  ASSERT_TRUE(bounds.has_value());
  EXPECT_LT(bounds->lowest_peak, bounds->highest_peak);
  EXPECT_EQ(bounds->highest_peak, total_of(largest_class(run).peak_bytes)) << "a window is no longer than one document of it";
  const auto page = html_report({.config = config, .run = run, .device = &device, .bounds = bounds, .json = to_json(run)});
  EXPECT_THAT(page, HasSubstr("not known before it runs is how long documents are"));
  EXPECT_THAT(to_string(*bounds, bounds->highest_peak - 1), HasSubstr("lies between"));
  EXPECT_EQ(to_json(*bounds)["unknown"], nlohmann::json({"documents"}));
  EXPECT_FALSE(find_bounds(this->config("llama"), run, {}).has_value());
}

/// Of a micro-batch that is padding, experts on other ranks get nothing, also from a router that gives each expert as many tokens, and where each is cut over
/// all ranks.
TEST_F(HtmlReport, BoundsKnowThatAMicroBatchMayBePadding) {
  for (const std::vector<std::string>& dealt : {std::vector<std::string>{"mesh.ep=2", "model.router=expert_choice"}, {"mesh.expert_tp=2"}}) {
    std::vector<std::string> sets{"data.documents=lines", "mesh.dp_shard=2", "zero.stage=1", "model.ffn_dim=64",
                                  "model.experts=4",      "data.seq_len=64", "run.threads=1"};
    sets.insert(sets.end(), dealt.begin(), dealt.end());
    const Config config = this->config("mixtral", sets);
    const DryRun run = dry_run(config, 2, {});
    const auto peak = [](const DryRun& of) { return static_cast<double>(total_of(largest_class(of).peak_bytes)); };
    const double full = without_length(peak(run), peak(dry_run(config, 2, {.documents = kShortDocuments})));
    EXPECT_LT(static_cast<double>(find_bounds(config, run, {})->lowest_peak), full - 1000) << dealt.front();
  }
}

TEST_F(HtmlReport, TheTraceHoldsEveryActionOnce) {
  for (const int stages : {1, 2}) {
    const DryRun run = run_of(config("llama", {"mesh.pp=" + std::to_string(stages)}), stages);
    const auto drawing = drawing_of(run);
    ASSERT_TRUE(drawing.has_value());
    const auto trace = nlohmann::json::parse(schedules::trace_of({*drawing}));
    const auto spans = std::ranges::count_if(trace["traceEvents"], [](const auto& event) { return event.value("ph", "") == "X"; });
    EXPECT_EQ(spans, 2 * 7 * stages);
    double end = 0;
    for (const auto& rank : drawing->timeline) end = std::max(end, rank.back().end);
    EXPECT_LE(end, 1e3 * run.time->seconds);
    EXPECT_GT(end, 0);
  }
}

TEST_F(HtmlReport, UpdatesInTheMidstOfAStepAreDrawnInItsUnit) {
  const DryRun run = run_of(config("llama", {"mesh.pp=2", "pipeline.schedule=pipedream", "optim.max_grad_norm=0"}), 2);
  const auto drawing = drawing_of(run);
  ASSERT_TRUE(drawing.has_value());
  int updates = 0;
  for (size_t rank = 0; rank < drawing->timeline.size(); ++rank) {
    for (size_t i = 0; i < drawing->timeline[rank].size(); ++i) {
      const auto& [kind, stage] = std::pair(drawing->schedule.actions[rank][i].kind, drawing->schedule.actions[rank][i].stage);
      if (kind != schedules::Kind::Update) continue;
      const auto ranks = std::ranges::find(run.ranks, static_cast<int>(rank), &RankClass::pipeline_rank);
      EXPECT_NEAR(drawing->timeline[rank][i].end - drawing->timeline[rank][i].start, 1e3 * ranks->time.actions.at({kind, stage}).mean(), 1e-9);
      ++updates;
    }
  }
  EXPECT_EQ(updates, 2 * 7);
}

}  // namespace
}  // namespace tessera::plan
