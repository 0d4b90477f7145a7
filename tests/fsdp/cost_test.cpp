#include <algorithm>
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tests/test_device.h"

/// What stage 3 sends and holds, against the formulas of docs/sharding.md.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// Elements that a rank sends per step, by operation.
std::map<std::string, int64_t> sent_elements(const std::vector<CollectiveEvent>& records) {
  std::map<std::string, int64_t> sent;
  for (const auto& record : records) sent[record.op] += record.sent_bytes / 4;
  return sent;
}

TEST(FullyShard, TrafficIsThreeTimesTheParametersPerMicroBatch) {
  constexpr int ranks = 4, micro_batches = 3;
  for (const bool reshard : {true, false}) {
    run_ranks(ranks, [&](World& world) {
      const auto mine = std::make_shared<comm::Recorder>();
      const comm::Group group({.name = "recorded", .rank = world.rank(), .size = ranks, .timeout = std::chrono::seconds(60)},
                              comm::make_record_engine(mine, {.name = "recorded", .rank = world.rank(), .size = ranks}, world.group().engine()));
      DeepNet net;
      for (auto& parameter : net->parameters()) parameter.set_requires_grad(true);
      auto sharded = fully_shard(net, group, {.wrap = "block*", .reshard_after_forward = reshard});
      int64_t elements = 0;
      for (const ShardUnit& unit : sharded->units()) elements += ranks * unit.local_bytes / 4;
      for (int step = 0; step < 3; ++step) {
        mine->clear();
        sharded->begin_step();
        for (int pass = 0; pass < micro_batches; ++pass) {
          sharded->before_micro_batch({.last = pass + 1 == micro_batches});
          backward_of(net, whole_batch(samples));
          sharded->after_micro_batch({});
        }
        sharded->finish();
        if (step == 0) continue;  // its first pass does not know that the last block is called twice
        const auto sent = sent_elements(mine->records());
        const int64_t once = micro_batches * elements * (ranks - 1) / ranks;
        EXPECT_EQ(sent.at("all_gather"), (reshard ? 2 : 1) * once);
        EXPECT_EQ(sent.at("reduce_scatter"), once);
        EXPECT_EQ(sent.size(), 2u);
      }
    });
  }
}

/// In a program's own loop nobody says that a forward is over; what it gathered waits for its backward all the same, and goes as that leaves it.
TEST(FullyShard, ThePlainLoopKeepsUnitsFromForwardToBackward) {
  constexpr int ranks = 2, units = 6;
  constexpr int64_t unit = (1024 * 64 + 1024) * 4;
  for (const bool reshard : {true, false}) {
    run_ranks(ranks, [&](World& world) {
      MemoryTracker memory;
      const TrackMemory track(memory);
      const auto mine = std::make_shared<comm::Recorder>();
      const comm::Group group({.name = "recorded", .rank = world.rank(), .size = ranks, .timeout = std::chrono::seconds(60)},
                              comm::make_record_engine(mine, {.name = "recorded", .rank = world.rank(), .size = ranks}, world.group().engine()));
      auto net = on_meta([] { return WideNet(); });
      auto sharded = fully_shard(net, group, {.wrap = "layer*", .prefetch = {.units = 0}, .reshard_after_forward = reshard});
      materialize(net, 1);
      const auto gathers = [&] {
        return std::ranges::count_if(mine->records(), [](const CollectiveEvent& record) { return record.op == "all_gather" && record.sent_bytes > 1000; });
      };
      for (int step = 0; step < 3; ++step) {
        for (const at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
        mine->clear();
        const at::Tensor x = at::full({1, 64}, 0.1).requires_grad_(true);
        int64_t held_at_first_layer = 0;
        x.register_hook([&](const at::Tensor&) { held_at_first_layer = memory.current(MemoryCategory::Comm); });
        const at::Tensor loss = net(x).sum();
        EXPECT_EQ(memory.current(MemoryCategory::Comm), reshard ? 0 : units * unit) << step;
        EXPECT_EQ(gathers(), units) << step;
        loss.backward();
        EXPECT_EQ(gathers(), reshard ? 2 * units : units) << step;
        EXPECT_LE(held_at_first_layer, 3 * unit) << step;  // itself, and gradients of two
        EXPECT_EQ(memory.current(MemoryCategory::Comm), 0) << step;
      }
    });
  }
}

TEST(FullyShard, MemoryIsOneShareOfEverythingAndTheUnitsInUse) {
  const int64_t parameters = 6 * (1024 * 64 + 1024), unit = (1024 * 64 + 1024) * 4;
  for (const int ranks : {2, 4, 8}) {
    run_ranks(ranks, [&](World& world) {
      MemoryTracker memory;
      const TrackMemory track(memory);
      auto net = on_meta([] { return WideNet(); });
      auto sharded = fully_shard(net, world.group(), {.wrap = "layer*", .device = testing_support::test_device(), .prefetch = {.units = 0}});
      materialize(net, 1, testing_support::test_device());
      for (int step = 0; step < 2; ++step) {
        memory.reset_peak();
        sharded->begin_step();
        {
          const MemoryScope activations(MemoryCategory::Activations);
          net(at::full({1, 64}, 0.1)).sum().backward();
        }
        sharded->finish();
        const double share = 4.0 * static_cast<double>(parameters) / ranks;
        EXPECT_NEAR(static_cast<double>(memory.current(MemoryCategory::Parameters)), share, 0.01 * share);
        EXPECT_NEAR(static_cast<double>(memory.current(MemoryCategory::Gradients)), share, 0.01 * share);
        EXPECT_EQ(memory.current(MemoryCategory::Comm), 0);
        // At most: a unit, its gradients, those of the one before on their way, and one gradient that autograd has just made.
        EXPECT_LT(static_cast<double>(memory.peak()), 1.01 * (2 * share + 4.0 * static_cast<double>(unit)) + 100000);
        EXPECT_GT(memory.peak(), static_cast<int64_t>(share) + unit);
      }
    });
  }
}

/// Notes, at each call of what it is attached to, how many collectives the rank has begun.
class GatherCount final : public nn::Interceptor {
 public:
  explicit GatherCount(std::shared_ptr<comm::Recorder> recorder) : recorder_(std::move(recorder)) {}
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    begun.push_back(recorder_->records().size());
    return next(std::move(inputs));
  }
  std::vector<size_t> begun;

 private:
  std::shared_ptr<comm::Recorder> recorder_;
};

TEST(FullyShard, PrefetchStopsAtItsLimits) {
  constexpr int64_t unit = (1024 * 64 + 1024) * 4;
  const auto ahead_of = [](PrefetchLimits limits) {
    std::vector<size_t> ahead;
    run_ranks(2, [&](World& world) {
      const auto mine = std::make_shared<comm::Recorder>();
      const comm::Group group({.name = "recorded", .rank = world.rank(), .size = 2, .timeout = std::chrono::seconds(60)},
                              comm::make_record_engine(mine, {.name = "recorded", .rank = world.rank(), .size = 2}, world.group().engine()));
      WideNet net;
      fill_parameters(*net);
      const auto count = std::make_shared<GatherCount>(mine);
      const Attachment inside = nn::attach(*net, "layer*", count);
      auto sharded = fully_shard(net, group, {.wrap = "layer*", .device = testing_support::test_device(), .prefetch = limits});
      for (int step = 0; step < 2; ++step) {
        mine->clear();
        count->begun.clear();
        sharded->begin_step();
        net(at::full({1, 64}, 0.1)).sum().backward();
        sharded->finish();
      }
      if (world.rank() > 0) return;
      for (size_t call = 0; call < 3; ++call) ahead.push_back(count->begun[call] - call - 1);
    });
    return ahead;
  };
  using Ahead = std::vector<size_t>;
  EXPECT_EQ(ahead_of({.units = 0}), (Ahead{0, 0, 0}));
  EXPECT_EQ(ahead_of({.units = 1}), (Ahead{1, 1, 1}));
  EXPECT_EQ(ahead_of({.units = 3}), (Ahead{3, 3, 3}));
  EXPECT_EQ(ahead_of({.units = 3, .bytes = unit - 1}), (Ahead{0, 0, 0}));
  EXPECT_EQ(ahead_of({.units = 3, .bytes = 2 * unit + unit / 2}), (Ahead{2, 2, 2}));
}

TEST(FullyShard, WaitingForAPeerIsExposedTime) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    for (int step = 0; step < 2; ++step) {
      if (step == 1 && world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      sharded->begin_step();
      backward_of(net, whole_batch(samples));
      sharded->finish();
    }
    const SynchronizationStatistics& seen = sharded->statistics();
    if (world.rank() == 0) EXPECT_GT(seen.exposed.seconds(), 0.1);
    EXPECT_GT(seen.num_early, 0);
  });
}

/// Look-up, a layer, and the fused loss that computes its weight's gradient in forward.
struct TinyLanguageModelImpl : nn::Module {
  explicit TinyLanguageModelImpl(bool tied) : embedding(31, 8), layer(8, 8), head(nullptr) {
    register_module("embedding", embedding);
    register_module("layer", layer);
    head = tied ? nn::LanguageModelHead(embedding->weight) : nn::LanguageModelHead(8, 31);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(at::tanh(layer(embedding(ids))), std::optional<at::Tensor>(ids)); }
  nn::Embedding embedding;
  nn::Linear layer;
  nn::LanguageModelHead head;
};
TESSERA_MODULE(TinyLanguageModel);

TEST(FullyShard, GradientsAreComputedWhereTheyAreReduced) {
  const at::Tensor ids = at::arange(12).remainder(7);
  for (const bool tied : {false, true}) {
    TinyLanguageModel whole(tied);
    for (int pass = 0; pass < 2; ++pass) whole(ids).backward();
    const Gradients expected = named_gradients(*whole);
    run_ranks(2, [&](World& world) {
      TinyLanguageModel model(tied);
      auto sharded = fully_shard(model, world.group(), {.wrap = "layer"});
      const auto mine = [&] { return model(ids.narrow(0, 6 * world.rank(), 6)); };
      for (int step = 0; step < 2; ++step) {
        const auto copies = std::make_shared<CopyCount>(31 * 8);
        sharded->begin_step();
        for (int pass = 0; pass < 2; ++pass) {
          sharded->before_micro_batch({.last = pass == 1});
          const at::Tensor loss = mine();
          const nn::OperatorScope counted(copies);
          loss.backward();
          sharded->after_micro_batch({});
        }
        sharded->finish();
        EXPECT_LT(slice_difference(*model, expected), parity) << "tied " << tied;
        if (!tied) EXPECT_EQ(copies->copies, 0);
      }
      // The place is with the first forward, whose backward comes last.
      sharded->begin_step();
      at::Tensor first, second;
      {
        const Attachment held = sharded->no_sync();
        first = mine();
        second = mine();
        second.backward();
      }
      first.backward();
      sharded->finish();
      EXPECT_LT(slice_difference(*model, expected), parity) << "tied " << tied;
      // One whose backward never comes.
      sharded->begin_step();
      const at::Tensor dropped = mine();
      for (int pass = 0; pass < 2; ++pass) {
        const Attachment held = pass == 0 ? sharded->no_sync() : Attachment();
        mine().backward();
      }
      sharded->finish();
      EXPECT_LT(slice_difference(*model, expected), parity) << "tied " << tied;
    });
  }
}

}  // namespace
}  // namespace tessera
