// The pictures of docs/sharding.md: who holds what when, and what moves, as a tracker and a recorder on each rank see one step.

#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/core/svg.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"
#include "tessera/optim/adamw.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/made_docs.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

constexpr int kRanks = 3, kLayers = 4;
constexpr int64_t kWidth = 96, kLayerBytes = kWidth * kWidth * 4, kModelBytes = kLayers * kLayerBytes;

/// One moment of a rank: what it holds then, and how many collectives it has begun.
struct Moment {
  std::string name;
  MemoryByCategory held{};
  size_t begun = 0;
};

/// One step of one rank.
struct Timeline {
  std::vector<Moment> moments;
  std::vector<CollectiveEvent> records;
};

class Clock {
 public:
  Clock(MemoryTracker memory, std::shared_ptr<comm::Recorder> recorder) : memory_(std::move(memory)), recorder_(std::move(recorder)) {}
  void tick(std::string name) { line_.moments.push_back({std::move(name), memory_.current_by_category(), recorder_->records().size()}); }
  void restart() {
    recorder_->clear();
    line_.moments.clear();
  }
  Timeline line() const { return {line_.moments, recorder_->records()}; }

 private:
  MemoryTracker memory_;
  std::shared_ptr<comm::Recorder> recorder_;
  Timeline line_;
};

/// Ticks when a layer's forward begins. Inside of what shards, so that the layer's parameters are there.
class ForwardTicks final : public nn::Interceptor {
 public:
  explicit ForwardTicks(std::shared_ptr<Clock> clock) : clock_(std::move(clock)) {}
  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    clock_->tick("forward " + module.path());
    return next(std::move(inputs));
  }

 private:
  std::shared_ptr<Clock> clock_;
};

/// Ticks when its backward begins. Outside of what shards, whose hook comes first.
class BackwardTicks final : public nn::Interceptor {
 public:
  explicit BackwardTicks(std::shared_ptr<Clock> clock) : clock_(std::move(clock)) {}
  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    outputs.at(0).toTensor().register_hook([clock = clock_, path = module.path()](const at::Tensor&) { clock->tick("backward " + path); });
    return outputs;
  }

 private:
  std::shared_ptr<Clock> clock_;
};

struct StackImpl : nn::Module {
  StackImpl() {
    for (int i = 0; i < kLayers; ++i) {
      layers.emplace_back(nn::LinearOptions(kWidth, kWidth).bias(false));
      register_module(fmt::format("layer{}", i), layers.back());
    }
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (nn::Linear& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<nn::Linear> layers;
};
TESSERA_MODULE(Stack);

Timeline run_step(comm::World& world, int stage) {
  MemoryTracker memory;
  const TrackMemory tracked(memory);
  const auto recorder = std::make_shared<comm::Recorder>();
  const comm::Group group({.name = "dp_shard", .rank = world.rank(), .size = kRanks, .timeout = std::chrono::seconds(60)},
                          comm::make_record_engine(recorder, {.name = "dp_shard", .rank = world.rank(), .size = kRanks}, world.group().engine()));
  std::optional<MemoryScope> whole(MemoryCategory::Parameters);
  Stack model;
  whole.reset();
  nn::assign_paths(*model);
  const auto clock = std::make_shared<Clock>(memory, recorder);
  const Attachment inside = nn::attach(*model, "layer*", [&](nn::Module&) { return std::make_shared<ForwardTicks>(clock); });
  std::unique_ptr<GradientSynchronizer> synchronizer;
  std::vector<nn::NamedParameter> updated = nn::unique_parameters(*model);
  if (stage == 3) {
    synchronizer = fully_shard(model, group, {.wrap = "layer*"});
  } else {
    auto zero = std::make_unique<ShardedDataParallel>(*model, ShardGroups{.shard = group},
                                                      ZeroOptions{.stage = stage, .sizes = {.bucket_bytes = kLayerBytes, .first_bucket_bytes = kLayerBytes}});
    updated = zero->shards();
    synchronizer = std::move(zero);
  }
  const Attachment outside = nn::attach(*model, "layer*", [&](nn::Module&) { return std::make_shared<BackwardTicks>(clock); });
  optim::AdamW optimizer(optim::decay_groups(updated, "all", 0.01));
  for (int step = 0; step < 3; ++step) {  // the last one is shown: by then all is in its order
    clock->restart();
    synchronizer->begin_step();
    {
      const MemoryScope scope(MemoryCategory::Activations);
      model(at::ones({2, kWidth})).sum().backward();
    }
    clock->tick("finish");
    synchronizer->finish();
    clock->tick("update");
    optimizer.step(0.01);
    synchronizer->after_update();
    clock->tick("end");
  }
  return clock->line();
}

std::vector<Timeline> run_ranks_of(int stage) {
  std::vector<Timeline> lines(kRanks);
  comm::run_ranks(kRanks, [&](comm::World& world) { lines[world.rank()] = run_step(world, stage); });
  return lines;
}

constexpr double kLeft = 64, kTop = 104, kColumn = 88, kRow = 124, kBars = 96, kBar = 44;
constexpr std::string_view kGray = "#666666", kDark = "#222222", kLight = "#f5f5f5";

struct Shown {
  MemoryCategory category;
  size_t color;
  const char* name;
};
constexpr Shown kShown[] = {{MemoryCategory::Parameters, 4, "parameters"},
                            {MemoryCategory::Gradients, 5, "gradients"},
                            {MemoryCategory::Optimizer, 2, "optimizer state"},
                            {MemoryCategory::Comm, 3, "gathered, or on its way"}};

double height_of(int64_t bytes) { return static_cast<double>(bytes) / (3.2 * kModelBytes) * kBars; }
double column_at(size_t moment) { return kLeft + kColumn * static_cast<double>(moment); }
double floor_of(int rank) { return kTop + kRow * rank + kBars + 14; }

std::string elements_text(int64_t bytes) { return fmt::format("{:.2f} P", static_cast<double>(bytes) / kModelBytes); }

/// What a rank holds, as one bar a moment.
void draw_rank(Svg& svg, const Timeline& line, int rank) {
  svg.text(8, floor_of(rank) - kBars / 2, fmt::format("rank {}", rank), {.bold = true});
  svg.line(kLeft, floor_of(rank), column_at(line.moments.size()), floor_of(rank), "#cccccc");
  for (size_t i = 0; i < line.moments.size(); ++i) {
    double top = floor_of(rank);
    int64_t sum = 0;
    for (const auto& [category, color, name] : kShown) {
      const int64_t bytes = line.moments[i].held[static_cast<int>(category)];
      const double height = height_of(bytes);
      sum += bytes;
      if (bytes > 0) svg.rect(column_at(i) + 8, top -= height, kBar, height, Svg::color(color), fmt::format("{}: {}", name, elements_text(bytes)));
    }
    svg.text(column_at(i) + 8 + kBar / 2, top - 4, elements_text(sum), {.size = 10, .color = kGray, .anchor = "middle"});
  }
}

std::string label_of(const CollectiveEvent& record) {
  const bool is_unit = record.site.starts_with("layer");
  return fmt::format("{}{}", record.op == "all_gather" ? "gather" : "scatter", is_unit ? " " + record.site.substr(5) : "");
}

/// A line through all ranks for each collective, between the moments where it was begun.
void draw_collectives(Svg& svg, const Timeline& line) {
  for (size_t i = 0; i < line.moments.size(); ++i) {
    const size_t first = i == 0 ? 0 : line.moments[i - 1].begun, end = line.moments[i].begun;
    size_t alike = 0, labels = 0;
    for (size_t r = first; r < end; ++r) {
      const bool gathers = line.records[r].op == "all_gather";
      const auto color = gathers ? Svg::color(0) : kDark;
      const double x = column_at(i) + 2 - 8 * static_cast<double>(end - 1 - r);
      svg.line(x, kTop, x, floor_of(kRanks - 1), color, 2);
      for (int rank = 0; rank < kRanks; ++rank) svg.rect(x - 3, floor_of(rank) - 3, 6, 6, color);
      const std::string label = label_of(line.records[r]);
      if (++alike, r + 1 < end && label_of(line.records[r + 1]) == label) continue;
      svg.text(x + 3, kTop - 5 - 12 * static_cast<double>(labels++), alike > 1 ? fmt::format("{} x {}", alike, label) : label,
               {.size = 10, .color = color, .anchor = "end"});
      alike = 0;
    }
  }
}

std::string picture(int stage, const std::vector<Timeline>& lines) {
  const auto& moments = lines.front().moments;
  const double width = column_at(moments.size()) + 10, bottom = floor_of(kRanks - 1) + 30;
  Svg svg(width, bottom + 30);
  int64_t sent = 0;
  for (const auto& record : lines.front().records) sent += record.sent_bytes;
  svg.text(8, 20, fmt::format("stage {}, {} ranks, {} layers, AdamW in fp32: one step; a rank sends {}", stage, kRanks, kLayers, elements_text(sent)),
           {.size = 14, .bold = true});
  for (size_t i = 0; i < moments.size(); ++i) {
    if (i % 2 == 0) svg.rect(column_at(i), kTop + 6, kColumn, bottom - kTop, kLight);
    const size_t space = std::min(moments[i].name.find(' '), moments[i].name.size());
    svg.text(column_at(i) + 8, 46, moments[i].name.substr(0, space), {.size = 11, .bold = true});
    if (space < moments[i].name.size()) svg.text(column_at(i) + 8, 60, moments[i].name.substr(space + 1), {.size = 11, .bold = true});
  }
  for (int rank = 0; rank < kRanks; ++rank) draw_rank(svg, lines[rank], rank);
  draw_collectives(svg, lines.front());
  double x = 8;
  for (const auto& [category, color, name] : kShown) {
    svg.rect(x, bottom + 8, 10, 10, Svg::color(color));
    svg.text(x + 14, bottom + 17, name, {.size = 11});
    x += category == MemoryCategory::Comm ? 190 : 130;
  }
  svg.text(x, bottom + 17, "lines: collectives, where they begin; P: the model's size", {.size = 11, .color = kGray});
  return svg.str();
}

class ShardingPicture : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, ShardingPicture, ::testing::Values(1, 2, 3));

TEST_P(ShardingPicture, ThePageShowsWhatTheStepDoes) {
  const int stage = GetParam();
  testing_support::expect_picture_in_docs(fmt::format("sharding-stage{}.svg", stage), picture(stage, run_ranks_of(stage)), "sharding.md");
}

TEST_P(ShardingPicture, EveryRankMakesTheSameCollectives) {
  const auto lines = run_ranks_of(GetParam());
  for (const auto& line : lines) {
    ASSERT_EQ(line.records.size(), lines.front().records.size());
    for (size_t i = 0; i < line.records.size(); ++i) EXPECT_EQ(line.records[i].op + line.records[i].site, lines[0].records[i].op + lines[0].records[i].site);
  }
  int64_t sent = 0;
  for (const auto& record : lines.front().records) sent += record.sent_bytes;
  EXPECT_EQ(sent, (GetParam() == 3 ? 3 : 2) * (kRanks - 1) * kModelBytes / kRanks);
}

}  // namespace
}  // namespace tessera
