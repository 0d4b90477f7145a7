// Texts through the engine, on a model that is whole: what full forwards choose, whoever else is on the way.

#include "tessera/train/generate.h"

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

class Generation : public ::testing::TestWithParam<std::string> {
 protected:
  Generation() { enlarge(*model); }
  std::shared_ptr<LanguageModel> model = tiny_model(tiny_config(GetParam()));
  ForwardEngine engine{*model};
};
INSTANTIATE_TEST_SUITE_P(Models, Generation, ::testing::Values("llama", "gpt2", "mixtral", "mlp"), [](const auto& info) { return info.param; });

TEST_P(Generation, GreedyTextIsWhatFullForwardsChoose) {
  const std::vector<int64_t> prompt{3, 1, 4};
  const auto made = generate(engine, prompt, 6, {.temperature = 0});
  std::vector<int64_t> seen = prompt;
  for (const int64_t token : made) {
    const at::Tensor logits = model->logits(at::tensor(seen, at::kLong).unsqueeze(0))[0][-1];
    EXPECT_EQ(token, logits.argmax().item<int64_t>());
    seen.push_back(token);
  }
  EXPECT_EQ(made.size(), 6u);
  EXPECT_TRUE(model->is_training());
}

/// Of its newer half, and of more where the tokens that are still wanted leave room for it: for one, of all that the model can see.
TEST_P(Generation, AFullContextIsReadAgainFromItsEnd) {
  constexpr size_t kContext = 16;
  for (const auto& [length, wanted] :
       std::vector<std::pair<size_t, size_t>>{{3, 40}, {15, 3}, {16, 1}, {16, 2}, {16, 40}, {17, 1}, {40, 5}, {40, 9}, {40, 40}}) {
    std::vector<int64_t> seen;
    for (size_t i = 0; i < length; ++i) seen.push_back(static_cast<int64_t>(i * i % 37));
    const auto made = generate(engine, seen, static_cast<int64_t>(wanted), {.temperature = 0});
    ASSERT_EQ(made.size(), wanted);
    const auto end_of_text = [&](size_t still_wanted) {
      const size_t room = kContext + 1 - std::min(still_wanted, kContext);  // all but the last are read, too
      return std::vector<int64_t>(seen.end() - static_cast<int64_t>(std::max(kContext / 2, room)), seen.end());
    };
    std::vector<int64_t> context = length < kContext ? seen : end_of_text(wanted);
    for (size_t i = 0; i < made.size(); ++i) {
      ASSERT_EQ(made[i], model->logits(at::tensor(context, at::kLong).unsqueeze(0))[0][-1].argmax().item<int64_t>()) << "token " << i << " after " << length;
      seen.push_back(made[i]);
      context.push_back(made[i]);
      if (context.size() > kContext) context = end_of_text(wanted - i - 1);
    }
  }
}

TEST_P(Generation, GoesOnBeyondTheContextAndStopsWhereTold) {
  const std::vector<int64_t> long_prompt(40, 5);
  EXPECT_EQ(generate(engine, long_prompt, 50, {.seed = 2}).size(), 50u);
  EXPECT_EQ(generate(engine, {1}, 50, {.seed = 2}), generate(engine, {1}, 50, {.seed = 2}));
  EXPECT_NE(generate(engine, {1}, 50, {.seed = 2}), generate(engine, {1}, 50, {.seed = 3}));
  int64_t count = 0;
  const auto three = [&](size_t, int64_t) { return ++count < 3; };
  EXPECT_EQ(generate(engine, {{.prompt = {1}}}, {.max_new_tokens = 50, .on_token = three}).front().size(), 3u);
  const auto greedy = generate(engine, {1}, 4, {.temperature = 0});
  EXPECT_EQ(generate(engine, {{.prompt = {1}, .sample = {.temperature = 0}}}, {.max_new_tokens = 50, .end_of_text = greedy[0]}).front().size(), 1u);
  EXPECT_TRUE(generate(engine, {1}, 0, {}).empty());
  EXPECT_TRUE(generate(engine, {}, GenerateOptions{}).empty());
  EXPECT_THROW(generate(engine, {}, 1, SampleOptions{}), ConfigError);
}

/// The same arithmetic in another order of calls.
TEST_P(Generation, TextsDoNotDependOnThoseBesideThem) {
  std::vector<TextRequest> texts;
  for (const size_t length : {3, 17, 1, 20, 5}) {
    texts.push_back({.prompt = std::vector<int64_t>(length, static_cast<int64_t>(length)), .sample = {.temperature = 2, .seed = length}});
  }
  const auto one_by_one = generate(engine, texts, {.max_new_tokens = 25, .end_of_text = 7, .in_flight = 1});
  for (const int in_flight : {2, 3, 9}) EXPECT_EQ(generate(engine, texts, {.max_new_tokens = 25, .end_of_text = 7, .in_flight = in_flight}), one_by_one);
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(generate(engine, {texts[i]}, {.max_new_tokens = 25, .end_of_text = 7}).front(), one_by_one[i]);
  }
}

/// Frozen ones among them, also where a module has two parents.
TEST(ModeOfModules, IsWhatItWasBehindEvaluationAndGeneration) {
  const auto model = tiny_model(tiny_config("llama"));
  ForwardEngine engine(*model);
  const auto flags = [&] {
    std::vector<bool> all;
    for (const auto& module : model->modules()) all.push_back(module->is_training());
    return all;
  };
  const auto at_path = [&](const std::string& path) { return model->named_modules()[path]; };
  at_path("layers.1")->register_module("beside", at_path("layers.0.attention.wq"));
  const auto expect_kept = [&](const char* what) {
    const auto before = flags();
    const std::vector<int64_t> prompt{3, 1, 4};
    generate(engine, prompt, 2, {.temperature = 0});
    EXPECT_EQ(flags(), before) << what;
    engine.logits(at::tensor(prompt).unsqueeze(0));
    EXPECT_EQ(flags(), before) << what;
  };
  at_path("layers.0")->eval();
  expect_kept("a frozen block");
  model->train();
  at_path("layers.1")->eval();
  at_path("layers.0.attention.wq")->train();
  expect_kept("a frozen block with a part that is trained");
  model->eval();
  at_path("layers.0.attention.wq")->train();
  expect_kept("a part of a model in evaluation mode");
}

TEST(GenerationOfMixtures, ExpertsThatChooseWouldSeeWhatIsYetToBeDrawn) {
  ModelConfig config = tiny_config("mixtral");
  config.router = "expert_choice";
  const auto model = tiny_model(config);
  ForwardEngine engine(*model);
  const std::vector<int64_t> prompt{1, 2};
  for (const bool asked_before : {true, false}) {
    try {
      asked_before ? check_generates(config) : (void)generate(engine, prompt, 2, {.temperature = 0});
      FAIL();
    } catch (const ConfigError& refusal) {
      EXPECT_THAT(refusal.what(), ::testing::HasSubstr("model.router = expert_choice"));
    }
  }
}

}  // namespace
}  // namespace tessera
