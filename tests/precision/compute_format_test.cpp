#include "tessera/precision/compute_format.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/kernels/products.h"
#include "tessera/precision/policy.h"

namespace tessera::precision {
namespace {

using kernels::Bf16ProductsGuard;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

Config asking(const std::string& compute) {
  Config config;
  config.precision.compute = compute;
  return config;
}

/// What settle_compute() says.
template <class Settle>
std::string said(const Settle& settle) {
  ::testing::internal::CaptureStderr();
  settle();
  return ::testing::internal::GetCapturedStderr();
}

TEST(ComputeFormat, AutoBecomesWhatTheMachineMultiplies) {
  for (const bool native : {true, false}) {
    const Bf16ProductsGuard guard(native);
    for (const auto& [device, name] : {std::pair(at::kCPU, "this CPU"), {at::kMeta, "the device that is planned for"}}) {
      Config config = asking("auto");
      EXPECT_THAT([&] { policy_from(config.precision); }, ThrowsMessage<ConfigError>(HasSubstr("precision::settle_compute()"))) << "no rank decides by itself";
      const auto line = said([&] { settle_compute(config, device); });
      EXPECT_EQ(config.precision.compute, native ? "bf16" : "fp32");
      EXPECT_EQ(config.asked.at("precision.compute"), "auto");
      EXPECT_THAT(line, HasSubstr(native ? std::string("precision.compute = auto: bf16, which ") + name + " multiplies"
                                         : std::string("precision.compute = auto: fp32, as ") + name + " does not"));
      EXPECT_EQ(policy_from(config.precision).compute, native ? at::kBFloat16 : at::kFloat);
      const Config before = config;
      EXPECT_EQ(said([&] { settle_compute(config, device); }), "") << "once a run";
      EXPECT_EQ(config, before);
    }
  }
}

/// Of a device that a plan is made for this machine's CPU says nothing; without one meta stands for the CPU.
TEST(ComputeFormat, WhatADeviceOfAPlanMultipliesIsNotSaidOfThisCpu) {
  const std::string& reason = kernels::cpu_formats().reason;
  for (const bool native : {true, false}) {
    const Bf16ProductsGuard guard(native);
    Config config = asking("auto");
    EXPECT_THAT(said([&] { settle_compute(config, at::kMeta); }), AllOf(Not(HasSubstr(reason)), Not(HasSubstr("CPU"))));
  }
  Config config = asking("auto");
  EXPECT_THAT(said([&] { settle_compute(config, at::kMeta); }), AllOf(HasSubstr("this CPU"), HasSubstr(reason)));
}

TEST(ComputeFormat, BfloatByNameStaysAndSaysThatItIsWidened) {
  Config config = asking("bf16");
  const Bf16ProductsGuard widened(/*native=*/false);
  EXPECT_THAT(said([&] { settle_compute(config, at::kCPU); }), AllOf(HasSubstr("precision.compute = bf16: this CPU does not multiply bf16 ("),
                                                                     HasSubstr("rounded once"), HasSubstr("precision.compute = auto")));
  EXPECT_EQ(config.precision.compute, "bf16");
  EXPECT_THAT(to_toml(config), HasSubstr("\ncompute = \"bf16\"\n"));
  const Bf16ProductsGuard native(/*native=*/true);
  Config other = asking("bf16");
  EXPECT_EQ(said([&] { settle_compute(other, at::kCPU); }), "");
  for (const char* format : {"fp32", "tf32", "fp16", "fp8"}) {
    Config named = asking(format);
    EXPECT_EQ(said([&] { settle_compute(named, at::kCPU); }), "");
    EXPECT_EQ(named.precision.compute, format);
  }
  Config silent = asking("auto");
  EXPECT_EQ(said([&] { settle_compute(silent, at::kCPU, Saying::Silent); }), "");
}

/// Hosts of two kinds: one answer for all ranks, said once.
TEST(ComputeFormat, TheWeakestRankDecides) {
  for (const int weak : {-1, 0, 2}) {
    for (const std::string asked : {"auto", "bf16"}) {
      std::vector<Config> settled(3, asking(asked));
      const auto line = said([&] {
        comm::run_ranks(3, [&](comm::World& world) {
          const Bf16ProductsGuard guard(/*native=*/world.rank() != weak);
          settle_compute(settled[static_cast<size_t>(world.rank())], at::kCPU, world.group());
        });
      });
      for (const auto& config : settled) EXPECT_EQ(config.precision.compute, asked == "bf16" || weak < 0 ? "bf16" : "fp32");
      if (weak >= 0)
        EXPECT_THAT(line, HasSubstr("precision.compute = " + asked + ": " + (asked == "auto" ? "fp32, as " : "") + "the CPU of rank " + std::to_string(weak)));
      EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), weak < 0 && asked == "bf16" ? 0 : 1) << line;
    }
  }
}

}  // namespace
}  // namespace tessera::precision
