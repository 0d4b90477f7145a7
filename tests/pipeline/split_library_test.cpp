#include <gmock/gmock.h>

#include "tessera/models/model.h"
#include "tessera/nn/layers.h"
#include "tests/test_device.h"
#include "tests/models/tiny.h"
#include "tests/pipeline/split_support.h"

/// The library's own models, which need no tape (they are chains), recorded all the same: what users build of our modules.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;

TEST(SplitLibrary, LanguageModelsInThreeStages) {
  for (const char* family : {"llama", "gpt2"}) {
    ModelConfig config = tiny_config(family);
    config.layers = 3;
    const std::vector<at::Tensor> inputs{at::randint(37, {2, 8}, at::detail::createCPUGenerator(1), at::kLong),
                                         at::randint(37, {2, 8}, at::detail::createCPUGenerator(2), at::kLong)};
    const auto whole = tiny_model(config);
    auto model = on_meta([&] { return make_model(config); });
    const auto split = pipeline::split(model, inputs, {{"layers.1", Beginning}, {"layers.2", End}});
    EXPECT_EQ(split.takes(0), (std::vector<int>{0})) << family;
    EXPECT_EQ(split.takes(1), (std::vector<int>{})) << family;
    EXPECT_EQ(split.takes(2), (std::vector<int>{1})) << family;
    for (int s = 0; s < split.stages(); ++s) materialize(*split.module(s), 1, testing_support::test_device());
    const auto expected = run_pass(*whole, [&] { return eager(forward_of(whole), inputs); });
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
    // With memory, too.
    const auto again = pipeline::split(whole, inputs, {{"layers.1", Beginning}});
    expect_same(run_pass(*whole, [&] { return staged(again, inputs); }), expected);
  }
}

TEST(SplitLibrary, TiedEmbeddings) {
  ModelConfig config = tiny_config("llama");
  config.tie_embeddings = true;
  const std::vector<at::Tensor> inputs{at::randint(37, {2, 8}, at::detail::createCPUGenerator(1), at::kLong),
                                       at::randint(37, {2, 8}, at::detail::createCPUGenerator(2), at::kLong)};
  const auto model = tiny_model(config);
  const auto split = expect_split_equals_whole(model, inputs, {{"layers.1", Beginning}});
  ASSERT_EQ(split.recording()->stages.shared.size(), 1);
  EXPECT_EQ(split.recording()->stages.shared[0].name, "embed_tokens.weight");
  EXPECT_NE(split.module(1)->named_parameters().find("head.weight"), nullptr);
}

TEST(SplitLibrary, OnlyOneStageKeepsItsMemory) {
  const auto model = tiny_model(tiny_config("llama"));
  const auto split = pipeline::split(model, {at::zeros({2, 8}, at::kLong), at::zeros({2, 8}, at::kLong)}, {{"layers.1", Beginning}});
  split.keep_only({1});
  for (const auto& item : split.module(0)->named_parameters()) EXPECT_TRUE(item.value().is_meta()) << item.key();
  for (const auto& item : split.module(1)->named_parameters()) EXPECT_FALSE(item.value().is_meta()) << item.key();
}

}  // namespace
}  // namespace tessera
