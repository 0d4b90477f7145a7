#include "tessera/data_parallel/communication_hook.h"

#include <gmock/gmock.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/memory/memory.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// What each rank contributes to a step's gradients: their sum, and the sum of their absolute values, which bounds what rounding can do.
struct Contributions {
  std::vector<at::Tensor> sum, absolute;
};

Contributions contributions(int ranks) {
  Contributions all;
  for (int rank = 0; rank < ranks; ++rank) {
    Net net;
    backward(net, part_of(whole_batch(samples), ranks, rank));
    const auto mine = gradients_of(net);
    for (size_t i = 0; i < mine.size(); ++i) {
      if (rank == 0) {
        all.sum.push_back(mine[i].clone());
        all.absolute.push_back(mine[i].abs());
      } else {
        all.sum[i].add_(mine[i]);
        all.absolute[i].add_(mine[i].abs());
      }
    }
  }
  return all;
}

/// Gradients of one step under `hook`, per rank.
std::vector<std::vector<at::Tensor>> gradients_under(int ranks, const std::function<std::shared_ptr<CommunicationHook>()>& hook, int passes = 1) {
  std::vector<std::vector<at::Tensor>> seen(ranks);
  run_ranks(ranks, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook()});
    const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
    ddp.begin_step();
    for (int pass = 0; pass < passes; ++pass) {
      const Attachment local = pass + 1 < passes ? ddp.no_sync() : Attachment();
      const Batch part = part_of(mine, passes, pass);
      if (part.x.size(0) > 0 || pass + 1 == passes) backward(net, part);
    }
    ddp.finish();
    seen[world.rank()] = gradients_of(net);
  });
  return seen;
}

class Casts : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Casts, ::testing::Values(1, 2, 3, 5, 8));

/// Every element within `rounding` of the sum of absolute values, per rank that rounds; `floor` is what is lost below the smallest number.
void expect_rounded(const std::vector<std::vector<at::Tensor>>& seen, const Contributions& exact, double rounding, double floor) {
  for (size_t rank = 1; rank < seen.size(); ++rank) EXPECT_TRUE(same_bits(seen[rank], seen[0])) << "rank " << rank;
  for (size_t i = 0; i < exact.sum.size(); ++i) {
    const at::Tensor excess = (seen[0][i] - exact.sum[i]).abs() - rounding * exact.absolute[i] - floor;
    EXPECT_LE(excess.max().item<double>(), 0) << "tensor " << i;
  }
}

TEST_P(Casts, Bf16IsWithinItsRounding) {
  const int ranks = GetParam();
  const auto exact = contributions(ranks);
  for (const int passes : {1, 3}) {
    expect_rounded(gradients_under(ranks, [] { return std::make_shared<Bf16Hook>(); }, passes), exact, ranks * 0x1p-8, 1e-6);
  }
}

TEST_P(Casts, Fp16IsWithinItsRounding) {
  const int ranks = GetParam();
  const auto exact = contributions(ranks);
  expect_rounded(gradients_under(ranks, [] { return std::make_shared<Fp16Hook>(); }), exact, ranks * 0x1p-11, ranks * 0x1p-24 * ranks);
}

TEST(CommunicationHook, TheBoundOfBf16SeesAnElementThatIsTwiceAsFarOff) {
  const auto exact = contributions(2);
  const auto seen = gradients_under(2, [] { return std::make_shared<AllReduceHook>(); });
  const at::Tensor off = exact.absolute[0] * (3 * 0x1p-8);
  EXPECT_GT(((seen[0][0] + off - exact.sum[0]).abs() - 2 * 0x1p-8 * exact.absolute[0]).max().item<double>(), 0);
}

/// One parameter whose gradient is whatever the step multiplies it by.
struct Scale : torch::nn::Module {
  explicit Scale(at::ScalarType dtype = at::kFloat) { weight = register_parameter("weight", at::ones({3}, dtype)); }
  at::Tensor weight;
};

TEST(CommunicationHook, TheSumInFp16DoesNotOverflow) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Scale model;
      DistributedDataParallel ddp(model, world.group(), {.hook = std::make_shared<Fp16Hook>()});
      ddp.begin_step();
      (model.weight * 60000.0).sum().backward();
      ddp.finish();
      EXPECT_NEAR(model.weight.grad()[0].item<double>(), 60000.0 * ranks, 60000.0 * ranks * 0x1p-10);
    });
  }
}

TEST(CommunicationHook, AMeanInFp16DoesNotOverflow) {
  const std::vector<std::function<std::shared_ptr<CommunicationHook>()>> hooks{[] { return nullptr; }, [] { return std::make_shared<Fp16Hook>(); },
                                                                               [] { return std::make_shared<PowerSgd>(); }};
  for (const auto& hook : hooks) {
    for (const int ranks : {2, 3}) {
      run_ranks(ranks, [&](World& world) {
        Scale model(at::kHalf);
        DistributedDataParallel ddp(model, world.group(), {.average = true, .hook = hook()});
        (model.weight * 40000.0).sum().backward();
        EXPECT_NEAR(model.weight.grad()[0].item<double>(), 40000.0, 40000.0 * 0x1p-10);
      });
    }
  }
}

TEST(CommunicationHook, SixteenBitGradientsTravelAsTheyAre) {
  run_ranks(2, [&](World& world) {
    Scale model(at::kBFloat16);
    DistributedDataParallel ddp(model, world.group(), {.hook = std::make_shared<Fp16Hook>()});
    ddp.begin_step();
    (model.weight * 1e6).sum().backward();  // beyond fp16
    ddp.finish();
    EXPECT_NEAR(model.weight.grad()[0].item<double>(), 2e6, 2e6 * 0x1p-7);
    EXPECT_EQ(ddp.statistics().bytes, 6);
  });
}

TEST(CommunicationHook, HalfTheBytesCross) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) { return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : inner; };
  run_ranks(2,
            [&](World& world) {
              Net net;
              DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = std::make_shared<Bf16Hook>()});
              run_step(net, ddp, whole_batch(samples));
              if (world.rank() == 0) recorder->clear();
              run_step(net, ddp, whole_batch(samples));
              EXPECT_EQ(ddp.statistics().bytes, ddp.plan().bytes() / 2);
              EXPECT_EQ(ddp.statistics().num_collectives, static_cast<int64_t>(ddp.plan().buckets.size()));
              if (world.rank() != 0) return;
              const auto records = recorder->records();
              ASSERT_EQ(records.size(), ddp.plan().buckets.size());
              for (size_t i = 0; i < records.size(); ++i) {
                EXPECT_EQ(records[i].dtype, at::kBFloat16);
                EXPECT_EQ(records[i].bytes, ddp.plan().buckets[i].bytes() / 2);
                EXPECT_EQ(records[i].site, "ddp.bucket");
              }
            },
            {.decorators = {decorator}});
}

TEST(CommunicationHook, TheCastOfABucketIsHeldInCommMemoryWhileItIsUnderWay) {
  run_ranks(2, [&](World& world) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    SynchronizationStatistics statistics;
    GradientChannel channel(world.group(), statistics);
    GradientBucket bucket{.flat = at::ones({100}), .gradients = {}};
    Bf16Hook hook;
    const auto reduction = hook.start(bucket, channel);
    EXPECT_GE(tracker.current(MemoryCategory::Comm), 200);
    EXPECT_TRUE(reduction->advance());
    EXPECT_LT(tracker.current(MemoryCategory::Comm), 200) << "an engine that lets go late holds no memory";
    EXPECT_TRUE(at::equal(bucket.flat, at::full({100}, 2.0f)));
    EXPECT_EQ(statistics.bytes, 200);
  });
}

/// A user's own: signSGD with majority vote, a byte an element. It is the example of communication_hook.h.
struct SignHook : CommunicationHook {
  struct Vote : BucketReduction {
    Vote(GradientBucket& bucket, GradientChannel& channel) : bucket(bucket), votes(bucket.flat.sign().to(at::kChar)), pending(channel.all_reduce(votes)) {}
    bool advance() override {
      pending.wait();
      bucket.flat.copy_(votes.sign_());
      return true;
    }
    GradientBucket& bucket;
    at::Tensor votes;
    comm::Pending pending;
  };
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override { return std::make_unique<Vote>(bucket, channel); }
};

TEST(CommunicationHook, AUsersOwnHookDecides) {
  constexpr int ranks = 3;
  at::Tensor votes = at::zeros({7});
  for (int rank = 0; rank < ranks; ++rank) {
    Net net;
    backward(net, part_of(whole_batch(samples), ranks, rank));
    votes.add_(net.scale.grad().sign());
  }
  run_ranks(ranks, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = std::make_shared<SignHook>()});
    run_step(net, ddp, part_of(whole_batch(samples), ranks, world.rank()));
    EXPECT_TRUE(at::equal(net.scale.grad(), votes.sign()));
    EXPECT_EQ(4 * ddp.statistics().bytes, ddp.plan().bytes());
  });
}

/// Takes as many rounds as the bucket has gradients, and writes down the order of the calls.
struct RoundsHook : CommunicationHook {
  struct Rounds : BucketReduction {
    Rounds(RoundsHook& hook, GradientBucket& bucket, GradientChannel& channel) : hook(hook), bucket(bucket), channel(channel) { next(); }
    void next() {
      hook.calls.push_back(bucket.gradients[done].name);
      pending = channel.all_reduce(bucket.gradients[done].tensor);
    }
    bool advance() override {
      pending.wait();
      if (++done == bucket.gradients.size()) return true;
      next();
      return false;
    }
    RoundsHook& hook;
    GradientBucket& bucket;
    GradientChannel& channel;
    size_t done = 0;
    comm::Pending pending;
  };
  void begin_step() override { calls.clear(); }
  std::unique_ptr<BucketReduction> start(GradientBucket& bucket, GradientChannel& channel) override { return std::make_unique<Rounds>(*this, bucket, channel); }
  std::vector<std::string> calls;
};

TEST(CommunicationHook, AHookTakesTheRoundsItNeedsInTheSameOrderOnEveryRank) {
  constexpr int ranks = 3;
  std::vector<std::vector<std::string>> calls(ranks);
  const auto expected = one_process(1);
  run_ranks(ranks, [&](World& world) {
    Net net;
    auto hook = std::make_shared<RoundsHook>();
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
    run_step(net, ddp, part_of(whole_batch(samples), ranks, world.rank()));
    calls[world.rank()] = hook->calls;
    EXPECT_LT(largest_difference(gradients_of(net), expected[0]), parity);
    EXPECT_EQ(ddp.statistics().num_collectives, 7);
  });
  EXPECT_EQ(calls[0].size(), 7);
  for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(calls[rank], calls[0]);
}

TEST(CommunicationHook, WithoutOneAndWithThePlainOneTheBitsAreTheSame) {
  const auto plain = gradients_under(3, [] { return nullptr; });
  const auto named = gradients_under(3, [] { return std::make_shared<AllReduceHook>(); });
  EXPECT_TRUE(same_bits(plain[0], named[0]));
}

}  // namespace
}  // namespace tessera
