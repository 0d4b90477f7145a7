// What is known of devices: the files that tessera brings, and a user's own.

#include "tessera/plan/device.h"

#include <fstream>

#include <gmock/gmock.h>

#include "tessera/plan/machine.h"
#include "tessera/plan/rates_picture.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kPlain = R"(name = "Mine"
memory_gb = 10
memory_gb_per_s = 100
devices_per_node = 2
[tflops]
bf16 = 3.5
[inside]
link = "wire"
gb_per_s = 8
latency_us = 2
)";

std::string refused(const std::string& text) {
  return testing_support::refusal([&] { (void)plan::parse_device(text, "mine.toml"); });
}

std::string with(std::string text, const std::string& old, const std::string& fresh) {
  text.replace(text.find(old), old.size(), fresh);
  return text;
}

TEST(Devices, ThoseThatTesseraBringsNameTheirSources) {
  for (const char* const fixed : {"v100-32gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "mi300x", "rtx4090", "tpu-v5p", "cpu"}) {
    EXPECT_THAT(plan::device_names(), Contains(fixed));
  }
  for (const std::string& name : plan::device_names()) {
    SCOPED_TRACE(name);
    const plan::Device device = plan::find_device(name);
    EXPECT_EQ(device.key, name);
    EXPECT_TRUE(device.sources.contains("device"));
    EXPECT_GE(device.memory_bytes, 24e9);
    // Narrower formats are as fast or faster, and no device of ours reads its memory in less than a millisecond or more than two seconds.
    double before = 0;
    for (const char* const format : {"fp32", "tf32", "bf16", "fp8", "fp4"}) {
      const auto found = device.flops_per_s.find(format);
      if (found == device.flops_per_s.end()) continue;
      EXPECT_GE(found->second, before) << format;
      before = found->second;
    }
    EXPECT_GT(device.memory_bytes / device.memory_bytes_per_s, 1e-3);
    EXPECT_LT(device.memory_bytes / device.memory_bytes_per_s, 2);
    if (device.between) {
      ASSERT_TRUE(device.inside);
      EXPECT_LT(device.between->bytes_per_s, device.inside->bytes_per_s);
    }
  }
  const plan::Device h100 = plan::find_device("h100");
  EXPECT_EQ(h100.memory_bytes, 80e9);
  EXPECT_EQ(h100.flops_per_s.at("bf16"), 989.4e12);
  EXPECT_EQ(h100.inside->bytes_per_s, 450e9);
  EXPECT_EQ(h100.devices_per_node, 8);
  EXPECT_FALSE(plan::find_device("v100-32gb").flops_per_s.contains("bf16"));
}

TEST(Devices, AUsersOwnFile) {
  const auto path = ::testing::TempDir() + "/tessera-mine.toml";
  std::ofstream(path) << kPlain;
  const plan::Device device = plan::find_device(path);
  EXPECT_EQ(device.name, "Mine");
  EXPECT_EQ(device.flops_per_s.at("bf16"), 3.5e12);
  EXPECT_EQ(device.inside->latency_s, 2e-6);
  EXPECT_FALSE(device.between);
  EXPECT_FALSE(device.power_w);
}

TEST(Devices, AContextIsAPartOfTheMemory) {
  const plan::Device device = plan::parse_device(with(kPlain, "memory_gb = 10", "memory_gb = 10\ncontext_gb = 2"), "mine.toml");
  EXPECT_EQ(device.context_bytes, 2e9);
  EXPECT_EQ(device.memory_bytes, 10e9);
  EXPECT_EQ(plan::parse_device(plan::to_toml(device), "again").context_bytes, 2e9);
  EXPECT_EQ(plan::parse_device(kPlain, "mine.toml").context_bytes, 0);
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = 10\ncontext_gb = 10")), HasSubstr("context_gb = 10: expected less than memory_gb"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = 10\ncontext_gb = -1")), HasSubstr("context_gb"));
}

TEST(Devices, HeldToLessPowerMultipliesByTheCubeRootOfIt) {
  const std::string held = with(kPlain, "memory_gb = 10", "memory_gb = 10\npower_w = 800\nheld_to_w = 100");
  const plan::Device device = plan::parse_device(held, "mine.toml");
  const plan::Machine whole = plan::machine_of(plan::parse_device(kPlain, "mine.toml")), half = plan::machine_of(device);
  EXPECT_DOUBLE_EQ(half.device.product_share, whole.device.product_share / 2);
  EXPECT_DOUBLE_EQ(half.device.attention_share, whole.device.attention_share / 2);
  EXPECT_EQ(half.device.memory_share, whole.device.memory_share);
  EXPECT_EQ(plan::parse_device(plan::to_toml(device), "again").held_to_w, 100);
  EXPECT_THAT(refused(with(held, "power_w = 800\n", "")), HasSubstr("at most those of power_w"));
  EXPECT_THAT(refused(with(held, "held_to_w = 100", "held_to_w = 900")), HasSubstr("held_to_w"));
}

TEST(Devices, WhatIsWrittenReadsBack) {
  for (const std::string& name : plan::device_names()) {
    const plan::Device device = plan::find_device(name), again = plan::parse_device(plan::to_toml(device), name);
    EXPECT_EQ(again.name, device.name);
    EXPECT_EQ(again.memory_bytes, device.memory_bytes);
    EXPECT_EQ(again.flops_per_s, device.flops_per_s);
    EXPECT_EQ(again.reaches, device.reaches);
    EXPECT_EQ(again.sources, device.sources);
    EXPECT_EQ(again.between.has_value(), device.between.has_value());
    if (device.inside) EXPECT_EQ(again.inside->bytes_per_s, device.inside->bytes_per_s);
    if (device.between) EXPECT_EQ(again.between->latency_s, device.between->latency_s);
    ASSERT_EQ(again.host.has_value(), device.host.has_value());
    if (device.host) EXPECT_EQ(again.host->bytes_per_s, device.host->bytes_per_s);
    if (device.host) EXPECT_EQ(again.host->memory_bytes_per_s, device.host->memory_bytes_per_s);
  }
}

TEST(Devices, ALinkMayTakeNoTimeOfItsOwn) {
  const plan::Device device = plan::parse_device(with(kPlain, "latency_us = 2", "latency_us = 0\ncontention = 0") + "[reaches]\ngap_us = 0\n", "mine.toml");
  EXPECT_EQ(device.inside->latency_s, 0);
  EXPECT_EQ(device.inside->contention, 0);
  EXPECT_EQ(plan::machine_of(device).device.kernel_gap, 0);
}

TEST(Devices, BadFilesAndNamesAreRefused) {
  EXPECT_THAT(testing_support::refusal([] { (void)plan::find_device("h10"); }), AllOf(HasSubstr("--device = h10"), HasSubstr("did you mean h100?")));
  EXPECT_THAT(testing_support::refusal([] { (void)plan::find_device(::testing::TempDir()); }), HasSubstr("is a folder"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = 1e300")), AllOf(HasSubstr("mine.toml: memory_gb"), HasSubstr("at most 1e+09")));
  EXPECT_THAT(refused("name = "), HasSubstr("mine.toml"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "")), HasSubstr("mine.toml: memory_gb is missing"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = -1")), HasSubstr("mine.toml: memory_gb = -1: expected a number above 0"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = \"10\"")), HasSubstr("expected a number"));
  EXPECT_THAT(refused(with(kPlain, "bf16", "bf61")), AllOf(HasSubstr("mine.toml: tflops.bf61 is unknown"), HasSubstr("bf16")));
  EXPECT_THAT(refused(with(kPlain, "latency_us", "latency")), HasSubstr("mine.toml: inside.latency is unknown; did you mean latency_us?"));
  EXPECT_THAT(refused(with(kPlain, "devices_per_node = 2", "devices_per_node = 1.5")),
              HasSubstr("devices_per_node = 1.5: expected a whole number, at least 1"));
  EXPECT_THAT(refused(with(kPlain, "memory_gb = 10", "memory_gb = 1e-12")), HasSubstr("memory_gb = 1e-12: expected at least a byte"));
  EXPECT_THAT(refused(with(kPlain, "devices_per_node = 2\n", "")), HasSubstr("devices_per_node is missing"));
  for (const char* const count : {"1e-12", "80.5", "0"}) {
    const std::string tiled = std::string(kPlain) + "[reaches]\nmultiprocessors = " + count + "\n";
    EXPECT_THAT(refused(tiled), AllOf(HasSubstr("reaches.multiprocessors = "), HasSubstr("expected a whole number, at least 1")));
  }
  EXPECT_THAT(refused(with(kPlain, "link = \"wire\"\n", "")), HasSubstr("inside.link is missing"));
  EXPECT_THAT(refused(std::string(kPlain) + "[host]\nlink = \"bus\"\ngb_per_s = 3\n"), HasSubstr("host.memory_gb_per_s is missing"));
}

TEST(RatesPicture, DrawsEachFormatBesideDataSheetsByGeneration) {
  plan::Device mine = plan::parse_device(with(kPlain, "bf16 = 3.5", "fp32 = 2\nbf16 = 7"), "/somewhere/mine.toml");
  const std::string picture = plan::rates_svg(mine, {plan::find_device("b200"), plan::find_device("v100-32gb"), plan::find_device("tpu-v5p")});
  EXPECT_THAT(picture, AllOf(HasSubstr(">mine.toml<"), HasSubstr(">3.5x, 7.00 TFLOP/s<"), HasSubstr(">28.1x, 2.25 PFLOP/s<"), HasSubstr(">tpu-v5p (2023)*<"),
                             HasSubstr(">fp4<"), HasSubstr(">fp8<")));
  EXPECT_LT(picture.find("v100-32gb (2017)"), picture.find("b200 (2024)"));
}

}  // namespace
}  // namespace tessera
