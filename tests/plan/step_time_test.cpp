// How long a step takes: what single operators and collectives cost, what a rank's clock makes of them, and what a pipeline makes of its ranks.

#include "tessera/plan/step_time.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/presets.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using schedules::Kind;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::refusal;

DeviceRates round_device() {
  return {.flops = {{at::kBFloat16, 100e12}},
          .product_share = 0.8,
          .attention_share = 0.5,
          .memory_bandwidth = 1e12,
          .memory_share = 0.8,
          .multiprocessors = 100,
          .kernel_gap = 0,
          .launch = 0,
          .collective_launch = 0};
}

// ---- one operator

TEST(ProductSeconds, LargeOnesReachTheShare) {
  const double ideal = 2.0 * 12800 * 25600 * 8192 / (100e12 * 0.8);
  EXPECT_NEAR(product_seconds(12800, 25600, 8192, 1, 2, 100e12, round_device()), ideal, 0.02 * ideal);
}

TEST(ProductSeconds, AWaveThatIsHardlyBegunTakesAsLongAsAWholeOne) {
  const DeviceRates device = round_device();
  const double whole = product_seconds(1280, 2560, 4096, 1, 2, 100e12, device);  // 10 x 10 tiles on 100 multiprocessors
  const double more = product_seconds(1281, 2560, 4096, 1, 2, 100e12, device);
  EXPECT_GT(more, 1.2 * whole);
  EXPECT_LT(more, 2.01 * whole);
}

TEST(ProductSeconds, ThinOnesTakeAsLongAsTheirWeightTakesToCross) {
  EXPECT_NEAR(product_seconds(1, 16384, 16384, 1, 2, 100e12, round_device()), 2.0 * 16384 * 16384 / 0.8e12, 1e-6);
}

TEST(ProductSeconds, CuttingALayerEightTimesMakesItLessThanEightTimesFaster) {
  const DeviceRates device = round_device();
  EXPECT_GT(8 * product_seconds(2048, 11008 / 8, 4096, 1, 2, 100e12, device), 1.1 * product_seconds(2048, 11008, 4096, 1, 2, 100e12, device));
}

TEST(OperatorSeconds, WhatIsNoProductTakesAsLongAsItsBytes) {
  const DeviceRates device = round_device();
  EXPECT_DOUBLE_EQ(operator_seconds({.name = "aten::add", .shape = {1000, 1000}, .dtype = at::kFloat, .read_bytes = 8000000, .written_bytes = 4000000}, device),
                   12e6 / 0.8e12);
  EXPECT_DOUBLE_EQ(operator_seconds({.name = "aten::copy_", .shape = {1000}, .dtype = at::kFloat, .read_bytes = 8000, .written_bytes = 4000}, device),
                   8000 / 0.8e12);
  EXPECT_EQ(operator_seconds({.name = "aten::_unsafe_view", .shape = {1000}, .dtype = at::kFloat, .read_bytes = 4000, .written_bytes = 4000}, device), 0);
}

TEST(OperatorSeconds, CausalAttentionDoesHalfOfWhatIsCounted) {
  OperatorEvent attention{.name = "aten::_scaled_dot_product_flash_attention_for_cpu", .shape = {1, 32, 8192, 128}, .dtype = at::kBFloat16, .flops = 1e12};
  EXPECT_DOUBLE_EQ(operator_seconds(attention, round_device()), 1e12 / (100e12 * 0.5)) << "of a whole rectangle";
  attention.causal = true;
  EXPECT_DOUBLE_EQ(operator_seconds(attention, round_device()), 0.5e12 / (100e12 * 0.5));
}

TEST(OperatorSeconds, GroupsReadTheMatrixOfEach) {
  constexpr int64_t rows = 64, width = 4096, groups = 8;
  OperatorEvent product{.name = "tessera::grouped_product", .shape = {rows, width}, .dtype = at::kBFloat16, .flops = 2.0 * rows * width * width};
  product.read_bytes = 2 * (rows * width + groups * width * width), product.written_bytes = 2 * rows * width;
  EXPECT_DOUBLE_EQ(operator_seconds(product, round_device()), static_cast<double>(product.read_bytes + product.written_bytes) / 0.8e12);
}

TEST(OperatorSeconds, ATypeWithoutARateIsRefusedByName) {
  const OperatorEvent product{.name = "aten::mm", .shape = {64, 64}, .dtype = at::kFloat, .flops = 1e6};
  EXPECT_THAT(refusal([&] { operator_seconds(product, round_device()); }),
              AllOf(HasSubstr("multiplies in fp32"), HasSubstr("set precision.compute to one of those"), HasSubstr("tflops.fp32")));
}

TEST(OperatorSeconds, ProductsOfFp8AreTimedByTheirOperandsType) {
  DeviceRates device = round_device();
  const OperatorEvent product{.name = "aten::_scaled_mm", .shape = {12800, 25600}, .dtype = at::kBFloat16, .flops = 2.0 * 12800 * 25600 * 8192};
  EXPECT_THAT(refusal([&] { operator_seconds(product, device); }), HasSubstr("multiplies in fp8"));
  device.flops[at::kFloat8_e4m3fn] = 200e12;
  EXPECT_DOUBLE_EQ(operator_seconds(product, device), product_seconds(12800, 25600, 8192, 1, 1, 200e12, device));
  OperatorEvent thin{.name = "aten::_scaled_mm", .shape = {16, 16384}, .dtype = at::kBFloat16, .flops = 2.0 * 16 * 16384 * 64};
  thin.written_bytes = 2 * 16 * 16384, thin.read_bytes = 64 * (16 + 16384);
  EXPECT_GE(operator_seconds(thin, device), static_cast<double>(thin.written_bytes + thin.read_bytes) / 0.8e12);
}

// ---- one collective

TEST(CollectiveSeconds, AllReducesOfOneHostAreWithinAFifthOfThoseMeasured) {
  // nccl-tests on A100 SXM, of vTrain's repository (VIA-Research/vTrain, trace/a100): devices, MiB, microseconds.
  struct Row {
    int devices;
    int64_t mib;
    double microseconds;
  };
  const std::vector<Row> rows = {{2, 64, 404.7},    {2, 256, 1455.8}, {2, 1024, 5442.8}, {4, 16, 179.6}, {4, 64, 543.8},   {4, 256, 1929.0},
                                 {4, 1024, 7259.4}, {8, 1, 92.8},     {8, 16, 232.4},    {8, 64, 579.9}, {8, 256, 2162.3}, {8, 1024, 8193.0}};
  const Machine a100 = machine_of(find_device("a100-80gb"));
  for (const Row& row : rows) {
    const int64_t bytes = row.mib << 20;
    const CollectiveEvent call{.op = "all_reduce", .group_size = row.devices, .bytes = bytes, .sent_bytes = 2 * bytes * (row.devices - 1) / row.devices};
    const double seconds = collective_cost(call, {.ranks = row.devices, .hosts = 1, .per_host = row.devices}, a100).seconds();
    const double bound = row.mib >= 256 ? 0.06 : 0.2;
    EXPECT_NEAR(seconds * 1e6, row.microseconds, bound * row.microseconds) << row.devices << " devices, " << row.mib << " MiB";
  }
}

TEST(CollectiveSeconds, AcrossHostsTheirLinksDecide) {
  const Machine machine{.devices_per_host = 4, .inside = {.bandwidth = 100e9, .latency = 0}, .across = {.bandwidth = 10e9, .latency = 0}};
  const CollectiveEvent call{.op = "all_gather", .bytes = 8000000, .sent_bytes = 7000000};
  const auto seconds = [&](const std::vector<int>& ranks) { return collective_cost(call, placement_of(ranks, 4), machine).seconds(); };
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3}), 7e6 / 100e9);
  EXPECT_DOUBLE_EQ(seconds({0, 4, 8, 12}), 7e6 / 10e9);             // one link a host
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3, 4, 5, 6, 7}), 7e6 / 40e9);  // four
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3, 4}), 7e6 / 10e9) << "the ring passes the second host, which has one link";
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3, 4, 5, 8, 9}), 7e6 / 20e9);
  EXPECT_EQ(seconds({5}), 0);
}

TEST(CollectiveSeconds, WhatIsForOtherHostsGoesOverEachRanksOwnLink) {
  const Machine machine{.devices_per_host = 4, .inside = {.bandwidth = 100e9, .latency = 0}, .across = {.bandwidth = 10e9, .latency = 0}};
  const CollectiveEvent call{.op = "all_to_all", .bytes = 8000000, .sent_bytes = 7000000};
  const auto seconds = [&](const std::vector<int>& ranks) { return collective_cost(call, placement_of(ranks, 4), machine).seconds(); };
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3}), 7e6 / 100e9);
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3, 4, 5, 6, 7}), 4e6 / 10e9) << "four of the seven others are elsewhere";
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3, 4, 5, 6}), 7e6 * 4 / 6 / 10e9) << "and of the three ranks of the second host, four of six";
  EXPECT_DOUBLE_EQ(seconds({0, 4, 8, 12}), 7e6 / 10e9);
}

TEST(CollectiveSeconds, ARingAcrossHostsTakesAHopARankAndSlowsDownWithThem) {
  Machine machine{.devices_per_host = 2, .inside = {.bandwidth = 100e9, .latency = 0, .hop = 1e-6}, .across = {.bandwidth = 10e9, .latency = 0, .hop = 10e-6}};
  const CollectiveEvent call{.op = "reduce_scatter", .bytes = 8000000, .sent_bytes = 8000000};
  const auto seconds = [&](int ranks) { return collective_cost(call, {.ranks = ranks, .hosts = ranks / 2, .per_host = 2, .fewest = 2}, machine).seconds(); };
  EXPECT_DOUBLE_EQ(seconds(8), 3 * 10e-6 + 4 * 1e-6 + 8e6 / 20e9);
  machine.across.contention = 0.5;
  EXPECT_DOUBLE_EQ(seconds(8), 3 * 10e-6 + 4 * 1e-6 + 2 * 8e6 / 20e9);
  EXPECT_DOUBLE_EQ(seconds(4), 10e-6 + 2 * 1e-6 + 8e6 / 20e9);
}

// ---- one rank

class Clock : public testing::Test {
 protected:
  Clock() {
    machine.device = round_device();
    machine.device.memory_bandwidth = 1;
    machine.device.memory_share = 1;
    machine.inside = machine.across = {.bandwidth = 1, .latency = 0};
    machine.device.host_link = 2;
    machine.device.host_memory = 4;
  }

  RankTime time_of(const Events& events, std::vector<std::string> channels = {}, bool updates_later = false) {
    const auto place = [](const std::string& group) { return Placement{.ranks = 2, .hosts = group.starts_with("far") ? 2 : 1, .per_host = 1}; };
    RankClock clock(machine, place, std::move(channels), updates_later);
    for (const Event& event : events) clock.read(event);
    return clock.time();
  }
  static Event operators(int64_t seconds) { return {.what = OperatorEvent{.name = "aten::add", .shape = {1}, .dtype = at::kFloat, .written_bytes = seconds}}; }
  static Event uses(int64_t storage, int64_t seconds) {
    Event event = operators(seconds);
    event.reads = {storage};
    return event;
  }
  static Event copies(int64_t from, int64_t to, int64_t bytes, bool out) {
    OperatorEvent ran{
        .name = "aten::copy_", .shape = {1}, .dtype = at::kFloat, .read_bytes = 2 * bytes, .written_bytes = bytes, .crosses = true, .on_host = out};
    return {.what = std::move(ran), .reads = {to, from}, .writes = {to}};
  }
  static Event updates(int64_t gradient, int64_t copy, int64_t bytes) {
    OperatorEvent ran{.name = "aten::_fused_adamw_", .shape = {1}, .dtype = at::kFloat, .read_bytes = bytes, .on_host = true};
    return {.what = std::move(ran), .reads = {copy, gradient}, .writes = {copy}};
  }
  static Event starts(int64_t flight, int64_t seconds, const std::string& group = "dp", const std::string& op = "all_gather") {
    return {.what = CollectiveEvent{.op = op, .group = group, .bytes = seconds, .sent_bytes = seconds}, .writes = {flight}};
  }
  static Event waits(int64_t flight) { return {.what = WaitEvent{}, .reads = {flight}}; }
  static Event action(const std::string& name, bool begins) { return {.what = ActionEvent{.action = name, .begins = begins}}; }

  Machine machine;
};

TEST_F(Clock, ACollectiveHidesBehindOperators) {
  const RankTime time = time_of({operators(2), starts(-1, 5), operators(4), waits(-1), operators(1)});
  EXPECT_DOUBLE_EQ(time.step, 2 + 5 + 1);
  EXPECT_DOUBLE_EQ(time.exposed, 1);
  EXPECT_DOUBLE_EQ(time.computing, 7);
  EXPECT_DOUBLE_EQ(time.collectives, 5);
}

TEST_F(Clock, ItStartsWhenWhatItReadsIsComputed) { EXPECT_DOUBLE_EQ(time_of({operators(3), starts(-1, 1), waits(-1)}).step, 4); }

TEST_F(Clock, CollectivesOfAGroupFollowEachOtherAndThoseOfTwoDoNot) {
  EXPECT_DOUBLE_EQ(time_of({starts(-1, 5), starts(-2, 5), waits(-1), waits(-2)}).step, 10);
  EXPECT_DOUBLE_EQ(time_of({starts(-1, 5), starts(-2, 5, "far"), waits(-1), waits(-2)}).step, 5) << "over other links";
}

/// As in a ring of three and more; two ranks have one communicator, whose messages follow each other.
TEST_F(Clock, WhatGoesToOneRankAndComesFromAnotherWaitsForNeither) {
  const auto message = [](int64_t flight, const std::string& op, int peer, const std::string& group = "cp") {
    Event event = starts(flight, 5, group, op);
    std::get<CollectiveEvent>(event.what).peer = peer;
    return event;
  };
  EXPECT_DOUBLE_EQ(time_of({message(-1, "send", 1), message(-2, "recv", 2), waits(-1), waits(-2)}).step, 5);
  EXPECT_DOUBLE_EQ(time_of({message(-1, "recv", 2), message(-2, "send", 1), waits(-2)}).exposed, 5);
  EXPECT_DOUBLE_EQ(time_of({message(-1, "send", 1), message(-2, "recv", 1), waits(-1), waits(-2)}).step, 10);
  EXPECT_DOUBLE_EQ(time_of({message(-1, "send", 1), message(-2, "send", 2), waits(-1)}).exposed, 10) << "over one link";
  EXPECT_DOUBLE_EQ(time_of({message(-1, "send", 1), message(-2, "recv", 1, "other"), waits(-1), waits(-2)}).step, 5);
  for (const bool first : {true, false}) {
    Events events{message(-1, "send", 1), message(-2, "recv", 2)};
    events.insert(first ? events.begin() : events.end(), starts(-3, 5));
    EXPECT_DOUBLE_EQ(time_of(events).step, 10) << "of a collective each way is shared with one of them";
  }
}

TEST_F(Clock, GroupsShareTheLinksThatBothCross) {
  for (const std::string far : {"", "far "}) {
    const auto both = [&](const Events& rest) {
      Events events{starts(-1, 10, far + "dp"), starts(-2, 4, far + "tp")};
      events.insert(events.end(), rest.begin(), rest.end());
      return time_of(events);
    };
    EXPECT_DOUBLE_EQ(both({waits(-2)}).exposed, 8) << "half of the link for as long as it sends";
    EXPECT_DOUBLE_EQ(both({waits(-1)}).exposed, 14) << "and what the other has sent meanwhile is missing here";
    EXPECT_DOUBLE_EQ(both({}).step, 14) << "no byte is sent twice, or by nobody";
    EXPECT_DOUBLE_EQ(both({waits(-2), starts(-3, 1, far + "tp"), waits(-3)}).exposed, 10);
    EXPECT_DOUBLE_EQ(time_of({starts(-1, 2, far + "dp"), starts(-2, 4, far + "tp"), waits(-2)}).exposed, 6) << "the shorter one is through first";
    EXPECT_DOUBLE_EQ(time_of({starts(-1, 2, far + "dp"), operators(3), starts(-2, 4, far + "tp"), waits(-2)}).step, 7) << "one after the other shares nothing";
    EXPECT_DOUBLE_EQ(time_of({starts(-1, 5, far + "dp"), starts(-2, 5, far + "dp"), starts(-3, 2, far + "tp"), waits(-1)}).exposed, 7) << "the first in line";
  }
  machine.across.latency = 3;
  EXPECT_DOUBLE_EQ(time_of({starts(-1, 10, "far dp"), starts(-2, 4, "far tp"), waits(-2)}).exposed, 3 + 8) << "a latency fills no link";
}

TEST_F(Clock, AttentionOfOneShapeTakesLongerWhereItIsNotCausal) {
  OperatorEvent attention{.name = "aten::_scaled_dot_product_flash_attention_for_cpu", .shape = {1, 1, 64, 64}, .dtype = at::kBFloat16, .flops = 100e12};
  const Event whole{.what = attention};
  attention.causal = true;
  const Event triangle{.what = attention};
  EXPECT_DOUBLE_EQ(time_of({triangle, whole, triangle, whole}).step, 1 + 2 + 1 + 2);
}

TEST_F(Clock, WhatNobodyWaitsForEndsTheStepAllTheSame) { EXPECT_DOUBLE_EQ(time_of({starts(-1, 5), operators(1)}).step, 5); }

TEST_F(Clock, AHostThatIsSlowerThanItsDeviceDecides) {
  machine.device.launch = 3;
  const RankTime time = time_of({operators(1), operators(1), operators(1)});
  EXPECT_DOUBLE_EQ(time.step, 3 * 3 + 1);
  EXPECT_DOUBLE_EQ(time.asked, 3 + 2 + 2);
}

TEST_F(Clock, AHostThatReadsWaitsForTheDevice) {
  machine.device.launch = 1;
  EXPECT_DOUBLE_EQ(time_of({operators(10), {.what = HostReadEvent{.bytes = 4}}, operators(1)}).step, 1 + 10 + 1 + 1);
  EXPECT_DOUBLE_EQ(time_of({operators(10), operators(1)}).step, 1 + 10 + 1);
}

TEST_F(Clock, ACopyHidesBehindOperators) {
  const RankTime time = time_of({copies(1, 2, 8, /*out=*/false), operators(3), uses(2, 1)});
  EXPECT_DOUBLE_EQ(time.step, 8 / 2 + 1);
  EXPECT_DOUBLE_EQ(time.copied, 1);
  EXPECT_DOUBLE_EQ(time.computing, 4);
  EXPECT_DOUBLE_EQ(time_of({copies(1, 2, 8, false), operators(3), uses(3, 1)}).step, 4) << "nobody waits for it, and the step does";
  EXPECT_DOUBLE_EQ(time_of({operators(3), copies(2, 1, 8, true), operators(2)}).step, 3 + 8 / 2) << "what it takes out is made first";
  EXPECT_DOUBLE_EQ(time_of({copies(1, 2, 8, false), starts(-1, 5), waits(-1)}).step, 5);
}

TEST_F(Clock, CopiesOfOneWayFollowEachOther) {
  EXPECT_DOUBLE_EQ(time_of({copies(1, 2, 8, false), copies(3, 4, 8, false)}).step, 8);
  EXPECT_DOUBLE_EQ(time_of({copies(1, 2, 8, false), copies(4, 3, 8, true)}).step, 4);
}

TEST_F(Clock, WhoOverwritesWhatIsCopiedWaits) {
  Event writes = operators(1);
  writes.writes = {2};
  EXPECT_DOUBLE_EQ(time_of({copies(2, 1, 8, true), writes}).step, 4 + 1);
  const Event anew{.what = MemoryChange{.category = MemoryCategory::Activations, .bytes = 8}, .writes = {2}};
  EXPECT_DOUBLE_EQ(time_of({copies(2, 1, 8, true), anew, writes}).step, 4) << "other memory, which has the number by now";
}

// A gradient goes out, the host's cores read and write its state, and the parameter comes back.
TEST_F(Clock, TheHostUpdatesAtTheRateOfItsMemory) {
  const Events step{operators(3), copies(1, 2, 8, true), updates(2, 3, 20), copies(3, 4, 8, false)};
  const RankTime time = time_of(step);
  EXPECT_DOUBLE_EQ(time.step, 3 + 8 / 2 + 20 / 4 + 8 / 2);
  EXPECT_DOUBLE_EQ(time.asked, 8 / 2 + 20 / 4);
  EXPECT_DOUBLE_EQ(time.copied, 8 / 2);
  EXPECT_DOUBLE_EQ(time.computing + time.asked + time.copied, time.step);
}

TEST_F(Clock, ADelayedUpdateRunsBesideTheStep) {
  const auto step = [&](int64_t bytes) {
    return time_of({copies(3, 4, 8, false), operators(3), copies(1, 2, 8, true), updates(2, 3, bytes)}, {}, /*updates_later=*/true).step;
  };
  EXPECT_DOUBLE_EQ(step(20), 3 + 8 / 2);
  EXPECT_DOUBLE_EQ(step(40), 40 / 4) << "the next one waits for it";
}

TEST_F(Clock, ActionsAreTimedEachByItself) {
  const RankTime time = time_of({operators(1), action("2F0", true), starts(-1, 100, "pp", "send"), operators(3), action("2F0", false), action("2F1", true),
                                 operators(5), action("2F1", false), action("2B0", true), operators(8), action("2B0", false), operators(2)},
                                {"pp"});
  EXPECT_DOUBLE_EQ(time.actions.at({Kind::Forward, 2}).mean(), 4);
  EXPECT_DOUBLE_EQ(time.actions.at({Kind::Backward, 2}).mean(), 8);
  EXPECT_DOUBLE_EQ(time.before, 1);
  EXPECT_DOUBLE_EQ(time.after, 2);
  EXPECT_DOUBLE_EQ(time.message, 100);
  EXPECT_DOUBLE_EQ(time.step, 1 + 3 + 5 + 8 + 2);  // without the message
}

// ---- a step

class StepSeconds : public testing_support::TrainFixture {};

RankTime stage_time(int stage, double forward, double backward) {
  RankTime time{.step = 4 * (forward + backward) + 1, .before = 0.25, .after = 0.75};
  time.actions[{Kind::Forward, stage}] = {.seconds = 4 * forward, .count = 4};
  time.actions[{Kind::Backward, stage}] = {.seconds = 4 * backward, .count = 4};
  return time;
}

TEST_F(StepSeconds, APipelineTakesItsBubbleAndWhatStandsAroundIt) {
  const RankTime first = stage_time(0, 1, 2), second = stage_time(1, 1, 2);
  const StepTime step = step_time({{.pipeline_rank = 0, .time = &first}, {.pipeline_rank = 1, .time = &second}}, schedules::one_f_one_b(2, 4));
  EXPECT_DOUBLE_EQ(step.seconds, 0.25 + (4 + 2 - 1) * 3 + 0.75);  // (m + p - 1)(F + B)
  EXPECT_DOUBLE_EQ(step.bubble, 3);
}

/// Those in the midst of a step hold their stage up, as its passes do.
TEST_F(StepSeconds, UpdatesInTheMidstOfAStepTakeTheirTime) {
  RankTime first = stage_time(0, 1, 2), second = stage_time(1, 1, 2);
  for (auto* time : {&first, &second}) {
    time->actions[{Kind::Update, time == &first ? 0 : 1}] = {.seconds = 4 * 0.5, .count = 4};
    time->step += 4 * 0.5;
  }
  const StepTime step = step_time({{.pipeline_rank = 0, .time = &first}, {.pipeline_rank = 1, .time = &second}}, schedules::pipedream(2, 4));
  EXPECT_DOUBLE_EQ(step.seconds, 0.25 + 1 + 4 * 3.5 + 2 + 0.75);
  EXPECT_DOUBLE_EQ(step.bubble, step.seconds - first.step);
  for (const std::string schedule : {"pipedream", "pipedream_2bw"}) {
    const Config config = this->config("llama", {"mesh.pp=2", "pipeline.schedule=" + schedule, "optim.max_grad_norm=0", "batch.global_size=8"});
    const DryRun run = dry_run(config, 2, {.machine = machine_of(find_device("h100"))});
    const StepTime& time = *run.time;
    EXPECT_NEAR(time.computing + time.exposed + time.asked + time.copied + time.bubble, time.seconds, 1e-9 * time.seconds) << schedule;
  }
}

TEST_F(StepSeconds, TheSlowestStageAndTheSlowestClassDecide) {
  const RankTime first = stage_time(0, 1, 2), quick = stage_time(1, 1, 2), slow = stage_time(1, 2, 4);
  const StepTime step = step_time({{.pipeline_rank = 0, .time = &first}, {.pipeline_rank = 1, .time = &slow}, {.pipeline_rank = 1, .time = &quick}},
                                  schedules::one_f_one_b(2, 4));
  EXPECT_DOUBLE_EQ(step.seconds, 0.25 + 1 + 4 * 6 + 2 + 0.75);
}

TEST_F(StepSeconds, OfTheVeryStep) {
  const MetaAsAccelerator device;
  const kernels::Bf16ProductsGuard multiplies(/*native=*/true);  // whatever this machine's processor has
  Machine machine = machine_of(find_device("h100"));
  machine.device.launch = machine.device.collective_launch = machine.device.kernel_gap = 0;
  const auto timed = [&](int world, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"model.layers=2", "data.seq_len=1024", "batch.global_size=8"});
    Config config = preset("7b", sets)->config;
    resolve(config);
    return dry_run(config, world, {.machine = machine}).time.value();
  };
  const StepTime alone = timed(1, {});
  EXPECT_GT(alone.mfu, 0.2);
  EXPECT_LT(alone.mfu, machine.device.product_share);
  EXPECT_EQ(alone.exposed, 0);
  EXPECT_EQ(alone.bubble, 0);
  const StepTime two = timed(2, {});
  EXPECT_LT(two.seconds, alone.seconds);
  EXPECT_GT(two.seconds, alone.seconds / 2);
  const StepTime cut = timed(2, {"mesh.tp=2"});
  EXPECT_GT(cut.exposed, 0);
  const StepTime piped = timed(2, {"mesh.pp=2"});
  EXPECT_GT(piped.bubble, 0);
  EXPECT_LT(piped.seconds, alone.seconds);
}

/// Of a sequence that is cut a rank computes triangles, and squares and rectangles that it sees whole: all ranks together what one would.
TEST_F(StepSeconds, CausalWorkOfASequenceIsTheSameHoweverItIsCut) {
  const auto work_of = [&](int ranks, const std::string& method) {
    const Config cut = config("llama", {"mesh.cp=" + std::to_string(ranks), "context.method=" + method, "context.balance=head_tail", "batch.global_size=2"});
    double work = 0;
    for (const RankClass& each : dry_run(cut, ranks, {.events = true}).ranks) {
      for (const auto& ran : only<OperatorEvent>(each.events)) {
        const bool attention = ran.name.find("attention") != std::string::npos;
        if (attention) work += static_cast<double>(each.count) * ran.flops / (ran.causal ? 2 : 1);
      }
    }
    return work;
  };
  const double alone = work_of(1, "ring");
  EXPECT_GT(alone, 0);
  for (const int ranks : {2, 4}) {
    for (const std::string method : {"ring", "all_gather", "ulysses"}) EXPECT_DOUBLE_EQ(work_of(ranks, method), alone) << method << " " << ranks;
  }
}

TEST_F(StepSeconds, OfAnUpdateOnTheHost) {
  Machine machine = machine_of(find_device("h100"));
  machine.device.launch = machine.device.kernel_gap = 0;
  const auto plan_of = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), {"model.layers=2", "data.seq_len=1024", "batch.global_size=1"});
    Config config = preset("7b", sets)->config;
    resolve(config);
    return dry_run(config, 1, {.machine = machine});
  };
  const DryRun device = plan_of({}), host = plan_of({"offload.optimizer=host"});
  const auto parameters = static_cast<double>(device.parameters);
  const double there = 28 * parameters / (machine.device.memory_bandwidth * machine.device.memory_share);  // both moments, weight and gradient
  const double update = 28 * parameters / machine.device.host_memory, copy = 4 * parameters / machine.device.host_link;
  const double more = host.time->seconds - device.time->seconds + there;
  EXPECT_GT(more, update);
  EXPECT_LT(more, 1.01 * (update + 2 * copy)) << "of which some is hidden";
  EXPECT_GT(host.time->copied, 0);
  EXPECT_NEAR(host.time->computing + host.time->asked + host.time->copied, host.time->seconds, 1e-6 * host.time->seconds);
  EXPECT_EQ(device.time->copied, 0);
}

// ---- what devices reach

TEST(Machines, AreWhatTheMakerSaysAndWhatIsReachedOfIt) {
  const Machine h100 = machine_of(find_device("h100"));
  EXPECT_EQ(h100.device.flops.at(at::kBFloat16), 989.4e12);
  EXPECT_EQ(h100.device.multiprocessors, 132);
  EXPECT_DOUBLE_EQ(h100.inside.bandwidth, 0.8 * 450e9);
  EXPECT_DOUBLE_EQ(h100.inside.latency, 7e-6);
  EXPECT_DOUBLE_EQ(h100.across.bandwidth, 0.9 * 50e9);
  EXPECT_DOUBLE_EQ(h100.device.host_link, 0.8 * 63e9);
  EXPECT_DOUBLE_EQ(h100.device.host_memory, 0.8 * 614.4e9 / 8) << "which eight devices share";
  for (const auto& name : device_names()) {
    const Machine machine = machine_of(find_device(name));
    EXPECT_GT(machine.inside.bandwidth, 0) << name;
    EXPECT_GT(machine.across.bandwidth, 0) << name;
    EXPECT_LT(machine.across.bandwidth, machine.device.memory_bandwidth) << name;
    EXPECT_GE(machine.devices_per_host, 1) << name;
    EXPECT_GT(machine.device.host_link, 10e9) << name;
    EXPECT_GT(machine.device.host_memory, 10e9) << name;
    EXPECT_LT(machine.device.host_link, machine.device.memory_bandwidth) << name;
  }
}

TEST(Machines, AUsersFileMayLeaveItOutOrSayIt) {
  const std::string plain = "name = \"mine\"\nmemory_gb = 10\nmemory_gb_per_s = 100\ndevices_per_node = 2\n[tflops]\nfp32 = 1\n";
  EXPECT_DOUBLE_EQ(machine_of(parse_device(plain, "mine.toml")).device.product_share, DeviceRates().product_share);
  const Machine said = machine_of(parse_device(plain + "[reaches]\nproducts = 0.5\nlaunch_us = 3\n", "mine.toml"));
  EXPECT_DOUBLE_EQ(said.device.product_share, 0.5);
  EXPECT_DOUBLE_EQ(said.device.launch, 3e-6);
  const auto refused = [&](const std::string& table) { return refusal([&] { parse_device(plain + "[reaches]\n" + table, "mine.toml"); }); };
  EXPECT_THAT(refused("products = 1.5"), AllOf(HasSubstr("mine.toml: reaches.products"), HasSubstr("at most 1")));
  EXPECT_THAT(refused("product = 0.5"), AllOf(HasSubstr("reaches.product is unknown"), HasSubstr("did you mean products?")));
}

}  // namespace
}  // namespace tessera::plan
