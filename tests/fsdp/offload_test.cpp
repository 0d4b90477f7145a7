// Slices on the host, on disk, or some here and some there: the same bits as slices on the device, and bytes where the formulas put them.

#include <gmock/gmock.h>

#include "memory_file.h"
#include "support.h"
#include "tessera/memory/history.h"
#include "tessera/memory/memory.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// Gradients and weights of a few steps of three micro-batches, one of which is accumulated alone.
std::vector<Gradients> trained(World& world, const comm::Group& shard, const FullyShardOptions& options) {
  std::vector<Gradients> seen;
  DeepNet net;
  auto sharded = fully_shard(net, shard, options);
  const at::ScalarType dtype = options.param_dtype.value_or(at::kFloat);
  for (int step = 0; step < 3; ++step) {
    const Batch mine = part_of(whole_batch(samples, step), world.size(), world.rank());
    sharded->begin_step();
    const int passes = step == 1 ? 1 : 3;
    for (int pass = 0; pass < passes; ++pass) {
      sharded->before_micro_batch({.last = pass + 1 == passes});
      const Batch micro = part_of(mine, passes, pass);
      backward_of(net, {micro.x.to(dtype), micro.y.to(dtype)});
      sharded->after_micro_batch({});
    }
    sharded->finish();
    seen.push_back(named_gradients(*net));
    sgd(*net, 0.05);
    seen.push_back(named_values(*net));
    const at::NoGradGuard no_grad;
    seen.push_back({{"evaluated", net(whole_batch(samples).x.to(dtype)).clone()}});
  }
  return seen;
}

void expect_same_bits(const std::vector<Gradients>& got, const std::vector<Gradients>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    for (const auto& [name, tensor] : want[i]) {
      const at::Tensor& mine = got[i].at(name);
      ASSERT_EQ(mine.defined(), tensor.defined()) << name;
      if (!tensor.defined()) continue;
      EXPECT_EQ(mine.scalar_type(), tensor.scalar_type()) << name;
      EXPECT_TRUE(at::equal(mine, tensor)) << name << ", record " << i;
    }
  }
}

void expect_offload_changes_nothing(World& world, const comm::Group& shard, FullyShardOptions options) {
  const auto plain = trained(world, shard, options);
  options.offload = Offload::Host;
  expect_same_bits(trained(world, shard, options), plain);
  const auto file = std::make_shared<MemoryFile>();
  options.file = file;
  options.offload = Offload::Disk;
  expect_same_bits(trained(world, shard, options), plain);
  EXPECT_GT(file->begun, 0);
  EXPECT_EQ(file->coming, 0) << "what was read is used, or given up";
  if (options.wrap.empty()) return;
  options.place = [](const nn::NamedParameter& parameter) {
    return parameter.name.starts_with("block0") ? Offload::Host : parameter.name.starts_with("block") ? Offload::Disk : Offload::None;
  };
  expect_same_bits(trained(world, shard, options), plain);
}

class OffloadOver : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(FullyShard, OffloadOver, ::testing::Values(1, 3, 5));

TEST_P(OffloadOver, IsBitForBit) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    const auto same = [&](FullyShardOptions options) { expect_offload_changes_nothing(world, world.group(), std::move(options)); };
    same({.wrap = "block*"});
    same({});
    same({.wrap = "**", .prefetch = {.units = 0}});
    same({.wrap = "block*", .prefetch = {.units = 3, .bytes = 700}, .reshard_after_forward = false});
    same({.wrap = "block*", .reduce_each_micro_batch = false, .average = true});
    same({.wrap = "block*", .find_unused_parameters = true});
    if (ranks > 1) {  // one rank alone, without offload, watches nothing and casts nothing
      same({.wrap = "block*", .trigger = ShardTrigger::Operators});
      same({.wrap = "block*", .param_dtype = at::kDouble, .reduce_dtype = at::kDouble});
      same({.wrap = "block*", .param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
      same({.wrap = "block*", .reduce_dtype = at::kBFloat16, .gradient_dtype = at::kBFloat16});
    }
  });
}

TEST(FullyShard, OffloadUnderReplicasIsBitForBit) {
  run_ranks(6, [&](World& world) {
    const int first = world.rank() / 3 * 3;
    const comm::Group shard = world.subgroup({first, first + 1, first + 2}, "dp_shard" + std::to_string(first));
    const comm::Group replicate = world.subgroup({world.rank() % 3, world.rank() % 3 + 3}, "dp_replicate" + std::to_string(world.rank() % 3));
    for (const bool each : {true, false}) {
      expect_offload_changes_nothing(world, shard, {.wrap = "block*", .reduce_each_micro_batch = each, .replicate = replicate});
      expect_offload_changes_nothing(world, shard, {.reduce_each_micro_batch = each, .reduce_dtype = at::kBFloat16, .replicate = replicate});
      expect_offload_changes_nothing(world, shard, {.wrap = "block*", .reduce_dtype = at::kDouble, .gradient_dtype = at::kFloat, .replicate = replicate});
    }
    expect_offload_changes_nothing(world, comm::Group::self(), {.wrap = "block*", .replicate = world.group()});
  });
}

TEST(FullyShard, OffloadedSlicesAreDrawnOrInitializedOnTheHost) {
  DeepNet plain;
  const Gradients expected = named_values(*plain);
  run_ranks(3, [&](World& world) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    auto net = on_meta([] { return DeepNet(); });
    const auto init = [&](torch::nn::Module& module, const std::string& path) {
      const at::NoGradGuard no_grad;
      for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
        const std::string name = path + "." + parameter.key();
        if (expected.contains(name)) parameter.value().copy_(expected.at(name));
      }
    };
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .init = init, .device = testing_support::test_device(), .offload = Offload::Host});
    EXPECT_EQ(slice_difference(*net, expected, /*values=*/true), 0);
    int64_t bytes = 0;
    for (const ShardUnit& unit : sharded->units()) bytes += unit.local_bytes;
    EXPECT_EQ(memory.current(), 0);
    EXPECT_EQ(memory.host_by_category()[static_cast<size_t>(MemoryCategory::Parameters)], bytes);
    EXPECT_EQ(total_of(memory.host_by_category()), bytes);
  });
}

TEST(FullyShard, AnOffloadedStepThatDidNotEndLeavesNothing) {
  run_ranks(3, [&](World& world) {
    Gradients seen[2];
    for (const bool interrupted : {false, true}) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .offload = Offload::Host});
      for (int attempt = 0; attempt < (interrupted ? 2 : 1); ++attempt) {
        sharded->begin_step();
        sharded->before_micro_batch({.last = attempt == 1 || !interrupted});
        backward_of(net, part_of(whole_batch(samples), 3, world.rank()));
      }
      sharded->after_micro_batch({});
      sharded->finish();
      seen[interrupted] = named_gradients(*net);
    }
    expect_same_bits({seen[1]}, {seen[0]});
  });
}

int64_t of(const MemoryByCategory& bytes, MemoryCategory category) { return bytes[static_cast<size_t>(category)]; }

TEST(FullyShard, OffloadLeavesTheDeviceTheUnitsInUse) {
  constexpr int64_t unit = (1024 * 64 + 1024) * 4, parameters = 6 * unit;
  for (const int ranks : {1, 2, 4, 8}) {
    run_ranks(ranks,
              [&](World& world) {
                MemoryTracker memory;
                const TrackMemory track(memory);
                auto net = on_meta([] { return WideNet(); });
                auto sharded = fully_shard(net, world.group(),
                                           {.wrap = "layer*", .device = testing_support::test_device(), .prefetch = {.units = 0}, .offload = Offload::Host});
                materialize(net, 1, testing_support::test_device());
                const int64_t share = parameters / ranks;  // rows divide evenly
                for (int step = 0; step < 2; ++step) {
                  memory.reset_peak();
                  sharded->begin_step();
                  for (int pass = 0; pass < 2; ++pass) {
                    sharded->before_micro_batch({.last = pass == 1});
                    const MemoryScope activations(MemoryCategory::Activations);
                    net(at::full({1, 64}, 0.1)).sum().backward();
                    sharded->after_micro_batch({});
                  }
                  sharded->finish();
                  const MemoryByCategory host = memory.host_by_category(), most = memory.host_peak_by_category();
                  EXPECT_EQ(of(host, MemoryCategory::Parameters), share);
                  EXPECT_EQ(of(host, MemoryCategory::Gradients), share);
                  EXPECT_EQ(of(most, MemoryCategory::Gradients), share + unit / ranks) << "one reduced slice on its way, to be added";
                  EXPECT_EQ(total_of(host), 2 * share);
                  EXPECT_EQ(memory.current(), 0) << "between steps the device has nothing";
                  // At most: a unit, its gradients, those of the one before on their way with the reduced slice, and one gradient that autograd has just made.
                  EXPECT_LT(memory.peak(), 4 * unit + unit / ranks + 100000);
                  EXPECT_GT(memory.peak(), 2 * unit);
                }
              },
              {.backend = ranks == 1 ? "gloo" : "shm"});  // Gloo's worker may hold on to tensors for a while
  }
}

TEST(FullyShard, OffloadCopiesASlicePerGatherAndPerReduction) {
  const auto copies_of_a_step = [](int ranks, FullyShardOptions options) {
    int copies = 0;
    options.wrap = "layer*";
    options.device = testing_support::test_device();
    options.offload = Offload::Host;
    run_ranks(ranks, [&](World& world) {
      auto net = on_meta([] { return WideNet(); });
      auto sharded = fully_shard(net, world.group(), options);
      materialize(net, 1, testing_support::test_device());
      const auto counted = std::make_shared<CopyCount>((1024 * 64 + 1024) / ranks);
      const nn::OperatorScope scope(counted);
      sharded->begin_step();
      for (int pass = 0; pass < 3; ++pass) {
        sharded->before_micro_batch({.last = pass == 2});
        net(at::full({1, 64}, 0.1)).sum().backward();
        sharded->after_micro_batch({});
      }
      sharded->finish();
      if (world.rank() == 0) copies = counted->copies;
    });
    return copies;
  };
  constexpr int units = 6, m = 3;
  for (const int ranks : {1, 2}) {
    EXPECT_EQ(copies_of_a_step(ranks, {}), 2 * m * units + m * units);
    EXPECT_EQ(copies_of_a_step(ranks, {.reshard_after_forward = false}), m * units + m * units);
    EXPECT_EQ(copies_of_a_step(ranks, {.reduce_each_micro_batch = false}), 2 * m * units + units);
  }
}

TEST(FullyShard, OffloadToDiskReadsAheadAndLeavesTheHostTheUnitsInUse) {
  constexpr int64_t unit = (1024 * 64 + 1024) * 4, units = 6;
  for (const int ranks : {1, 2}) {
    for (const int64_t ahead : {0, 1, 2}) {
      run_ranks(ranks,
                [&](World& world) {
                  MemoryTracker memory;
                  const auto file = std::make_shared<MemoryFile>();
                  const TrackMemory track(memory);
                  auto net = on_meta([] { return WideNet(); });
                  auto sharded = fully_shard(
                      net, world.group(),
                      {.wrap = "layer*", .device = testing_support::test_device(), .prefetch = {.units = ahead}, .offload = Offload::Disk, .file = file});
                  for (const ShardUnit& one : sharded->units()) EXPECT_EQ(one.place, Offload::Disk);
                  materialize(net, 1, testing_support::test_device());
                  for (int step = 0; step < 3; ++step) {
                    memory.reset_peak();
                    file->begun = file->most_coming = 0;
                    sharded->begin_step();
                    for (int pass = 0; pass < 2; ++pass) {
                      sharded->before_micro_batch({.last = pass == 1});
                      const MemoryScope activations(MemoryCategory::Activations);
                      net(at::full({1, 64}, 0.1)).sum().backward();
                      sharded->after_micro_batch({});
                    }
                    sharded->finish();
                    sharded->after_update();
                    EXPECT_EQ(file->begun, 2 * 2 * units) << "each once for each gather";
                    if (step > 0) EXPECT_EQ(file->most_coming, 1 + ahead);
                    EXPECT_LE(total_of(memory.host_peak_by_category()), (2 + ahead) * unit / ranks);
                    EXPECT_EQ(file->elements, 2 * units * unit / 4 / ranks) << "slices, and what is added up for them";
                    EXPECT_EQ(memory.current(), 0);
                    EXPECT_EQ(total_of(memory.host_by_category()), 0) << "between steps the host has nothing either";
                  }
                },
                {.backend = ranks == 1 ? "gloo" : "shm"});
    }
  }
}

/// A frozen and a trained weight, which of one unit are gathered apart.
struct HalfFrozenImpl : nn::Module {
  HalfFrozenImpl() {
    trained = register_parameter("trained", at::ones({64, 64}));
    frozen = register_parameter("frozen", at::ones({64, 64}), /*requires_grad=*/false);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(at::matmul(x, trained), frozen); }
  at::Tensor trained, frozen;
};
TESSERA_MODULE(HalfFrozen);

struct TwoHalvesImpl : nn::Module {
  TwoHalvesImpl() {
    register_module("half0", half0);
    register_module("half1", half1);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return half1(half0(x)); }
  HalfFrozen half0, half1;
};
TESSERA_MODULE(TwoHalves);

/// Where the second weight of a unit cannot be brought, when it is used or ahead of that, the first is given up with it: nobody takes the unit for gathered,
/// and who tries once more gathers it anew.
TEST(FullyShard, AUnitThatCannotBeGatheredAsAWholeIsGivenUp) {
  TwoHalves whole;
  const at::Tensor expected = whole(random_tensor({2, 64}, "x")).detach().cpu();
  for (const int64_t ahead : {0, 1}) {
    run_ranks(2, [&](World& world) {
      const auto file = std::make_shared<MemoryFile>();
      TwoHalves net;
      auto sharded = fully_shard(net, world.group(),
                                 {.wrap = "half*", .prefetch = {.units = ahead}, .reshard_after_forward = false, .offload = Offload::Disk, .file = file});
      ASSERT_EQ(sharded->units().size(), 2u);
      const auto step = [&] {
        const at::Tensor out = net(random_tensor({2, 64}, "x"));
        out.sum().backward();
        return out.detach().cpu();
      };
      step();
      {
        const at::NoGradGuard no_grad;  // memory that comes back undefined would have the values of before
        for (at::Tensor parameter : net->parameters()) parameter.mul_(2);
      }
      file->fails_at = file->awaited + 4;  // two weights each of two units
      EXPECT_THROW(step(), Error);
      EXPECT_LT((step() - 16 * expected).abs().max().item<double>(), 16 * parity * expected.abs().max().item<double>());
    });
  }
}

TEST(FullyShard, AUnitWaitsAtOnePlace) {
  DeepNet net;
  const auto apart = [](const nn::NamedParameter& parameter) { return parameter.name.ends_with("bias") ? Offload::Host : Offload::None; };
  try {
    (void)fully_shard(net, comm::Group::self(), {.wrap = "block*", .place = apart});
    FAIL() << "a unit was taken apart";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("are of one unit, '"), ::testing::HasSubstr("(offload.params)")));
  }
  try {
    (void)fully_shard(net, comm::Group::self(), {.offload = Offload::Disk});
    FAIL() << "nothing holds the slices";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("there is no file; set options.file"));
  }
}

TEST(FullyShard, OffloadCastsOnceAStep) {
  run_ranks(2, [&](World& world) {
    MemoryTracker memory;
    const TrackMemory track(memory);
    auto net = on_meta([] { return WideNet(); });
    auto sharded = fully_shard(
        net, world.group(),
        {.wrap = "layer*", .device = testing_support::test_device(), .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .offload = Offload::Host});
    materialize(net, 1, testing_support::test_device());
    const int64_t slices = of(memory.host_by_category(), MemoryCategory::Parameters);
    sharded->begin_step();
    net(at::full({1, 64}, 0.1, at::kBFloat16)).sum().backward();
    EXPECT_EQ(of(memory.host_by_category(), MemoryCategory::Comm), slices / 2) << "kept for the next micro-batch";
    sharded->finish();
    EXPECT_EQ(of(memory.host_by_category(), MemoryCategory::Comm), 0) << "the update makes it stale";
  });
}

}  // namespace
}  // namespace tessera
