#include <map>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/memory/host_cache.h"
#include "tessera/memory/memory.h"
#include "tessera/models/flops.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class EveryFamily : public ::testing::TestWithParam<std::string> {
 protected:
  ModelConfig config = tiny_config(GetParam());
  at::Tensor tokens = at::randint(config.vocab_size, {3, 7}), labels = at::randint(config.vocab_size, {3, 7});
};
INSTANTIATE_TEST_SUITE_P(Models, EveryFamily, ::testing::Values("llama", "gpt2", "mixtral", "mlp"), [](const auto& info) { return info.param; });

std::map<std::string, at::Tensor> gradients(LanguageModel& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& parameter : nn::unique_parameters(model)) all[parameter.name] = parameter.tensor.grad().clone();
  model.zero_grad();
  return all;
}

void expect_gradients_close(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  double largest = 0;
  for (const auto& [name, expected] : b) largest = std::max(largest, expected.abs().max().item<double>());
  for (const auto& [name, expected] : b) {
    // The bias of the keys has no gradient in theory (softmax does not see it): what there is, is rounding.
    const double scale = std::max(expected.abs().max().item<double>(), 1e-2 * largest);
    EXPECT_LE((a.at(name) - expected).abs().max().item<double>(), tolerance * scale) << name;
  }
}

TEST_P(EveryFamily, LinkByLinkIsTheWholeToTheBit) {
  auto model = tiny_model(config);
  model->loss_sum(tokens, labels).backward();
  const auto whole = gradients(*model);
  const TokenPlaces places;
  // As stages of a pipeline have it: what one gives is the next one's input, and its gradient comes back.
  const at::Tensor embedded = model->embed(tokens, places);
  at::Tensor stream = embedded.detach().requires_grad_();
  std::vector<std::pair<at::Tensor, at::Tensor>> cuts{{embedded, stream}};  // what a stage gave, and what the next one took
  for (int64_t i = 0; i < model->num_blocks(); ++i) {
    const at::Tensor given = model->run_blocks(stream, i, i + 1, tokens.size(1), places);
    stream = given.detach().requires_grad_();
    cuts.emplace_back(given, stream);
  }
  const at::Tensor loss = model->head()->loss_sum(model->normed(stream), labels);
  loss.backward();
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) cut->first.backward(cut->second.grad());
  EXPECT_TRUE(at::equal(loss, model->loss_sum(tokens, labels)));
  for (const auto& [name, gradient] : gradients(*model)) EXPECT_TRUE(at::equal(gradient, whole.at(name))) << name;
}

TEST_P(EveryFamily, LossAndGradientsEqualThePlainComposition) {
  for (const bool tied : {false, true}) {
    config.tie_embeddings = tied;
    auto model = tiny_model(config);
    enlarge(*model);
    labels[0][1] = -100;
    const at::Tensor loss = model->loss_sum(tokens, labels);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    loss.backward();
    const auto fused = gradients(*model);
    const kernels::KernelChoiceGuard plain(kernels::KernelChoice::Reference);
    const at::Tensor logits = model->logits(tokens);
    const at::Tensor expected = at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten(), {}, at::Reduction::Sum, -100);
    expected.backward();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    expect_gradients_close(fused, gradients(*model), 2e-5);
  }
}

TEST_P(EveryFamily, AsksTheSystemForNoMemoryInASteadyStep) {
  const CacheHostMemory cached;
  if (detail::host_cache_class(1 << 20) == detail::kNotCached || testing_support::test_device() != at::kCPU) GTEST_SKIP() << "nothing is cached here";
  config.dim = 48;
  config.ffn_dim = 128;
  auto model = tiny_model(config);
  const at::Tensor batch = at::randint(config.vocab_size, {16, 16});
  int64_t before = 0;
  for (int step = 0; step < 5; ++step) {
    model->loss_sum(batch, batch).backward();
    model->zero_grad();
    if (step == 0) EXPECT_GT(detail::host_cache_made(), 0) << "nothing here is large enough to be counted";
    if (step == 2) before = detail::host_cache_made();
  }
  EXPECT_EQ(detail::host_cache_made(), before);
}

TEST_P(EveryFamily, FutureTokensDoNotMatter) {
  auto model = tiny_model(config);
  enlarge(*model);
  const at::NoGradGuard no_grad;
  const at::Tensor before = model->logits(tokens);
  at::Tensor changed = tokens.clone();
  changed.narrow(1, 4, 3).copy_((tokens.narrow(1, 4, 3) + 1).remainder(config.vocab_size));
  const at::Tensor after = model->logits(changed);
  EXPECT_TRUE(at::allclose(before.narrow(1, 0, 4), after.narrow(1, 0, 4), 1e-5, 1e-5));
  EXPECT_FALSE(at::allclose(before.narrow(1, 4, 1), after.narrow(1, 4, 1), 1e-3, 1e-3));
}

TEST_P(EveryFamily, TheDryRunAllocatesTheBytesOfTheRealRun) {
  for (const bool tied : {false, true}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      config.tie_embeddings = tied;
      config.dropout = 0.1;
      const auto peak = [&](at::Device device) {
        MemoryTracker tracker;
        TrackMemory track(tracker);
        auto model = on_meta([&] { return make_model(config); });
        materialize(*model, 1, device);
        for (const auto& module : model->modules()) {
          if (auto* ours = dynamic_cast<nn::Module*>(module.get())) ours->set_compute_dtype(dtype);
        }
        const at::Tensor in = tokens.to(device, at::kLong, false, /*copy=*/true), target = labels.to(device, at::kLong, false, /*copy=*/true);
        for (int step = 1; step <= 2; ++step) {
          const nn::SampleScope scope({.seed = 1, .step = step, .expected_gradient = 0.5});
          model->loss_sum(in, target).backward(at::full({}, 0.5, at::TensorOptions(at::kFloat).device(device)));
        }
        return std::pair(tracker.peak(), tracker.current());
      };
      EXPECT_EQ(peak(at::kMeta), peak(at::kCPU)) << "tied " << tied << ", " << dtype;
    }
  }
}

TEST_P(EveryFamily, Bf16ComputesCloseToFp32AndReturnsFp32Gradients) {
  auto model = tiny_model(config);
  const double expected = model->loss_sum(tokens, labels).item<double>();
  for (const auto& module : model->modules()) {
    if (auto* ours = dynamic_cast<nn::Module*>(module.get())) ours->set_compute_dtype(at::kBFloat16);
  }
  EXPECT_EQ(model->logits(tokens).scalar_type(), at::kBFloat16);
  const at::Tensor loss = model->loss_sum(tokens, labels);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected, 0.01 * expected);
  loss.backward();
  for (const auto& parameter : nn::unique_parameters(*model)) EXPECT_EQ(parameter.tensor.grad().scalar_type(), at::kFloat) << parameter.name;
}

TEST_P(EveryFamily, DropoutDoesNotDependOnTheSplitOfTheBatch) {
  config.dropout = 0.2;
  auto model = tiny_model(config);
  const auto run = [&](int64_t first, int64_t size) {
    const nn::SampleScope scope({.seed = 3, .step = 4, .first_sample = first, .seq_len = 7});
    return model->logits(tokens.narrow(0, first, size));
  };
  const at::Tensor whole = run(0, 3);
  EXPECT_TRUE(at::allclose(at::cat({run(0, 1), run(1, 2)}), whole, 1e-5, 1e-6));
  EXPECT_FALSE(at::allclose(run(0, 1), model->logits(tokens.narrow(0, 0, 1)), 1e-3, 1e-4));
  model->eval();
  EXPECT_TRUE(at::equal(run(0, 3), model->logits(tokens)));
}

TEST_P(EveryFamily, RanksMayBeThreads) {
  config.dropout = 0.2;
  const auto run = [&](int64_t first) {
    auto model = tiny_model(config);
    const nn::SampleScope scope({.seed = 3, .step = 1, .first_sample = first});
    model->loss_sum(tokens, labels).backward();
    return gradients(*model);
  };
  std::vector<std::map<std::string, at::Tensor>> results(3);
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < results.size(); ++rank) ranks.emplace_back([&, rank] { results[rank] = run(3 * static_cast<int64_t>(rank)); });
  for (auto& rank : ranks) rank.join();
  for (size_t rank = 0; rank < results.size(); ++rank) expect_gradients_close(results[rank], run(3 * static_cast<int64_t>(rank)), 1e-5);
}

TEST_P(EveryFamily, WholeModelIsIntercepted) {
  struct Count : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      ++calls;
      return next(std::move(inputs));
    }
    int calls = 0;
  };
  auto model = tiny_model(config);
  const at::Tensor plain = model->loss_sum(tokens, labels);
  const auto count = std::make_shared<Count>();
  Attachment attached = nn::attach(*model, "", count);
  attached.add(nn::attach(*model, model->block_pattern(), count));
  attached.add(nn::attach(*model, "head", count));
  EXPECT_TRUE(at::equal(model->loss_sum(tokens, labels), plain));
  EXPECT_EQ(count->calls, 1 + 2 + 1);
  if (!model->attention_pattern().empty()) attached.add(nn::attach(*model, model->attention_pattern(), count));
  attached.add(nn::attach(*model, "**", count));
  model->logits(tokens);
  nn::check_no_bypass(*model);
}

TEST_P(EveryFamily, CountsItsParametersAndFlops) {
  auto model = tiny_model(config);
  int64_t total = 0, matrices = 0;
  for (const auto& parameter : nn::unique_parameters(*model)) {
    total += parameter.tensor.numel();
    if (parameter.tensor.dim() == 2 && parameter.name.find("embed") == std::string::npos) matrices += parameter.tensor.numel();
  }
  EXPECT_EQ(num_parameters(config), total);
  const int64_t idle = config.layers * (config.experts - config.experts_per_token) * 3 * 24 * 40;  // of experts that a token does not visit
  EXPECT_EQ(num_active_parameters(config), total - idle);
  matrices -= idle;
  EXPECT_EQ(num_matmul_parameters(config), matrices);
  const double attention = config.family == "mlp" ? 0 : 12.0 * 2 * 24 * 7;
  EXPECT_EQ(model_flops_per_token(config, 7), 6.0 * matrices + attention);
  config.sliding_window = 2;
  EXPECT_NEAR(model_flops_per_token(config, 7) - 6.0 * matrices, attention * (2 * 2 - 4.0 / 7) / 7, 1e-6) << "twice the pairs that are seen, but the diagonal";
  config.sliding_window = 7;
  EXPECT_EQ(model_flops_per_token(config, 7), 6.0 * matrices + attention);
  config.tie_embeddings = true;
  EXPECT_EQ(num_matmul_parameters(config), matrices);
  EXPECT_EQ(num_parameters(config), total - 37 * 24);
}

TEST(Models, ParameterNamesAreOurs) {
  std::vector<std::string> names;
  auto config = tiny_config("llama");
  config.layers = 1;
  for (const auto& parameter : nn::unique_parameters(*tiny_model(config))) names.push_back(parameter.name);
  EXPECT_THAT(names, ElementsAre("embed_tokens.weight", "layers.0.attention_norm.weight", "layers.0.attention.wq.weight", "layers.0.attention.wk.weight",
                                 "layers.0.attention.wv.weight", "layers.0.attention.wo.weight", "layers.0.ffn_norm.weight", "layers.0.feed_forward.w1.weight",
                                 "layers.0.feed_forward.w2.weight", "layers.0.feed_forward.w3.weight", "norm.weight", "head.weight"));
  auto gpt2 = tiny_config("gpt2");
  gpt2.tie_embeddings = true;
  const auto unique = nn::unique_parameters(*tiny_model(gpt2));
  EXPECT_EQ(unique[0].name, "embed_tokens.weight");
  EXPECT_THAT(unique[0].aliases, ElementsAre("head.weight"));
  EXPECT_EQ(unique[1].name, "embed_positions.weight");
  EXPECT_EQ(unique[4].name, "layers.0.attention.wq.weight");
  EXPECT_EQ(unique[5].name, "layers.0.attention.wq.bias");
}

TEST(Models, StartWithStandardDeviationsThatKeepTheStreamFlat) {
  auto config = tiny_config("llama");
  config.dim = 96;
  config.ffn_dim = 200;
  for (const auto& parameter : nn::unique_parameters(*tiny_model(config))) {
    const bool writes_to_stream = parameter.name.find("wo.") != std::string::npos || parameter.name.find("w2.") != std::string::npos;
    if (parameter.tensor.dim() == 2) {
      EXPECT_NEAR(parameter.tensor.std().item<double>(), writes_to_stream ? 0.01 : 0.02, 0.001) << parameter.name;
    } else {
      EXPECT_TRUE(at::equal(parameter.tensor, at::ones_like(parameter.tensor))) << parameter.name;
    }
  }
}

TEST(Models, DocumentsAndPositionsReachTheAttention) {
  for (const char* family : {"llama", "gpt2"}) {
    auto config = tiny_config(family);
    auto model = tiny_model(config);
    enlarge(*model);
    const at::NoGradGuard no_grad;
    const at::Tensor tokens = at::randint(config.vocab_size, {1, 6});
    const at::Tensor plain = model->logits(tokens);
    EXPECT_TRUE(at::allclose(model->forward(tokens, {}, at::arange(6)), plain, 1e-4, 1e-4));
    const at::Tensor order = at::tensor({5, 1, 0, 4, 2, 3});
    EXPECT_TRUE(at::allclose(model->forward(tokens.index_select(1, order), {}, order), plain.index_select(1, order), 1e-4, 1e-4));
    // A document that begins in the middle, at position 0 again, as if it were alone.
    const at::Tensor documents = at::tensor({0, 0, 1, 1, 1, 1}).unsqueeze(0);
    const at::Tensor both = model->forward(tokens, {}, {}, documents);
    EXPECT_TRUE(at::allclose(both.narrow(1, 0, 2), plain.narrow(1, 0, 2), 1e-4, 1e-4));
    EXPECT_FALSE(at::allclose(both.narrow(1, 3, 1), plain.narrow(1, 3, 1), 1e-3, 1e-3));
  }
}

std::string refusal(const ModelConfig& config) {
  try {
    tiny_model(config);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(Models, Refusals) {
  auto too_many = tiny_config("mixtral");
  too_many.experts_per_token = 6;
  EXPECT_THAT(refusal(too_many), HasSubstr("per_token = 6: expected 1 to experts = 5"));
  EXPECT_THAT(refusal(tiny_config("bert")), HasSubstr("model.family = 'bert'"));
  auto config = tiny_config("llama");
  config.heads = 5;
  EXPECT_THAT(refusal(config), HasSubstr("model.dim = 24 must be a positive multiple of model.heads = 5"));
  config.heads = 0;
  EXPECT_THAT(refusal(config), HasSubstr("model.heads = 0"));
  config = tiny_config("llama");
  config.kv_heads = 4;
  EXPECT_THAT(refusal(config), HasSubstr("model.heads = 6 must be a multiple of model.kv_heads = 4"));
  config = tiny_config("llama");
  config.heads = config.kv_heads.emplace(24);
  EXPECT_THAT(refusal(config), HasSubstr("dim / heads is even"));
  for (const char* family : {"llama", "gpt2"}) {
    auto model = tiny_model(tiny_config(family));
    EXPECT_THROW(model->logits(at::zeros({1, 17}, at::kLong)), ConfigError);
    EXPECT_THROW(model->logits(at::zeros({4}, at::kLong)), ConfigError);
  }
}

}  // namespace
}  // namespace tessera
