#include <cstdlib>
#include <set>

#include "tessera/core/events.h"
#include "tessera/kernels/products.h"
#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class PlannedPrecision : public testing_support::TrainFixture {
 protected:
  void expect_real_peak(const std::string& family, const std::vector<std::string>& sets, int world = 1) {
    auto all = sets;
    all.insert(all.end(), {"run.steps=3", "batch.global_size=4"});
    const auto settings = config(family, all);
    const auto planned = plan::dry_run(settings, world).ranks.at(0).peak_bytes;
    const auto real = train(settings, world).peak;
    // Clipping 16-bit gradients, libtorch's CPU kernel converts the factor, a number.
    const int64_t play = settings.precision.reduce == "bf16" ? 8 : 0;
    for (int c = 0; c < num_memory_categories; ++c) {
      EXPECT_LE(std::abs(planned[c] - real[c]), play) << planned[c] << " planned, " << real[c] << " measured: " << to_string(static_cast<MemoryCategory>(c))
                                                      << " of " << family << ::testing::PrintToString(sets);
    }
  }
};

TEST_F(PlannedPrecision, PeakEqualsTheRealRunToTheByte) {
  for (const std::string family : {"llama", "gpt2"}) {
    expect_real_peak(family, {"precision.params=bf16", "precision.compute=bf16"});
    expect_real_peak(family, {"precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16"});
    expect_real_peak(family, {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16"});
    expect_real_peak(family, {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic"});
    expect_real_peak(family, {"precision.compute=fp16", "precision.loss_scale=256"});
    expect_real_peak(family, {"precision.compute=fp8"});
    expect_real_peak(family, {"precision.compute=fp8", "precision.fp8_scales=row", "precision.params=bf16"});
  }
}

TEST_F(PlannedPrecision, Fp16IsMultipliedAsTheDeviceMultipliesIt) {
  const auto types = [&](const std::string& family, const std::string& params) {
    std::set<at::ScalarType> found;
    const auto settings = config(family, {"precision.params=" + params, "precision.compute=fp16", "precision.loss_scale=256", "batch.global_size=4"});
    const plan::DryRun run = plan::dry_run(settings, 1, {.events = true});
    for (const auto& ran : only<OperatorEvent>(run.ranks.at(0).events)) {
      if (ran.flops > 0) found.insert(ran.dtype);
    }
    return found;
  };
  for (const std::string family : {"llama", "gpt2"}) {
    for (const std::string params : {"fp32", "fp16"}) {
      SCOPED_TRACE(family + " " + params);
      EXPECT_EQ(types(family, params), std::set{at::kFloat}) << "a CPU widens them";
      const kernels::Fp16ProductsGuard device;
      EXPECT_EQ(types(family, params), std::set{at::kHalf});
    }
  }
}

TEST_F(PlannedPrecision, PeakOfAShardedStepEqualsTheRealRunsToTheByte) {
  const std::vector<std::string> bf16{"precision.params=bf16", "precision.compute=bf16"}, mixed{"precision.compute=bf16", "precision.reduce=bf16"};
  for (const char* stage : {"zero.stage=1", "zero.stage=2"}) {
    for (auto sets : {bf16, mixed}) {
      sets.insert(sets.end(), {stage, "zero.bucket_bytes=20000"});
      expect_real_peak("llama", sets, 2);
    }
  }
}

TEST_F(PlannedPrecision, MemoryOfWeightsGradientsAndStateIsThatOfTheFormula) {
  // Bytes a parameter: working weights, gradients, optimizer state with masters.
  struct Expected {
    std::vector<std::string> sets;
    int64_t weights, gradients, optimizer;
  };
  const std::vector<std::string> bf16{"precision.params=bf16", "precision.compute=bf16"};
  auto with = [&](const char* more) {
    auto all = bf16;
    all.emplace_back(more);
    return all;
  };
  for (const auto& [sets, weights, gradients, optimizer] :
       std::vector<Expected>{{{}, 4, 4, 8}, {bf16, 2, 4, 12}, {with("precision.reduce=bf16"), 2, 2, 12}, {with("precision.master=bf16"), 2, 4, 4}}) {
    auto all = sets;
    all.insert(all.end(), {"model.dim=256", "model.ffn_dim=512", "data.seq_len=8"});  // so that little else is there
    const auto run = plan::dry_run(config("mlp", all), 2);
    const auto& peak = run.ranks.at(0).peak_bytes;
    const auto per_parameter = [&](MemoryCategory category) {
      return static_cast<double>(peak[static_cast<size_t>(category)]) / static_cast<double>(run.parameters);
    };
    EXPECT_NEAR(per_parameter(MemoryCategory::Parameters), static_cast<double>(weights), 0.01 * static_cast<double>(weights)) << ::testing::PrintToString(sets);
    EXPECT_NEAR(per_parameter(MemoryCategory::Gradients), static_cast<double>(gradients), 0.05 * static_cast<double>(gradients))
        << ::testing::PrintToString(sets);
    EXPECT_NEAR(per_parameter(MemoryCategory::Optimizer), static_cast<double>(optimizer), 0.01 * static_cast<double>(optimizer))
        << ::testing::PrintToString(sets);
  }
}

}  // namespace
}  // namespace tessera
