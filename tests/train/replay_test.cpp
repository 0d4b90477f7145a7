#include "tessera/train/replay.h"

#include <array>
#include <bit>
#include <limits>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/error.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ReplayTest : public testing_support::TrainFixture {
 protected:
  /// What `ranks` ranks record of the freshly drawn model.
  nlohmann::json recorded(const Config& config, int ranks, const comm::RunOptions& options = {}) const {
    nlohmann::json progress;
    const auto record_it = [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      ForwardEngine engine(run);
      auto record = replay.record(engine, cursor);
      if (rank == 0) progress["replay"] = std::move(record);
    };
    with_model(config, ranks, record_it, options);
    return progress;
  }

  Replay::Result check(const Config& config, int ranks, const nlohmann::json& progress, const std::function<void(Composition&)>& plant = {},
                       const comm::RunOptions& options = {}) const {
    Replay::Result result;
    const auto check_it = [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      if (plant) plant(run);
      ForwardEngine engine(run);
      const auto own = replay.check(engine, cursor, progress, "step-3");
      if (rank == 0) result = own;
    };
    with_model(config, ranks, check_it, options);
    return result;
  }

  using Body = std::function<void(const Replay&, Composition&, const data::Cursor&, int rank)>;
  void with_model(const Config& config, int ranks, const Body& body, const comm::RunOptions& options = {}) const {
    const auto text = corpus(config);
    const auto rank_body = [&](comm::World& world) {
      validate(config, world.size());
      const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world.size()));
      RankScope scope(config, world.local_size());
      Stepper stepper(config, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(config, mesh));
      auto cursor = loader.cursor();
      cursor.step = 3;
      body(Replay(config, mesh, text, world.options()), stepper.run(), cursor, world.rank());
    };
    comm::run_ranks(ranks, rank_body, options);
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

TEST_F(ReplayTest, ALossThatIsNotFiniteIsMarkedAndNeverReplays) {
  const auto small = config("llama", {"run.threads=1"});
  const auto plant = [](Composition& run) {
    const at::NoGradGuard no_grad;
    at::Tensor(run.parameters.back().tensor).fill_(std::numeric_limits<float>::quiet_NaN());
  };
  EXPECT_FALSE(recorded(small, 2)["replay"].contains("not_finite"));
  nlohmann::json progress;
  with_model(small, 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
    plant(run);
    ForwardEngine engine(run);
    auto record = replay.record(engine, cursor);
    if (rank == 0) progress["replay"] = std::move(record);
  });
  EXPECT_EQ(progress["replay"].value("not_finite", false), true);
  EXPECT_THAT([&] { check(small, 2, progress, plant); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("step-3: micro-batch 0 of step 4 had a loss of nan"), HasSubstr("resume from an older checkpoint"))));
}

/// In fp16 one batch may overflow in forward where the next does not: weights that give any text a number are gone on from.
TEST_F(ReplayTest, OneLossOfSeveralThatIsNotFiniteReplaysAsItIs) {
  const auto small = config("llama", {"run.threads=1"});
  const auto plant = [](Composition& run, int rank) {
    const at::NoGradGuard no_grad;
    if (rank == 0) at::Tensor(run.parameters.back().tensor).fill_(std::numeric_limits<float>::quiet_NaN());
  };
  nlohmann::json progress;
  with_model(small, 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
    plant(run, rank);
    ForwardEngine engine(run);
    auto record = replay.record(engine, cursor);
    if (rank == 0) progress["replay"] = std::move(record);
  });
  EXPECT_EQ(progress["replay"].value("not_finite", true), false);
  for (const bool whole : {true, false}) {
    with_model(small, 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      if (whole) plant(run, rank);
      ForwardEngine engine(run);
      const auto check = [&] { return replay.check(engine, cursor, progress, "step-3").micro_batches; };
      if (whole) {
        EXPECT_EQ(check(), 2);
      } else {
        EXPECT_THROW(check(), ConfigError);
      }
    });
  }
}

/// The same weights may overflow in fp16 in one arithmetic and not in another: that says nothing of them, and what is compared has to be numbers.
TEST_F(ReplayTest, AnOverflowOfAnotherArithmeticInFp16IsNotCompared) {
  const auto of = [&](const std::string& format, const std::string& kernels) {
    return config("llama", {"run.threads=1", "precision.params=" + format, "precision.compute=" + format, "run.kernels=" + kernels});
  };
  const auto overflow_in = [](const nlohmann::json& good, size_t first, size_t behind) {
    auto progress = good;
    for (size_t i = first; i < behind; ++i) progress["replay"]["losses"][i]["bits"] = std::bit_cast<uint64_t>(std::numeric_limits<double>::infinity());
    progress["replay"]["not_finite"] = false;  // later texts had numbers
    return progress;
  };
  const auto half = of("fp16", "auto"), half_otherwise = of("fp16", "reference");
  const auto good = recorded(half, 3);
  for (const int ranks : {1, 2, 3, 5}) {  // five compare two of the three again
    const auto some = check(half_otherwise, ranks, overflow_in(good, 1, 3));
    EXPECT_EQ(some.micro_batches, 1) << ranks;
    EXPECT_EQ(some.overflowed, std::min(ranks, 3) - 1);
    EXPECT_FALSE(some.bits);
  }
  const auto none = check(half_otherwise, 2, overflow_in(good, 0, 3));
  EXPECT_EQ(none.micro_batches, 0);
  EXPECT_THAT(in_words(none), AllOf(HasSubstr("not replayed: of the 2 micro-batches"), HasSubstr("only its hashes")));
  EXPECT_THAT(in_words(check(half_otherwise, 2, overflow_in(good, 1, 2))), AllOf(HasSubstr("within bounds"), HasSubstr("on 1 micro-batches; on 1 more")));
  // Those of now, too; and one that is compared has to be equal.
  const auto lost = [](Composition& run) {
    const at::NoGradGuard no_grad;
    at::Tensor(run.parameters.back().tensor).fill_(std::numeric_limits<float>::infinity());
  };
  EXPECT_EQ(check(half_otherwise, 1, good, lost).overflowed, 1);
  const auto other = [](Composition& run) {
    const at::NoGradGuard no_grad;
    at::Tensor(run.parameters.back().tensor).mul_(3);
  };
  EXPECT_THROW(check(half_otherwise, 2, overflow_in(good, 1, 2), other), ConfigError);
  // In the same arithmetic it comes again, and other formats have the range.
  EXPECT_THROW(check(half, 2, overflow_in(good, 0, 1)), ConfigError);
  for (const std::string format : {"fp32", "bf16"}) {
    EXPECT_THROW(check(of(format, "reference"), 2, overflow_in(recorded(of(format, "auto"), 2), 0, 1)), ConfigError) << format;
  }
}

/// Experts that choose chose padding as well, in checkpoints of builds that took it for tokens.
TEST_F(ReplayTest, WhatAnOlderBuildsExpertsChoseOfPaddedWindowsIsNotCompared) {
  for (const std::string router : {"expert_choice", "softmax"}) {
    const auto padded =
        config("mixtral", {write_lines(), "run.threads=1", "data.documents=lines", "data.seq_len=29", "batch.global_size=6", "model.router=" + router});
    auto progress = recorded(padded, 1);
    EXPECT_EQ(check(padded, 1, progress).micro_batches, 1) << router;
    progress["replay"]["arithmetic"].erase("padding");
    const auto older = check(padded, 1, progress);
    EXPECT_EQ(older.micro_batches, router == "softmax" ? 1 : 0);
    EXPECT_FALSE(older.bits);
  }
}

TEST_F(ReplayTest, OtherArithmeticIsHeldToABound) {
  const auto progress = recorded(config("llama", {"run.threads=1"}), 1);
  EXPECT_FALSE(check(config("llama", {"run.threads=1", "run.kernels=reference"}), 1, progress).bits);
  EXPECT_FALSE(check(config("llama", {"run.threads=1", R"(run.kernels={ rms_norm = "reference" })"}), 1, progress).bits) << "of one kernel";
  EXPECT_FALSE(check(config("llama", {"run.threads=1", "recompute.ffn_tile=3"}), 1, progress).bits) << "products of fewer rows";
  // Another micro_size is none: the recorded one is replayed.
  EXPECT_TRUE(check(config("llama", {"run.threads=1", "batch.micro_size=1"}), 2, progress).bits);
}

/// Hosts of several kinds: whose loss a rank replays may have been computed by another kind than its own, and the manifest tells of one.
TEST_F(ReplayTest, RanksThatComputeOtherwiseThanEachOtherAreHeldToABound) {
  const auto small = config("llama", {"run.threads=1"});
  const auto alike = recorded(small, 2);
  const auto on_another_kind = [](int rank) { at::set_num_threads(rank == 1 ? 2 : 1); };
  nlohmann::json unlike;
  with_model(small, 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
    on_another_kind(rank);
    ForwardEngine engine(run);
    auto record = replay.record(engine, cursor);
    if (rank == 0) unlike["replay"] = std::move(record);
  });
  EXPECT_TRUE(check(small, 2, alike).bits);
  EXPECT_FALSE(check(small, 2, unlike).bits);
  EXPECT_FALSE(check(small, 1, unlike).bits);
  for (const nlohmann::json& progress : {alike, unlike}) {
    std::array<bool, 2> bits{true, true};
    with_model(small, 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      on_another_kind(rank);
      ForwardEngine engine(run);
      bits[static_cast<size_t>(rank)] = replay.check(engine, cursor, progress, "step-3").bits;
    });
    EXPECT_THAT(bits, ::testing::Each(false)) << "on every rank the same";
  }
  // An older build did not say of how many ranks it told.
  auto old = alike;
  old["replay"]["arithmetic"].erase("of_all_ranks");
  EXPECT_FALSE(check(small, 2, old).bits);
}

/// The sums over ranks that layers are cut over are made by the engine, its algorithm, from host to host: none of that is the checkpoint's soundness.
TEST_F(ReplayTest, WhatOrdersTheSumsOfCutLayersDecidesBetweenBitsAndBounds) {
  const auto of = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"run.threads=1", "mesh.tp=4"});
    return config("llama", more);
  };
  for (const std::vector<std::string>& format : {std::vector<std::string>{}, {"precision.params=bf16", "precision.compute=bf16"}}) {
    const auto small = of(format);
    const comm::RunOptions gloo{.backend = "gloo"};
    const auto progress = recorded(small, 4, gloo);
    EXPECT_TRUE(check(small, 4, progress, {}, gloo).bits);
    const std::vector<comm::RunOptions> others{
        {.backend = "shm"}, {.backend = "gloo", .algorithm = "ring"}, {.backend = "gloo", .hosts = {0, 0, 1, 1}}, {.hosts = {0, 0, 1, 1}}};
    for (const auto& other : others) {
      const auto result = check(small, 4, progress, {}, other);
      EXPECT_FALSE(result.bits) << other.backend << " " << other.algorithm;
      EXPECT_EQ(result.micro_batches, 1);
    }
    auto overlapped = format;
    overlapped.insert(overlapped.end(), {"tensor.sequence_parallel=true", "tensor.overlap=true"});
    EXPECT_FALSE(check(of(overlapped), 4, progress, {}, gloo).bits);
  }
  // Whole layers have no such sums.
  const auto whole = config("llama", {"run.threads=1"});
  EXPECT_TRUE(check(whole, 2, recorded(whole, 2), {}, {.backend = "shm", .algorithm = "ring"}).bits);
}

/// The recorded micro-batch is of the batch and the windows that the run had then.
TEST_F(ReplayTest, AnotherBatchAndOtherWindowsReplayTheRecordedOnes) {
  const auto progress = recorded(config("llama", {"run.threads=1"}), 2);
  data::Cursor then{.step = 3, .global_size = 14, .seq_len = 16, .seed = 3, .shuffle = true, .content = {}};
  for (const auto& changed : {std::vector<std::string>{"batch.global_size=12", "batch.micro_size=3"}, {"data.seq_len=8", "model.max_seq_len=16"}}) {
    auto sets = changed;
    sets.emplace_back("run.threads=1");
    Replay::Result result;
    with_model(config("llama", sets), 2, [&](const Replay& replay, Composition& run, const data::Cursor& cursor, int rank) {
      auto recorded_at = then;
      recorded_at.content = cursor.content;
      ForwardEngine engine(run);
      const auto own = replay.check(engine, recorded_at, progress, "step-3");
      if (rank == 0) result = own;
    });
    EXPECT_TRUE(result.bits);
    EXPECT_EQ(result.micro_batches, 2);
  }
}

TEST_F(ReplayTest, FindsOneFlippedBitOfAWeight) {
  const auto small = config("mlp", {"run.threads=1"});
  const auto progress = recorded(small, 2);
  const auto flip = [](Composition& run) {
    const at::NoGradGuard no_grad;
    const at::Tensor weight = run.parameters.back().tensor;
    auto* bits = static_cast<uint32_t*>(weight.mutable_data_ptr());
    bits[3] ^= 1u << 23;  // twice or half of it: less, in one weight of one logit, may round away in a sum of losses
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
  refused([](auto& replay) { replay["arithmetic"] = nullptr; });
  refused([](auto& replay) { replay["arithmetic"]["precision"] = nullptr; });
  refused([](auto& replay) { replay["arithmetic"]["precision"]["compute"] = 16; });
  refused([](auto& replay) { replay["losses"][0]["index"] = 7; });
  refused([](auto& replay) { replay["losses"][0].erase("bits"); });
}

TEST(ReplayBound, IsThatOfTheCoarsestFormat) {
  EXPECT_EQ(replay_bound({"fp32", "fp32"}), 5e-6);
  EXPECT_EQ(replay_bound({"fp32", "bf16", "fp16"}), 1e-2);
}

}  // namespace
}  // namespace tessera
