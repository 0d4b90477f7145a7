#include "cli/bench/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tests/test_device.h"

namespace tessera::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<AttentionRow> samples() {
  return {{.method = "ring", .backend = "shm", .length = 128, .heads = 4, .kv_heads = 2, .ranks = 2, .time_us = 500, .other_us = 900, .sent_bytes = 4096},
          {.kind = "packed", .length = 64, .heads = 4, .kv_heads = 2, .documents = 4, .time_us = 10, .other_us = 80},
          {.kind = "window", .length = 64, .heads = 4, .kv_heads = 2, .window = 8, .time_us = 10, .other_us = 35, .whole_us = 25},
          {.kind = "memory", .length = 1024, .fused = 0.25, .unfused = 0.6}};
}

TEST(AttentionRows, SurviveJsonWithTheirRatios) {
  const std::string text = json_lines(samples());
  EXPECT_THAT(text, HasSubstr("\"rate_over_one\":0.9"));
  EXPECT_THAT(text, HasSubstr("\"mask_over_tiles\":8.0"));
  EXPECT_THAT(text, AllOf(HasSubstr("\"whole_over_window\":2.5"), HasSubstr("\"mask_over_window\":3.5")));
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1) lines.push_back(text.substr(begin, text.find('\n', begin) - begin));
  EXPECT_EQ(json_lines(read_attention_rows(lines)), text);
}

TEST(AttentionRows, AreATableForEachKindAndAPicture) {
  const std::string table = format_table(samples());
  for (const char* part : {"ring", "0.90", "4.00 KiB", "8.0", "2.5", "3.5", "25.0%", "60.0%"}) EXPECT_THAT(table, HasSubstr(part));
  EXPECT_THAT(format_table({samples().back()}), testing::Not(HasSubstr("over ranks")));
  EXPECT_THAT(plot(samples()), HasSubstr("one device"));
  EXPECT_THAT(plot({}), HasSubstr("nothing was measured"));
}

TEST(AttentionRows, EveryMethodHasOptions) {
  for (const auto& method : attention_methods()) EXPECT_TRUE(method.starts_with(to_string(attention_options(method).method))) << method;
}

/// On the CPU, and on the device that the suite runs on.
TEST(AttentionBench, TimesEveryMethodBesideOneDevice) {
  comm::run_ranks(2, [](comm::World& world) {
    comm::Recorder recorder;
    const AttentionCase what{.length = 24, .heads = 4, .kv_heads = 2, .features = 8, .device = testing_support::test_device(), .methods = attention_methods()};
    const auto rows = measure_attention(world, recorder, what, {.iterations = 2});
    ASSERT_EQ(rows.size(), attention_methods().size());
    for (const auto& row : rows) EXPECT_TRUE(row.time_us > 0 && row.other_us > 0 && row.time_us < 60e6) << row.method;
    if (world.rank() > 0) return;
    const AttentionRow packed = measure_packed(what, 3, {.iterations = 2});
    EXPECT_TRUE(packed.time_us > 0 && packed.other_us > 0);
    const AttentionRow window = measure_window(what, 5, {.iterations = 2});
    EXPECT_TRUE(window.time_us > 0 && window.other_us > 0 && window.whole_us > 0);
  });
}

/// Of what a block of LLaMA keeps between forward and backward, the part that its attention core keeps.
TEST(AttentionMemory, OfTheFusedCoreIsAShareThatNoLengthChanges) {
  const double fused = share_of_attention(256, kernels::KernelChoice::Auto);
  for (const int64_t length : {256, 1024, 4096, 16384, 65536}) {
    EXPECT_NEAR(share_of_attention(length, kernels::KernelChoice::Auto), fused, 0.02);
    if (length >= 4096) EXPECT_GT(share_of_attention(length, kernels::KernelChoice::Reference), 0.8);
  }
}

}  // namespace
}  // namespace tessera::bench
