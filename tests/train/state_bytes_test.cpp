#include "tessera/train/state_bytes.h"

#include <gtest/gtest.h>

#include "tests/train/held_bytes.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

TEST(StateBytes, FollowFromPrecisionAndOptimizer) {
  struct Case {
    Sets sets;
    double weight, gradient, state;
  };
  const Sets bf16{"precision.params=bf16", "precision.compute=bf16"};
  const auto with = [&](const std::string& more) {
    Sets all = bf16;
    all.push_back(more);
    return all;
  };
  for (const auto& [sets, weight, gradient, state] : std::vector<Case>{{{}, 4, 4, 8},
                                                                       {{"precision.compute=bf16"}, 4, 4, 8},
                                                                       {{"optim.name=sgd"}, 4, 4, 0},
                                                                       {{"optim.name=sgd", "optim.momentum=0.9"}, 4, 4, 4},
                                                                       {{"optim.state_dtype=bf16"}, 4, 4, 4},
                                                                       {{"optim.name=lion", "optim.state_dtype=bf16"}, 4, 4, 2},
                                                                       {with("optim.state_dtype=bf16"), 2, 4, 8},
                                                                       {bf16, 2, 4, 12},
                                                                       {with("precision.reduce=bf16"), 2, 2, 12},
                                                                       {with("precision.master=bf16"), 2, 4, 4}}) {
    const auto bytes = bytes_per_parameter(testing_support::formula_config(sets));
    EXPECT_EQ(bytes.weight, weight) << ::testing::PrintToString(sets);
    EXPECT_EQ(bytes.gradient, gradient) << ::testing::PrintToString(sets);
    EXPECT_EQ(bytes.state, state) << ::testing::PrintToString(sets);
  }
}

TEST(StateBytes, AreDividedByStage) {
  const BytesPerParameter zero_paper{.weight = 2, .gradient = 2, .state = 12};
  for (const int n : {1, 2, 3, 5, 8}) {
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 0, n).total(), 16);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 1, n).total(), 4 + 12.0 / n);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 2, n).total(), 2 + 14.0 / n);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 3, n).total(), 16.0 / n);
  }
}

TEST(StateBytes, AreWhatTheTrackerMeasures) {
  const Sets masters{"precision.params=bf16", "precision.compute=bf16"};
  for (const auto& [sets, ranks] : std::vector<std::pair<Sets, int>>{
           {{}, 2}, {{}, 8}, {masters, 4}, {{"optim.state_dtype=bf16"}, 3}, {{"optim.name=muon"}, 2}, {{"optim.name=adam8bit"}, 1}}) {
    for (const int stage : {0, 1, 2, 3}) {
      Sets all = sets;
      all.push_back("zero.stage=" + std::to_string(stage));
      const Config config = testing_support::formula_config(all);
      const auto expected = kept_per_parameter(bytes_per_parameter(config), stage, ranks), measured = testing_support::held_bytes(config, ranks).state();
      EXPECT_NEAR(measured.weight, expected.weight, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.gradient, expected.gradient, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.state, expected.state, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.total(), expected.total(), 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
    }
  }
}

// A device's memory is none of the host's, and the other way round.
TEST(StateBytes, BesideTheDeviceAreWhatTheTrackerMeasures) {
  const Sets state{"offload.optimizer=host"}, streamed{"offload.optimizer=host", "offload.gradients=host"};
  const auto with = [](Sets sets, const Sets& more) {
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  const Sets all = with(streamed, {"zero.stage=3", "offload.params=host"}), masters{"precision.params=bf16", "precision.compute=bf16"};
  const auto stage = [&](int number, const Sets& sets) { return with(sets, {"zero.stage=" + std::to_string(number)}); };
  for (const auto& [sets, ranks] : std::vector<std::pair<Sets, int>>{{state, 1},
                                                                     {stage(1, state), 2},
                                                                     {stage(3, state), 2},
                                                                     {with(state, masters), 1},
                                                                     {with(state, {"offload.update=device"}), 1},
                                                                     {streamed, 1},
                                                                     {stage(2, streamed), 2},
                                                                     {all, 2}}) {
    SCOPED_TRACE(::testing::PrintToString(sets));
    const Config config = testing_support::formula_config(sets);
    const auto held = testing_support::held_bytes(config, ranks);
    const auto measured = held.beside_device(), expected = beside_device_per_parameter(config, ranks);
    const double rounding = 0.01 * expected.total(), on_its_way = static_cast<double>(config.zero.bucket_bytes) / held.parameters;
    EXPECT_NEAR(measured.weight + measured.state, expected.weight + expected.state, rounding);  // copies count as state here and there
    EXPECT_GE(measured.gradient, expected.gradient - rounding);
    EXPECT_LE(measured.gradient, expected.gradient + rounding + (config.offload.gradients.is("host") ? on_its_way : 0));
    EXPECT_EQ(on_host_per_parameter(config, ranks, /*on_cpu=*/false).total(), expected.total());
  }
  const auto on = [](const Sets& sets, bool cpu) { return on_host_per_parameter(testing_support::formula_config(sets), 2, cpu).total(); };
  EXPECT_EQ(on({}, true), 16);
  EXPECT_EQ(on({}, false), 0) << "all of it lies on the device";
  EXPECT_EQ(on(all, false), 8);
  EXPECT_EQ(on(all, true), 8);
  EXPECT_EQ(on(state, false), 16) << "state, the copies and their gradients";
  EXPECT_EQ(on(state, true), 24);
  EXPECT_EQ(on({"offload.optimizer=disk"}, true), 16) << "copies and gradients twice, state nowhere";
}

// The blocks have 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) of 0.92 M elements, near 93%.
TEST(StateBytes, OnDiskAreTheSlicesAndTheirTraffic) {
  const auto config = [](Sets sets) {
    sets.emplace_back("zero.stage=3");
    return testing_support::formula_config(sets);
  };
  const Config all = config({"offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk", "optim.max_grad_norm=1"});
  EXPECT_EQ(on_disk_per_parameter(all, 2).total(), 8);
  EXPECT_EQ(on_host_per_parameter(all, 2, /*on_cpu=*/true).total(), 0);
  const auto traffic = disk_traffic_per_parameter(all, 2, /*micro_batches=*/3);
  EXPECT_EQ(traffic.write, 4 + 2 + (3 + 1) * 2) << "state, slices, gradients that are added up and clipped";
  EXPECT_EQ(traffic.read, 4 + (2 * 3 + 1) * 2 + (2 + 1 + 1 + 1) * 2) << "and gathers, and gradients that are added to, normed, clipped and used";
  const Config blocks = config({"offload.params={ \"layers.*\" = \"disk\" }", "offload.optimizer={ \"layers.*\" = \"host\" }"});
  const double share = 4.0 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) / static_cast<double>(num_parameters(blocks.model));
  EXPECT_NEAR(on_disk_per_parameter(blocks, 2).total(), share * 4, 1e-9);
  EXPECT_NEAR(on_host_per_parameter(blocks, 2, /*on_cpu=*/false).total(), share * 4, 1e-9) << "its state";
  EXPECT_NEAR(on_host_per_parameter(blocks, 2, /*on_cpu=*/true).total(), share * 4 + (1 - share) * 8, 1e-9) << "and all of the rest";
}

// Experts are dealt over ranks of their own (mesh.ep, mesh.expert_tp), and not cut by mesh.tp: refusals of what no host could hold count a rank's part.
TEST(StateBytes, OfExpertsAreWhatTheTrackerMeasures) {
  for (const auto& [sets, ranks] : std::vector<std::pair<Sets, int>>{{{"zero.stage=1", "mesh.ep=2"}, 2},
                                                                     {{"zero.stage=2", "mesh.ep=2"}, 2},
                                                                     {{"zero.stage=3", "mesh.ep=2"}, 2},
                                                                     {{"zero.stage=2", "mesh.ep=2"}, 4},
                                                                     {{"run.deterministic=true", "mesh.ep=2"}, 2},
                                                                     {{"mesh.tp=2"}, 2},
                                                                     {{"zero.stage=1", "mesh.tp=2"}, 4},
                                                                     {{"zero.stage=1", "mesh.tp=2", "mesh.ep=2", "mesh.expert_tp=2"}, 4}}) {
    SCOPED_TRACE(::testing::PrintToString(sets));
    Sets all{"model.family=mixtral", "model.experts=4", "model.experts_per_token=2"};
    all.insert(all.end(), sets.begin(), sets.end());
    const Config config = testing_support::formula_config(all);
    const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, ranks);
    const auto expected = on_host_per_parameter(config, sharers(config, shape), /*on_cpu=*/true), measured = testing_support::held_bytes(config, ranks).state();
    const int tp = size_along(shape, "tp");
    EXPECT_NEAR(tp * measured.weight, expected.weight, 0.01 * expected.total());
    EXPECT_NEAR(tp * measured.gradient, expected.gradient, 0.01 * expected.total());
    EXPECT_NEAR(tp * measured.state, expected.state, 0.01 * expected.total());
  }
}

// A group's optimizer keeps what it keeps, whatever the section's would.
TEST(StateBytes, OfGroupsAreWhatTheTrackerMeasures) {
  for (const int stage : {0, 1}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const Config config =
        testing_support::formula_config({"optim.groups=[\"layers.*: name = sgd\", \"head: name = lion\"]", "zero.stage=" + std::to_string(stage)});
    const auto expected = kept_per_parameter(bytes_per_parameter(config), stage, 2), measured = testing_support::held_bytes(config, 2).state();
    EXPECT_LT(expected.state, 4);
    EXPECT_NEAR(measured.state, expected.state, 0.01 * expected.total());
    EXPECT_NEAR(on_host_per_parameter(config, 2, /*on_cpu=*/true).total(), expected.total(), 1e-9);
  }
}

// Of what [lora] freezes there is a weight alone, and of what [quantize] names some bits, which stage 3 alone shards.
TEST(StateBytes, OfWhatIsFrozenAreWhatTheTrackerMeasures) {
  constexpr double kNear = 0.05;  // of a byte: A and B, 4% as many elements as the model, keep 0.7 bytes of each parameter of it
  const Sets adapted{"lora.modules=layers.*.attention.*, layers.*.feed_forward.*", "lora.rank=4", "optim.max_grad_norm=1"};
  const auto with = [&](const Sets& more) {
    Sets sets = adapted;
    sets.insert(sets.end(), more.begin(), more.end());
    return testing_support::formula_config(sets);
  };
  constexpr int kRanks = 2;
  for (const Sets& fewer : {Sets{}, Sets{"quantize.modules=layers.*.attention.*, layers.*.feed_forward.*"}}) {
    if (!fewer.empty() && !testing_support::test_device().is_cpu()) continue;
    for (const int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ::testing::PrintToString(fewer));
      Sets sets = fewer;
      sets.push_back("zero.stage=" + std::to_string(stage));
      const Config config = with(sets);
      const auto expected = kept_per_parameter(bytes_per_parameter(config), stage, kRanks), measured = testing_support::held_bytes(config, kRanks).state();
      EXPECT_NEAR(measured.weight, expected.weight + expected.quantized, kNear);
      EXPECT_NEAR(measured.gradient, expected.gradient, kNear);
      EXPECT_NEAR(measured.state, expected.state, kNear);
      EXPECT_NEAR(on_host_per_parameter(config, kRanks, /*on_cpu=*/true).total(), expected.total(), 1e-9);
      EXPECT_EQ(on_host_per_parameter(config, kRanks, /*on_cpu=*/false).total(), 0);
    }
  }
  const double trained = trained_share(with({}));
  EXPECT_NEAR(trained, 4.0 * 4 * (4 * (128 + 128) + 3 * (128 + 384)) / static_cast<double>(num_parameters(with({}).model)), 1e-12);
  const Config moved = with({"offload.optimizer=host"});
  const auto measured = testing_support::held_bytes(moved, 1).beside_device(), expected = beside_device_per_parameter(moved, 1);
  EXPECT_NEAR(expected.weight, (1 + trained) * 4, 1e-9) << "the host has copies of what is frozen, too";
  EXPECT_NEAR(measured.weight + measured.state, expected.weight + expected.state, kNear);
  const Config filed = with({"zero.stage=3", "offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk"});
  EXPECT_NEAR(on_disk_per_parameter(filed, kRanks).total(), (4 + trained * 16) / 2, 1e-9);
  const auto traffic = disk_traffic_per_parameter(filed, kRanks, /*micro_batches=*/3);
  EXPECT_NEAR(traffic.write, trained * (4 + 2 + (3 + 1) * 2), 1e-9) << "nothing of what is frozen";
  EXPECT_NEAR(traffic.read, 2 * 3 * 2 + trained * (4 + (2 * 3 + 1) * 2 + (2 + 1 + 1 + 1) * 2), 1e-9) << "which is gathered";
}

}  // namespace
}  // namespace tessera
