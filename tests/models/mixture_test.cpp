#include "tessera/models/mixture.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"
#include "tests/models/tiny.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

ModelConfig mixture_config(const std::string& router = "softmax") {
  ModelConfig config = tiny_config("mixtral");
  config.router = router;
  return config;
}

MixtureFeedForward mixture_of(const ModelConfig& config) {
  MixtureFeedForward mixture(config);
  nn::assign_paths(*mixture);
  materialize(*mixture, 3, testing_support::test_device());
  const at::NoGradGuard no_grad;
  for (const auto& parameter : mixture->parameters()) parameter.mul_(20);
  return mixture;
}

at::Tensor gated(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3) {
  return at::linear(at::silu(at::linear(x, w1)) * at::linear(x, w3), w2);
}

/// Every expert on every token, weighed by a matrix of weights that is zero where a token does not go.
at::Tensor by_all_experts(MixtureFeedForwardImpl& mixture, const at::Tensor& x, const at::Tensor& weights) {
  const auto parameters = mixture.named_parameters();
  const auto of = [&](const std::string& name, int64_t e) {
    const at::Tensor& weight = parameters["experts." + name];
    return weight.view({weights.size(1), -1, weight.size(1)})[e];
  };
  at::Tensor out = at::zeros_like(x);
  for (int64_t e = 0; e < weights.size(1); ++e) out = out + weights.select(1, e).unsqueeze(1) * gated(x, of("w1", e), of("w2", e), of("w3", e));
  return out;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-5 * expected.abs().max().item<double>()) << what;
}

TEST(Mixture, EqualsEveryExpertOnEveryTokenWeighed) {
  for (const bool norm : {true, false}) {
    ModelConfig config = mixture_config();
    config.norm_topk = norm;
    MixtureFeedForward mixture = mixture_of(config);
    const at::Tensor x = at::randn({3, 7, 24}), cotangent = at::randn({21, 24});
    const at::Tensor rows = x.view({21, 24}), router = mixture->router().weight;
    const auto run = [&](const std::function<at::Tensor()>& forward) {
      mixture->zero_grad();
      const at::Tensor out = forward();
      out.view({21, 24}).backward(cotangent);
      std::map<std::string, at::Tensor> result{{"out", out.detach().view({21, 24})}};
      for (const auto& parameter : mixture->named_parameters()) result[parameter.key()] = parameter.value().grad().clone();
      return result;
    };
    const auto ours = run([&] { return mixture(x); });
    const auto plain = run([&] {
      const at::Tensor p = at::softmax(at::linear(rows, router), -1);
      const at::Tensor chosen = std::get<1>(p.topk(2));
      at::Tensor weights = p * at::zeros_like(p).scatter(1, chosen, 1);
      if (norm) weights = weights / weights.sum(-1, true);
      return by_all_experts(*mixture, rows, weights);
    });
    for (const auto& [name, expected] : plain) expect_near(ours.at(name), expected, name + (norm ? "" : ", not normalized"));
  }
}

TEST(Mixture, SharedExpertsSeeEveryTokenThroughTheirGate) {
  ModelConfig config = mixture_config();
  config.shared_ffn_dim = 16;
  for (const bool gate : {false, true}) {
    config.shared_gate = gate;
    MixtureFeedForward mixture = mixture_of(config);
    config.shared_ffn_dim = 0;
    config.shared_gate = false;
    MixtureFeedForward without = mixture_of(config);
    config.shared_ffn_dim = 16;
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::randn({5, 24});
    const auto p = mixture->named_parameters();
    at::Tensor shared = gated(x, p["shared.w1.weight"], p["shared.w2.weight"], p["shared.w3.weight"]);
    if (gate) shared = shared * at::sigmoid(at::linear(x, p["shared_gate.weight"]));
    expect_near(mixture(x.unsqueeze(0))[0], without(x.unsqueeze(0))[0] + shared, gate ? "gated" : "shared");
  }
}

TEST(Mixture, ACapacityDropsInTrainingAlone) {
  MixtureFeedForward mixture = mixture_of(mixture_config());
  const at::Tensor x = at::ones({1, 10, 24});  // all tokens choose alike
  const at::Tensor whole = mixture(x);
  MoeConfig training;
  training.capacity_factor = 1;
  mixture->set_training(training);
  const at::Tensor dropped = mixture(x);  // 10 * 2 / 5 = 4 places each
  EXPECT_TRUE(at::allclose(dropped.narrow(1, 0, 4), whole.narrow(1, 0, 4), 1e-5));
  EXPECT_EQ(dropped.narrow(1, 4, 6).abs().sum().item<float>(), 0);
  EXPECT_EQ(mixture->router().statistics()[8].item<double>(), 12);
  mixture->eval();
  EXPECT_TRUE(at::allclose(mixture(x), whole, 1e-5));
}

TEST(Mixture, ACapacityOfAWholeNumberIsNoMoreThanThat) {
  MixtureFeedForward mixture = mixture_of(mixture_config());
  const int64_t tokens = 125;  // an even share is 125 * 2 / 5 = 50
  for (const auto& [factor, places] : {std::pair(1.1, 55), std::pair(1.0, 50), std::pair(1.11, 56), std::pair(2.2, 110)}) {
    MoeConfig training;
    training.capacity_factor = factor;
    mixture->set_training(training);
    mixture->router().clear_statistics();
    mixture(at::ones({1, tokens, 24}));  // all choose the same two experts
    EXPECT_EQ(mixture->router().statistics()[8].item<double>(), 2 * (tokens - places)) << factor;
  }
}

TEST(Mixture, ExpertsThatChooseHaveAnEvenLoad) {
  MixtureFeedForward mixture = mixture_of(mixture_config("expert_choice"));
  const at::Tensor x = at::randn({2, 5, 24}), rows = x.view({10, 24});
  const at::Tensor p = at::softmax(at::linear(rows, mixture->router().weight), -1);
  const at::Tensor chosen = std::get<1>(p.topk(4, 0));
  expect_near(mixture(x).view({10, 24}).detach(), by_all_experts(*mixture, rows, p * at::zeros_like(p).scatter(0, chosen, 1)).detach(), "expert choice");
}

TEST(Mixture, TheChoiceCanBeTakenFromElsewhere) {
  struct First : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next&) override {
      return {at::tensor(std::vector<int64_t>{0, 1}, at::kLong).expand({inputs[0].toTensor().size(0), 2}).contiguous()};
    }
  };
  MixtureFeedForward mixture = mixture_of(mixture_config());
  const at::Tensor x = at::randn({1, 6, 24});
  const auto attached = nn::attach(*mixture, "router.choice", std::make_shared<First>());
  mixture(x);
  EXPECT_EQ(mixture->router().statistics().narrow(0, 0, 2).sum().item<double>(), 12);
}

/// Of two windows of ten columns the first has four tokens, the other six; beside nothing, then, ten.
TEST(Mixture, PaddingTakesNoPlaceFromTokens) {
  const at::Tensor tokens = at::randn({1, 10, 24}), cotangent = at::randn({1, 10, 24});
  const at::Tensor lie = at::cat({at::arange(4), at::arange(10, 16)}), padding = at::ones({1, 20}, at::kBool).index_fill_(1, lie, false);
  const auto spread = [&](const at::Tensor& x, double elsewhere) { return at::full({1, 20, 24}, elsewhere).index_copy_(1, lie, x); };
  for (const std::string router : {"softmax", "sigmoid", "expert_choice"}) {
    for (const double factor : {0.0, 0.75, 1.0}) {
      SCOPED_TRACE(router + ", capacity " + std::to_string(factor));
      const auto run = [&](const at::Tensor& x, const at::Tensor& gradient, const nn::SampleContext& context) {
        MixtureFeedForward mixture = mixture_of(mixture_config(router));
        MoeConfig training;
        training.capacity_factor = factor;
        mixture->set_training(training);
        const nn::SampleScope scope(context);
        const at::Tensor out = mixture(x);
        out.backward(gradient);
        std::map<std::string, at::Tensor> result{{"out", out.detach()}, {"statistics", mixture->router().statistics()}};
        for (const auto& parameter : mixture->named_parameters()) result[parameter.key()] = parameter.value().grad();
        return result;
      };
      auto padded = run(spread(tokens, 0.4), spread(cotangent, 1), {.valid_tokens = 10, .padding = padding, .padding_size = 10});
      const auto alone = run(tokens, cotangent, {.valid_tokens = 10});
      EXPECT_EQ(padded["out"].index_select(1, padding[0].nonzero().view({-1})).abs().sum().item<float>(), 0);
      padded["out"] = padded["out"].index_select(1, lie);
      for (const auto& [name, expected] : alone) expect_near(padded.at(name), expected, name);
      if (factor == 1 && router != "expert_choice") EXPECT_GT(alone.at("statistics")[8].item<double>(), 0) << "something is dropped";
    }
  }
}

TEST(Mixture, ACapacityNeedsTheSizeOfThePadding) {
  MixtureFeedForward mixture = mixture_of(mixture_config());
  MoeConfig training;
  training.capacity_factor = 1;
  mixture->set_training(training);
  const nn::SampleScope scope({.padding = at::zeros({1, 6}, at::kBool)});
  EXPECT_THAT([&] { mixture(at::randn({1, 6, 24})); },
              ::testing::ThrowsMessage<ConfigError>(::testing::AllOf(::testing::HasSubstr("padding_size"), ::testing::HasSubstr("moe.capacity_factor"))));
}

TEST(Mixture, ADryRunTakesEvenLoads) {
  const auto model = on_meta([&] { return make_model(mixture_config()); });
  const at::Tensor tokens = at::empty({2, 7}, at::TensorOptions(at::kLong).device(at::kMeta));
  model->loss_sum(tokens, tokens).backward();
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
}

TEST(Mixture, NamesOfItsParametersAndBuffers) {
  ModelConfig config = mixture_config("sigmoid");
  config.layers = 1;
  config.shared_ffn_dim = 8;
  config.shared_gate = true;
  const auto model = tiny_model(config);
  std::set<std::string> names;
  for (const auto& parameter : nn::unique_parameters(*model)) {
    if (parameter.name.find("feed_forward") != std::string::npos) names.insert(parameter.name.substr(std::string("layers.0.feed_forward.").size()));
  }
  EXPECT_THAT(names, ::testing::ElementsAre("experts.w1", "experts.w2", "experts.w3", "router.weight", "shared.w1.weight", "shared.w2.weight",
                                            "shared.w3.weight", "shared_gate.weight"));
  EXPECT_TRUE(at::equal(model->named_buffers()["layers.0.feed_forward.router.bias"], at::zeros({5})));
}

}  // namespace
}  // namespace tessera
