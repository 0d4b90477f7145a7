// What a plan says of a step's memory, held against one on the device that the suite runs on: on the simulated accelerator (docs/testing.md) a plan for an
// accelerator (MetaAsAccelerator), which goes other ways than a CPU's step does.

#include <cstdlib>
#include <optional>

#include "tessera/core/events.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"
#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class PlannedDevice : public testing_support::TrainFixture {
 protected:
  void expect_real_peak(const std::string& family, const std::vector<std::string>& sets, int world = 1) {
    std::vector<std::string> all{"run.steps=3", "batch.global_size=4"};
    all.insert(all.end(), sets.begin(), sets.end());
    const auto settings = config(family, all);
    const auto planned = [&] {
      const bool on_cpu = testing_support::test_device().is_cpu();
      const testing_support::OnTheCpu beside;
      std::optional<MetaAsAccelerator> device;
      std::optional<kernels::Bf16ProductsGuard> multiplies;
      if (!on_cpu) device.emplace(), multiplies.emplace(/*native=*/true);
      return plan::dry_run(settings, world).ranks.at(0).peak_bytes;
    }();
    const auto real = train(settings, world).peak;
    // Of clipped 16-bit gradients a number of 8 bytes, as in precision_test.cpp, and of Adafactor's sums, whose divisor lies on the host.
    const int64_t play = settings.precision.reduce == "bf16" || settings.optim.name == "adafactor" ? 8 : 0;
    for (int c = 0; c < num_memory_categories; ++c) {
      EXPECT_LE(std::abs(planned[c] - real[c]), play) << planned[c] << " planned, " << real[c] << " measured: " << to_string(static_cast<MemoryCategory>(c))
                                                      << " of " << family << ::testing::PrintToString(sets);
    }
  }
};

TEST_F(PlannedDevice, PeakEqualsTheRunsToTheByte) {
  for (const std::string family : {"llama", "gpt2"}) {
    expect_real_peak(family, {});
    expect_real_peak(family, {"precision.compute=bf16"});
    expect_real_peak(family, {"precision.params=bf16", "precision.compute=bf16"});
    expect_real_peak(family, {"precision.params=bf16", "precision.compute=bf16", "batch.micro_size=4"});
    expect_real_peak(family, {"precision.compute=bf16", "recompute.mode=full"});
  }
}

/// Of few columns and a large table, where the update of it is the peak, or the norm of its gradient.
TEST_F(PlannedDevice, PeakOfEveryUpdateEqualsTheRunsToTheByte) {
  for (const std::string name : {"adam8bit", "lion", "adafactor", "muon", "sgd"}) {
    for (const std::string table : {"259", "3000"}) {
      const std::vector<std::string> sets{"optim.name=" + name, "model.vocab_size=" + table, "model.ffn_dim=400", "data.seq_len=2", "batch.micro_size=1"};
      const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), sets.begin(), sets.end());
        return more;
      };
      expect_real_peak("llama", with({}));
      expect_real_peak("llama", with({"optim.max_grad_norm=0"}));
      expect_real_peak("gpt2", with({"precision.params=bf16", "precision.compute=bf16", "optim.max_grad_norm=0.1"}));
    }
    expect_real_peak("llama", {"optim.name=" + name, "zero.stage=3", "data.seq_len=2", "batch.global_size=6", "batch.micro_size=1"}, 3);
  }
}

/// A device multiplies one expert's rows after the other's.
TEST_F(PlannedDevice, ExpertsAreMultipliedOneByOneAsTheDeviceDoes) {
  const auto products = [&](bool on_device) {
    std::optional<MetaAsAccelerator> device;
    if (on_device) device.emplace();
    const kernels::Bf16ProductsGuard multiplies(/*native=*/true);
    int64_t count = 0;
    for (const auto& ran :
         only<OperatorEvent>(plan::dry_run(config("mixtral", {"precision.compute=bf16", "batch.global_size=2"}), 1, {.events = true}).ranks.at(0).events))
      count += ran.name.starts_with("tessera::grouped_product") ? 1 : 0;
    return count;
  };
  EXPECT_EQ(products(true), 0);
  expect_real_peak("mixtral", {});
  expect_real_peak("mixtral", {"precision.compute=bf16"});
}

/// A device reads neither the loss's gradient, which was foreseen, nor the scale that an update of the host's takes along.
TEST_F(PlannedDevice, GradientsAreMultipliedWhereTheDeviceDoes) {
  const auto multiplied = [&](bool on_device, const std::string& loss_scale) {
    std::optional<MetaAsAccelerator> device;
    if (on_device) device.emplace();
    const auto settings = config("llama", {"precision.loss_scale=" + loss_scale, "batch.global_size=6"});
    int64_t count = 0;
    for (const auto& ran : only<OperatorEvent>(plan::dry_run(settings, 1, {.events = true}).ranks.at(0).events))
      count += (ran.name == "aten::mul_" || ran.name == "aten::mul") && ran.shape == std::vector<int64_t>{259, 24} ? 1 : 0;
    return count;
  };
  EXPECT_EQ(multiplied(false, "none"), 0);
  EXPECT_EQ(multiplied(true, "none"), 3 + 2) << "the head's gradient of each micro-batch, and the table's and the head's by what clips them";
  EXPECT_EQ(multiplied(false, "256"), 0);
  EXPECT_EQ(multiplied(true, "256"), 3 + 2 + 2) << "both before their norm, too";
}

/// Of few columns: then the peak is where weights' gradients are added up, or in the update, which go other ways than a CPU's.
TEST_F(PlannedDevice, PeakOfFewColumnsEqualsTheRunsToTheByte) {
  for (const std::string family : {"llama", "gpt2", "mlp"}) {
    const std::vector<std::string> few{"data.seq_len=2", "batch.global_size=2", "batch.micro_size=1"};
    const auto expect_peak = [&](std::vector<std::string> sets) {
      sets.insert(sets.end(), few.begin(), few.end());
      expect_real_peak(family, sets);
    };
    expect_peak({});
    expect_peak({"precision.params=bf16", "precision.compute=bf16"});
    expect_peak({"precision.params=bf16", "precision.compute=bf16", "model.tie_embeddings=true"});
    expect_peak({"precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16"});
    expect_peak({"model.vocab_size=3000"});
  }
}

/// Of stages, too, but for what has been sent and is on its way, which a plan takes for done (TrainDevice.StagesAndCutSequencesHaveTheCpusBits).
TEST_F(PlannedDevice, PeakOfSeveralRanksEqualsTheRunsToTheByte) {
  for (const std::string stage : {"0", "1", "2", "3"}) {
    expect_real_peak("llama", {"zero.stage=" + stage}, 2);
    expect_real_peak("gpt2", {"zero.stage=" + stage, "precision.params=bf16", "precision.compute=bf16"}, 2);
  }
  expect_real_peak("llama", {"mesh.tp=2", "precision.compute=bf16"}, 2);
}

TEST_F(PlannedDevice, WhatWaitsOnTheHostIsUpdatedByItsLoops) {
  expect_real_peak("llama", {"offload.optimizer=host", "precision.params=bf16", "precision.compute=bf16"});
  expect_real_peak("llama", {"offload.optimizer=host", "offload.gradients=host"});
}

}  // namespace
}  // namespace tessera
