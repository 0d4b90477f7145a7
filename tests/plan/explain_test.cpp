// The arithmetic of a run's memory, number by number, and what number formats hold.

#include "tessera/plan/explain.h"

#include <cmath>
#include <limits>

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>
#include <gmock/gmock.h>

#include "tessera/plan/dry_run.h"
#include "tessera/plan/formats.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/settings.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ExplainTest : public testing_support::TrainFixture {};

TEST_F(ExplainTest, StatesAreBytesOfEachParameter) {
  const Config small = config("llama", {"model.layers=6", "run.threads=1"});
  const auto explained = plan::explain(small, 7e9, 8);
  ASSERT_EQ(explained.states.size(), 3u);
  const auto gib = [&](double bytes) { return std::round(7e9 * bytes / std::pow(1024, 3) * 100) / 100; };
  EXPECT_EQ(gib(explained.states[0].bytes.weight), 26.08);
  EXPECT_EQ(gib(explained.states[0].bytes.gradient), 26.08);
  EXPECT_EQ(gib(explained.states[0].moments()), 52.15);
  EXPECT_EQ(gib(explained.states[0].bytes.total()), 104.31);
  EXPECT_EQ(explained.states[1].bytes.total(), 16) << "16 bits with masters save nothing of it";
  EXPECT_EQ(explained.states[1].masters, 4);
  EXPECT_EQ(explained.states[2].bytes.total(), 8);
  const std::string text = plan::to_string(explained);
  EXPECT_THAT(text, AllOf(HasSubstr("7e9 x 4 B / 1024^3"), HasSubstr("26.08 GiB"), HasSubstr("52.15 GiB"), HasSubstr("104.31 GiB"), HasSubstr("112 GB")));
  EXPECT_EQ(plan::to_json(explained)["states"][0]["bytes"], 7e9 * 16);
  EXPECT_THAT(text, Not(HasSubstr("left out")));
  auto of_a_layout = explained;
  of_a_layout.left_out = {"mesh.tp", "zero.stage"};
  EXPECT_THAT(plan::to_string(of_a_layout), HasSubstr("so these settings are left out: mesh.tp, zero.stage.\n"));
}

TEST_F(ExplainTest, WhatLoraFreezesIsAWeightAlone) {
  std::vector<std::string> sets{"model.layers=6", "run.threads=1", "lora.modules=layers.*.attention.*", "lora.rank=2"};
  const auto adapted = plan::explain(config("llama", sets), 0, 4);
  const double trained = 6.0 * 4 * 2 * (24 + 24) / static_cast<double>(adapted.counted);
  EXPECT_NEAR(adapted.trained, trained, 1e-9);
  EXPECT_NEAR(adapted.states[0].bytes.weight, 4 + 4 * trained, 1e-9);
  EXPECT_NEAR(adapted.states[0].bytes.gradient, 4 * trained, 1e-9);
  EXPECT_NEAR(adapted.states[1].masters, 4 * trained, 1e-9);
  EXPECT_NEAR(adapted.states[1].moments(), 8 * trained, 1e-9);
  EXPECT_THAT(plan::to_string(adapted), AllOf(HasSubstr("of what is trained"), HasSubstr("Bytes of a parameter are means")));
  EXPECT_THAT(plan::to_string(plan::explain(config("llama", {"run.threads=1"}), 0, 4)), Not(HasSubstr("are means")));

  sets.emplace_back("quantize.modules=layers.*.attention.*");
  sets.emplace_back("run.memory_limit_bytes=1000000000");
  const auto narrow = plan::explain(config("llama", sets), 0, 4);
  const double codes = 6.0 * 4 * 24 * 24 / static_cast<double>(narrow.counted);
  EXPECT_NEAR(narrow.states[0].bytes.weight, 4 * (1 + trained - codes), 1e-12);
  EXPECT_GT(narrow.states[0].bytes.quantized, codes / 2);
  EXPECT_EQ(narrow.verdict->states, static_cast<int64_t>(narrow.parameters * narrow.states[1].bytes.total()));
  const BytesPerParameter& bytes = narrow.states[0].bytes;
  EXPECT_NEAR(narrow.changes[4].states, narrow.parameters * bytes.total() / 4, 1e-6) << "ZeRO 3 shards codes, too";
}

TEST_F(ExplainTest, ActivationsGrowWithLayersAndTokens) {
  for (const std::string family : {"llama", "gpt2"}) {
    SCOPED_TRACE(family);
    const auto of = [&](const std::vector<std::string>& sets) {
      std::vector<std::string> all{"model.layers=7", "run.threads=1", "data.seq_len=64"};
      all.insert(all.end(), sets.begin(), sets.end());
      return plan::explain(config(family, all), 0, 4).activations;
    };
    const auto kept = of({});
    EXPECT_NEAR(kept.bytes(static_cast<double>(kept.seen_tokens), 7), static_cast<double>(kept.seen), 1e-9 * static_cast<double>(kept.seen));
    EXPECT_GT(kept.of_layer.token, 24 * 20);
    EXPECT_NEAR(kept.of_layer.fixed, 0, 1);
    const auto twice = of({"batch.micro_size=4", "batch.global_size=28"});
    EXPECT_NEAR(twice.of_layer.token, kept.of_layer.token, 0.001 * kept.of_layer.token) << "a token's share does not depend on how many there are";
    EXPECT_LT(of({"recompute.mode=full"}).of_layer.token, 0.3 * kept.of_layer.token);
    const auto half = of({"precision.compute=bf16"});
    EXPECT_LT(half.of_layer.token, 0.8 * kept.of_layer.token);
    EXPECT_GT(half.of_layer.fixed, 2 * 4 * 24 * 24) << "weights that were cast stay for the backward";
  }
}

/// Depths that are looked at have every layer that a pattern names.
TEST_F(ExplainTest, PatternsMayNameAnyLayer) {
  const auto of = [&](const std::string& lora) {
    return plan::explain(config("llama", {"model.layers=9", "run.threads=1", "lora.modules=" + lora, "lora.rank=2"}), 0, 4).activations;
  };
  const auto none = of("layers.0.attention.*").of_layer.token;
  for (const std::string modules : {"layers.5.attention.*", "layers.0.attention.*, layers.6.**", "layers.*7.attention.*", "layers.7.**"}) {
    SCOPED_TRACE(modules);
    const auto kept = of(modules);
    EXPECT_DOUBLE_EQ(kept.of_layer.token, none) << "a layer without an adapter";
    EXPECT_NEAR(kept.bytes(static_cast<double>(kept.seen_tokens), 9), static_cast<double>(kept.seen), 1e-9 * static_cast<double>(kept.seen));
  }
  EXPECT_DOUBLE_EQ(of("layers.8.**").of_layer.token, none);
  EXPECT_NO_THROW(plan::explain(config("llama", {"model.layers=9", "run.threads=1", "lora.modules=layers.*.**", "lora.trained=layers.7.**",
                                                 "quantize.modules=layers.4.**", "optim.groups=[\"layers.6.*: lr_factor = 2\"]"}),
                                0, 4));
}

/// What it was settled on for a device is kept, whatever this machine's CPU multiplies.
TEST_F(ExplainTest, AFormatThatWasSettledStays) {
  for (const std::string became : {"bf16", "fp32"}) {
    SCOPED_TRACE(became);
    Config settled = config("llama", {"model.layers=4", "run.threads=1", "precision.compute=auto"});
    EXPECT_NO_THROW(plan::explain(settled, 0, 4)) << "of a caller who has not";
    settled.precision.compute = became;
    settled.asked["precision.compute"] = "auto";
    const Config named = config("llama", {"model.layers=4", "run.threads=1", "precision.compute=" + became});
    EXPECT_EQ(plan::to_json(plan::explain(settled, 0, 4)), plan::to_json(plan::explain(named, 0, 4)));
    const Config changed = plan::with_settings(settled, {"zero.stage=1"});
    EXPECT_EQ(changed.precision.compute, became);
    EXPECT_EQ(changed.asked, settled.asked);
    EXPECT_EQ(plan::with_settings(settled, {"precision.compute=auto"}).precision.compute, "auto") << "who asks anew is answered anew";
  }
}

TEST_F(ExplainTest, ADeviceHoldsItOrSaysHowManyDo) {
  const auto of = [&](double bytes) {
    return plan::explain(config("llama", {"model.layers=6", "run.threads=1", "run.memory_limit_bytes=" + std::to_string(static_cast<int64_t>(bytes))}), 0, 4);
  };
  const auto fits = of(1e9);
  EXPECT_TRUE(fits.verdict->fits());
  EXPECT_THAT(plan::to_string(fits), HasSubstr("On one device of 1 GB, in 16 bits with masters in 32: yes"));
  const auto cut = of(static_cast<double>(fits.verdict->needed) * 0.6);
  EXPECT_FALSE(cut.verdict->fits());
  ASSERT_GT(cut.verdict->smallest, 1);
  EXPECT_LE(cut.verdict->needed_there, cut.verdict->memory);
  EXPECT_THAT(plan::to_string(cut), AllOf(HasSubstr("masters in 32: no"), HasSubstr("--set zero.stage=3")));
  EXPECT_EQ(of(10).verdict->smallest, 0);
  EXPECT_FALSE(plan::explain(config("llama", {"run.threads=1"}), 0, 4).verdict);
}

TEST(NumberFormats, AreThoseOfTheirTypes) {
  const auto expect = [](const plan::NumberFormat& format, auto limits) {
    using Limits = decltype(limits);
    EXPECT_EQ(format.largest(), static_cast<double>(Limits::max())) << format.name;
    EXPECT_EQ(format.smallest_normal(), static_cast<double>(Limits::min())) << format.name;
    EXPECT_EQ(format.smallest(), static_cast<double>(Limits::denorm_min())) << format.name;
    EXPECT_EQ(format.epsilon(), static_cast<double>(Limits::epsilon())) << format.name;
  };
  const auto formats = plan::number_formats();
  ASSERT_EQ(formats.size(), 7u);
  expect(formats[0], std::numeric_limits<float>());
  expect(formats[2], std::numeric_limits<c10::BFloat16>());
  expect(formats[3], std::numeric_limits<c10::Half>());
  expect(formats[4], std::numeric_limits<c10::Float8_e4m3fn>());
  expect(formats[5], std::numeric_limits<c10::Float8_e5m2>());
  EXPECT_EQ(formats[6].largest(), 6);
  EXPECT_EQ(formats[6].smallest(), 0.5);
  EXPECT_THAT(plan::to_string(formats), AllOf(HasSubstr("3.4028e+38"), HasSubstr("65504"), HasSubstr("448")));
}

}  // namespace
}  // namespace tessera
