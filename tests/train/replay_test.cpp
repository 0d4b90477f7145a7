#include "tessera/train/replay.h"

#include <gmock/gmock.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/error.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ReplayTest : public testing::TrainFixture {
 protected:
  /// What `ranks` ranks record of the freshly drawn model.
  nlohmann::json recorded(const Config& config, int ranks) const {
    nlohmann::json progress;
    with_model(config, ranks, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      auto record = replay.record(*run.model, cursor);
      if (rank == 0) progress["replay"] = std::move(record);
    });
    return progress;
  }

  Replay::Result check(const Config& config, int ranks, const nlohmann::json& progress, const std::function<void(Composition&)>& plant = {}) const {
    Replay::Result result;
    with_model(config, ranks, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      if (plant) plant(run);
      const auto own = replay.check(*run.model, cursor, progress, "step-3");
      if (rank == 0) result = own;
    });
    return result;
  }

  using Body = std::function<void(const Replay&, Composition&, const data::Cursor&, int rank)>;
  void with_model(const Config& config, int ranks, const Body& body) const {
    const auto text = corpus(config);
    comm::run_ranks(ranks, [&](comm::World& world) {
      validate(config, world.size());
      const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world.size()));
      RankScope scope(config, world.local_size());
      Stepper stepper(config, mesh, at::kCPU, scope);
      data::Loader loader(text, loader_options(config, mesh));
      auto cursor = loader.cursor();
      cursor.step = 3;
      body(Replay(config, mesh, text), stepper.run(), cursor, world.rank());
    });
  }
};

TEST_F(ReplayTest, EveryNumberOfDataRanksReplaysEveryOthersBits) {
  const auto small = config("llama", {"run.threads=1", "model.dropout=0.1"});
  for (const int saved_by : {1, 2, 3, 5}) {
    const auto progress = recorded(small, saved_by);
    EXPECT_EQ(progress["replay"]["losses"].size(), saved_by);
    for (const int loaded_by : {1, 2, 3}) {
      const auto result = check(small, loaded_by, progress);
      EXPECT_TRUE(result.bits);
      EXPECT_EQ(result.micro_batches, std::min(saved_by, loaded_by));
    }
  }
}

TEST_F(ReplayTest, OtherArithmeticIsHeldToABound) {
  const auto progress = recorded(config("llama", {"run.threads=1"}), 1);
  EXPECT_FALSE(check(config("llama", {"run.threads=1", "run.kernels=reference"}), 1, progress).bits);
  // Another micro_size is none: the recorded one is replayed.
  EXPECT_TRUE(check(config("llama", {"run.threads=1", "batch.micro_size=1"}), 2, progress).bits);
}

TEST_F(ReplayTest, FindsOneFlippedBitOfAWeight) {
  const auto small = config("mlp", {"run.threads=1"});
  const auto progress = recorded(small, 2);
  const auto flip = [](Composition& run) {
    const at::NoGradGuard no_grad;
    const at::Tensor weight = run.parameters.back().tensor;
    auto* bits = static_cast<uint32_t*>(weight.mutable_data_ptr());
    bits[3] ^= 1u << 20;
  };
  for (const int ranks : {1, 2}) {
    EXPECT_THAT([&] { check(small, ranks, progress, flip); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("step-3: the step that it recorded does not replay"), HasSubstr("of step 4"),
                                                 HasSubstr("bit for bit"), HasSubstr("checkpoint.verify = false"))));
  }
}

TEST_F(ReplayTest, DamagedAndMissingRecords) {
  const auto small = config("mlp", {"run.threads=1"});
  EXPECT_EQ(check(small, 1, nlohmann::json::object()).micro_batches, 0);
  const auto good = recorded(small, 1);
  const auto refused = [&](const std::function<void(nlohmann::json&)>& damage) {
    auto bad = good;
    damage(bad["replay"]);
    EXPECT_THAT([&] { check(small, 1, bad); }, ThrowsMessage<ConfigError>(HasSubstr("step-3: progress.replay in manifest.json cannot be read"))) << bad;
  };
  refused([](auto& replay) { replay = 3; });
  refused([](auto& replay) { replay["micro_size"] = 0; });
  refused([](auto& replay) { replay["micro_size"] = 3; });
  refused([](auto& replay) { replay["losses"] = nlohmann::json::array(); });
  refused([](auto& replay) { replay["losses"][0]["index"] = 7; });
  refused([](auto& replay) { replay["losses"][0].erase("bits"); });
}

TEST(ReplayBound, IsThatOfTheCoarsestFormat) {
  EXPECT_EQ(replay_bound({"fp32", "fp32"}), 5e-6);
  EXPECT_EQ(replay_bound({"fp32", "bf16", "fp16"}), 1e-2);
}

}  // namespace
}  // namespace tessera
