#include "tessera/nn/record_events.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/kernels/attention.h"
#include "tessera/memory/memory.h"

namespace tessera::nn {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_of(const Events& events) {
  std::vector<std::string> names;
  for (const auto& ran : only<OperatorEvent>(events)) names.push_back(ran.name);
  return names;
}

/// The first operator of this name.
size_t place_of(const Events& events, const std::string& name) {
  const auto found = std::ranges::find_if(events, [&](const Event& event) {
    const auto* ran = std::get_if<OperatorEvent>(&event.what);
    return ran != nullptr && ran->name == name;
  });
  return static_cast<size_t>(found - events.begin());
}

class RecordEventsOn : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  MemoryTracker memory_;
  TrackMemory tracking_{memory_};
  EventStream stream_;
};

TEST_P(RecordEventsOn, OperatorsOfForwardAndBackwardWithWhatTheyMove) {
  const auto options = at::device(GetParam());
  const at::Tensor x = at::ones({5, 7}, options), w = at::ones({7, 3}, options).requires_grad_();
  Events events;
  {
    const RecordEvents listening(stream_);
    const at::Tensor y = at::mm(x, w).t();  // which moves nothing
    y.sum().backward();
  }
  events = stream_.take();
  const auto after = dependencies(events);
  const size_t product = place_of(events, "aten::mm"), sum = place_of(events, "aten::sum");
  ASSERT_LT(sum, events.size());
  const auto& mm = std::get<OperatorEvent>(events[product].what);
  EXPECT_EQ(mm.flops, 2 * 5 * 7 * 3);
  EXPECT_EQ(mm.read_bytes, 4 * (5 * 7 + 7 * 3));
  EXPECT_EQ(mm.written_bytes, 4 * 5 * 3);
  EXPECT_THAT(mm.shape, ElementsAre(5, 3));
  EXPECT_THAT(after[sum], ::testing::Contains(static_cast<int64_t>(product))) << "through a view";
  EXPECT_EQ(std::ranges::count(names_of(events), "aten::mm"), 2) << "one of them in backward: x has no gradient";
  EXPECT_EQ(std::ranges::count(names_of(events), "aten::t"), 0);
  for (size_t i = 0; i < events.size(); ++i) {
    for (const int64_t before : after[i]) EXPECT_LT(before, static_cast<int64_t>(i));
  }
}

TEST_P(RecordEventsOn, WhetherAttentionIsCausal) {
  for (const bool causal : {false, true}) {
    const at::Tensor q = at::ones({1, 2, 8, 4}, at::device(GetParam())).requires_grad_();
    {
      const RecordEvents listening(stream_);
      kernels::flash_attention(q, q, q, causal).sum().backward();
    }
    double flops = 0;
    for (const auto& ran : only<OperatorEvent>(stream_.take())) {
      const bool attention = ran.name.find("attention") != std::string::npos;
      EXPECT_EQ(ran.causal, attention && causal) << ran.name;
      flops += ran.flops;
    }
    EXPECT_EQ(flops, 7 * 2.0 * (2 * 8 * 4) * 8) << "two products forward and five backward, of the square either way";
  }
}

TEST_P(RecordEventsOn, MemoryAsTheTrackerCountsIt) {
  const auto options = at::device(GetParam());
  const at::Tensor before = at::ones({11}, options);
  int64_t alive = memory_.current(), most = alive;
  memory_.reset_peak();
  at::Tensor kept;
  {
    const RecordEvents listening(stream_);
    {
      const MemoryScope scope(MemoryCategory::Gradients);
      const at::Tensor gone = at::ones({101}, options);
      kept = gone + 1;
      memory_.retag(kept, MemoryCategory::Optimizer);
    }
    const HostMemory beside;
    const at::Tensor host = at::ones({1001}, options);
  }
  MemoryByCategory by_category{}, host{};
  by_category[static_cast<size_t>(MemoryCategory::Other)] = alive;
  for (const auto& change : only<MemoryChange>(stream_.take())) {
    (change.on_host ? host : by_category)[static_cast<size_t>(change.category)] += change.bytes;
    if (!change.on_host) most = std::max(most, alive += change.bytes);
  }
  EXPECT_EQ(most, memory_.peak());
  EXPECT_EQ(by_category, memory_.current_by_category());
  EXPECT_EQ(host, MemoryByCategory{});
  kept.reset();
  EXPECT_EQ(stream_.count(), stream_.count());
  EXPECT_TRUE(stream_.take().empty()) << "nobody listens any more";
}

INSTANTIATE_TEST_SUITE_P(Devices, RecordEventsOn, ::testing::Values(at::kCPU, at::kMeta), [](const auto& info) { return c10::DeviceTypeName(info.param); });

TEST(RecordEvents, CollectivesAndTheirWaits) {
  comm::run_ranks(3, [](comm::World& world) {
    MemoryTracker memory;
    const TrackMemory tracking(memory);
    EventStream stream;
    at::Tensor sum;
    {
      const RecordEvents listening(stream);
      const at::Tensor gradient = at::ones({4}).mul(2);
      auto pending = comm::all_reduce_async(world.group(), gradient);
      const at::Tensor other = at::ones({9}).mul(3);
      pending.wait();
      sum = gradient.add(1);
    }
    const Events events = stream.take();
    const auto after = dependencies(events);
    int64_t made = -1, started = -1, waited = -1, added = -1;
    for (size_t i = 0; i < events.size(); ++i) {
      const auto number = static_cast<int64_t>(i);
      const auto* ran = std::get_if<OperatorEvent>(&events[i].what);
      if (ran != nullptr && ran->name == "aten::add") added = number;
      if (ran != nullptr && ran->name == "aten::mul" && started < 0) made = number;
      if (std::holds_alternative<CollectiveEvent>(events[i].what)) started = number;
      if (std::holds_alternative<WaitEvent>(events[i].what)) waited = number;
    }
    ASSERT_GE(std::min({made, started, waited, added}), 0);
    const auto has = [&](int64_t event, int64_t before) {
      return std::ranges::find(after[static_cast<size_t>(event)], before) != after[static_cast<size_t>(event)].end();
    };
    EXPECT_TRUE(has(started, made)) << "a collective waits for its input";
    EXPECT_TRUE(has(waited, started));
    EXPECT_TRUE(has(added, waited)) << "who reads the result waits for the wait, and not for the start alone";
    const auto& call = std::get<CollectiveEvent>(events[static_cast<size_t>(started)].what);
    EXPECT_EQ(call.op, "all_reduce");
    EXPECT_EQ(call.bytes, 16);
    EXPECT_EQ(call.group_size, 3);
  });
}

}  // namespace
}  // namespace tessera::nn
