#include "tessera/lora/lora.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct NetImpl : nn::Module {
  NetImpl() : first(5, 7), second(torch::nn::LinearOptions(7, 3).bias(false)), plain(3, 3) {
    register_module("first", first);
    register_module("second", second);
    register_module("plain", plain);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::relu(first(x))); }
  nn::Linear first, second;
  torch::nn::Linear plain;
};
TESSERA_MODULE(Net);

at::Tensor parameter(torch::nn::Module& module, const std::string& name) { return module.named_parameters()[name]; }

TEST(Lora, BeginsAsTheModelAndTrainsAdaptersAlone) {
  Net net;
  const at::Tensor x = at::randn({4, 5}), before = net(x);
  const auto adapted = lora::attach(*net, {.modules = {"first", "sec*"}, .rank = 2});
  EXPECT_TRUE(at::equal(net(x), before));
  net(x).sum().backward();
  for (const auto& each : net->named_parameters()) {
    EXPECT_EQ(each.value().requires_grad(), each.key().find("lora_") != std::string::npos) << each.key();
    if (!each.value().requires_grad()) EXPECT_FALSE(each.value().grad().defined()) << each.key();
  }
  EXPECT_EQ(parameter(*net, "first.lora_a").sizes(), at::IntArrayRef({2, 5}));
  EXPECT_EQ(parameter(*net, "first.lora_b").sizes(), at::IntArrayRef({7, 2}));
  EXPECT_GT(parameter(*net, "first.lora_a").abs().max().item<double>(), 0);
  EXPECT_GT(parameter(*net, "second.lora_b").grad().abs().max().item<double>(), 0);
}

TEST(Lora, AddsTheScaledProduct) {
  torch::manual_seed(1);  // of some 400 draws, one is a rounding beyond the bound
  for (const double alpha : {16.0, 1.0}) {
    Net net;
    const auto adapted = lora::attach(*net, {.modules = {"second"}, .rank = 3, .alpha = alpha});
    const torch::NoGradGuard no_grad;
    const at::Tensor a = parameter(*net, "second.lora_a"), b = parameter(*net, "second.lora_b");
    b.normal_();
    const at::Tensor x = at::randn({2, 4, 7});
    const at::Tensor merged = net->second->weight + alpha / 3 * at::mm(b, a);
    EXPECT_TRUE(at::allclose(net->second(x), at::matmul(x, merged.t()), 1e-5, 1e-6));
  }
}

TEST(Lora, DetachesAndLeavesTheWeights) {
  Net net;
  const at::Tensor x = at::randn({4, 5}), before = net(x);
  {
    const auto adapted = lora::attach(*net, {.modules = {"first"}});
    const torch::NoGradGuard no_grad;
    parameter(*net, "first.lora_b").fill_(1);
    EXPECT_FALSE(at::equal(net(x), before));
  }
  EXPECT_TRUE(at::equal(net(x), before));
}

TEST(Lora, DrawsTheSameOnMetaAndWithMemory) {
  Net net;
  const auto one = lora::attach(*net, {.modules = {"first"}, .seed = 5});
  auto meta = on_meta([] { return Net(); });
  const auto other = lora::attach(*meta, {.modules = {"first"}});
  materialize(*meta, 5);
  EXPECT_TRUE(at::equal(parameter(*net, "first.lora_a"), parameter(*meta, "first.lora_a")));
  EXPECT_EQ(parameter(*meta, "first.lora_b").abs().max().item<double>(), 0);
}

TEST(Lora, DropsByCounterWhileTraining) {
  Net net;
  const auto adapted = lora::attach(*net, {.modules = {"first"}, .dropout = 0.5});
  const torch::NoGradGuard no_grad;
  parameter(*net, "first.lora_b").fill_(1);
  const at::Tensor x = at::randn({6, 5});
  const auto at_step = [&](int64_t step, int64_t first, const at::Tensor& rows) {
    const nn::SampleScope scope({.seed = 1, .step = step, .first_sample = first});
    return net(rows);
  };
  const at::Tensor whole = at_step(1, 0, x);
  EXPECT_TRUE(at::equal(whole, at_step(1, 0, x)));
  EXPECT_FALSE(at::equal(whole, at_step(2, 0, x)));
  EXPECT_TRUE(at::allclose(whole.narrow(0, 4, 2), at_step(1, 4, x.narrow(0, 4, 2))));
  net->eval();
  EXPECT_TRUE(at::equal(at_step(1, 0, x), at_step(2, 0, x)));
}

TEST(Lora, DropsApartOnRanksThatAreSeededAlike) {
  Net net;
  const auto adapted = lora::attach(*net, {.modules = {"first"}, .dropout = 0.5});
  const torch::NoGradGuard no_grad;
  parameter(*net, "first.lora_b").fill_(1);
  const at::Tensor x = at::randn({6, 5});
  const auto on_rank = [&](int64_t replica) {
    const auto apart = nn::drop_apart(*net, replica, 2);
    torch::manual_seed(3);
    return net(x);
  };
  EXPECT_TRUE(at::equal(on_rank(0), on_rank(0)));
  EXPECT_FALSE(at::equal(on_rank(0), on_rank(1)));
}

struct PlainNetImpl : torch::nn::Module {
  PlainNetImpl() : first(5, 7), second(torch::nn::LinearOptions(7, 3).bias(false)), third(3, 3) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  at::Tensor forward(const at::Tensor& x) { return third(second(at::relu(first(x)))); }
  torch::nn::Linear first, second, third;
};

at::Tensor with_merged(const PlainNetImpl& net, const at::Tensor& x, double scale) {
  const auto weight = [&](const torch::nn::Linear& linear) {
    const auto own = linear->named_parameters(false);
    return own.contains("lora_a") ? linear->weight + scale * at::mm(own["lora_b"], own["lora_a"]) : linear->weight;
  };
  const at::Tensor h = at::relu(at::linear(x, weight(net.first), net.first->bias));
  return at::linear(at::linear(h, weight(net.second)), weight(net.third), net.third->bias);
}

TEST(Lora, AddsItsTermsToLibtorchsOwnLinear) {
  PlainNetImpl net;
  const at::Tensor x = at::randn({4, 5}), stacked = at::randn({2, 3, 5}), before = net.forward(x);
  {
    const auto adapted = lora::attach(net, {.modules = {"first", "second"}, .rank = 2, .alpha = 6});
    EXPECT_TRUE(at::equal(net.forward(x), before));
    for (const auto& each : net.named_parameters()) {
      EXPECT_EQ(each.value().requires_grad(), each.key().find("lora_") != std::string::npos) << each.key();
      const torch::NoGradGuard no_grad;
      if (each.key().ends_with("lora_b")) each.value().normal_();
    }
    for (const at::Tensor& input : {x, stacked}) {
      net.zero_grad();
      net.forward(input).square().sum().backward();
      std::vector<at::Tensor> gradients;
      for (const auto& each : net.named_parameters()) gradients.push_back(each.value().grad().defined() ? each.value().grad().clone() : at::Tensor());
      EXPECT_TRUE(at::allclose(net.forward(input), with_merged(net, input, 3), 1e-5, 1e-6));
      net.zero_grad();
      with_merged(net, input, 3).square().sum().backward();
      size_t i = 0;
      for (const auto& each : net.named_parameters()) {
        if (const at::Tensor& gradient = gradients[i++]; gradient.defined()) EXPECT_TRUE(at::allclose(gradient, each.value().grad(), 1e-4, 1e-5)) << each.key();
      }
    }
    EXPECT_FALSE(at::equal(net.forward(x), before));
  }
  EXPECT_TRUE(at::equal(net.forward(x), before));
}

/// Backward multiplies by square weights, too, whose transpose has their shape.
TEST(Lora, SquareLayersOfLibtorchGetTheGradientsOfTheirSum) {
  for (const int64_t size : {6, 1}) {
    const torch::nn::Linear first(size, size), second(torch::nn::LinearOptions(size, size).bias(false)), third(size, size);
    const std::vector<torch::nn::Linear> layers{first, second, third};
    torch::nn::Sequential net(first, torch::nn::Tanh(), second, torch::nn::Tanh(), third);
    const auto adapted = lora::attach(*net, {.modules = {"*"}, .rank = 2, .alpha = 2});
    for (const auto& each : net->named_parameters()) {
      if (each.key().ends_with("lora_b")) each.value().data().normal_();
    }
    for (const auto& shape : {std::vector<int64_t>{4, size}, {2, 3, size}}) {
      const at::Tensor x = at::randn(shape);
      std::vector<at::Tensor> gradients, reference, wanted;
      for (const auto& each : net->named_parameters()) {
        if (each.value().requires_grad()) wanted.push_back(each.value());
      }
      ASSERT_EQ(wanted.size(), 6);
      gradients = torch::autograd::grad({net->forward(x).square().sum()}, wanted);
      at::Tensor h = x;
      for (const auto& layer : layers) {
        const auto own = layer->named_parameters(false);
        h = at::linear(layer.ptr() == first.ptr() ? h : at::tanh(h), layer->weight + own["lora_b"].mm(own["lora_a"]), layer->bias);
      }
      reference = torch::autograd::grad({h.square().sum()}, wanted);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(gradients[i], reference[i], 1e-4, 1e-5)) << size << ", " << i;
    }
  }
}

struct TiedNetImpl : torch::nn::Module {
  explicit TiedNetImpl(bool is_tied = true) : is_tied(is_tied) {
    register_module("encoder", encoder);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return decoded(at::tanh(at::addmm(encoder->bias, x, encoder->weight.t(), 1, 0.5))); }
  at::Tensor by_hand(const at::Tensor& x, const at::Tensor& term) {
    return decoded(at::tanh(encoder->bias + 0.5 * at::linear(x, encoder->weight.detach().clone() + term)));
  }
  at::Tensor decoded(const at::Tensor& h) { return is_tied ? at::mm(h, encoder->weight) : head(h); }
  torch::nn::Linear encoder{7, 5}, head{5, 3};
  bool is_tied;
};

/// The gradient of a product by the weight as it is, and derivatives of gradients, are products by its transpose: libtorch's own, which get no term.
TEST(Lora, LibtorchsProductsOfGradientsGetNoTerm) {
  for (const bool is_tied : {true, false}) {
    TiedNetImpl net(is_tied);
    const auto adapted = lora::attach(net, {.modules = {"encoder"}, .rank = 2, .alpha = 4});
    const at::Tensor a = parameter(net, "encoder.lora_a"), b = parameter(net, "encoder.lora_b");
    b.data().normal_();
    const at::Tensor x = at::randn({4, 7}).requires_grad_();
    for (const bool is_penalty : {false, true}) {
      const auto gradients = [&](const at::Tensor& y) {
        at::Tensor loss = y.square().sum();
        if (is_penalty) loss = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0].square().sum();
        return torch::autograd::grad({loss}, {a, b, x});
      };
      const auto computed = gradients(net.forward(x)), expected = gradients(net.by_hand(x, 2 * at::mm(b, a)));
      for (size_t i = 0; i < computed.size(); ++i) {
        EXPECT_TRUE(at::allclose(computed[i], expected[i], 1e-4, 1e-4 * expected[i].abs().max().item<double>())) << is_tied << is_penalty << ", " << i;
      }
    }
  }
}

/// A program's own checkpoint: its function makes the forward pass again in backward.
struct MadeAgain : torch::autograd::Function<MadeAgain> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, TiedNetImpl* net) {
    context->save_for_backward({x});
    context->saved_data["net"] = reinterpret_cast<int64_t>(net);
    return net->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_gradients(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor y = reinterpret_cast<TiedNetImpl*>(context->saved_data["net"].toInt())->forward(x);
    y.backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(Lora, AForwardPassOfLibtorchsLinearThatIsMadeAgainHasItsTerm) {
  TiedNetImpl net;
  const auto adapted = lora::attach(net, {.modules = {"encoder"}, .rank = 2, .alpha = 4});
  parameter(net, "encoder.lora_b").data().normal_();
  const at::Tensor x = at::randn({4, 7}).requires_grad_();
  const auto gradients = [&](const at::Tensor& y) {
    net.zero_grad();
    x.mutable_grad() = at::Tensor();
    y.square().sum().backward();
    return std::vector{parameter(net, "encoder.lora_a").grad().clone(), parameter(net, "encoder.lora_b").grad().clone(), x.grad().clone()};
  };
  const auto plain = gradients(net.forward(x)), again = gradients(MadeAgain::apply(x, &net));
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::allclose(again[i], plain[i], 1e-5, 1e-5)) << i;
}

/// A decoder that a program differentiates by itself, with the weight's transpose.
struct DecodedByHand : torch::autograd::Function<DecodedByHand> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& h, const at::Tensor& weight) {
    context->save_for_backward({weight});
    return at::mm(h, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    return {at::mm(gradients[0], context->get_saved_variables()[0].t()), at::Tensor()};
  }
};

TEST(Lora, WhatMayBeAGradientOfTheProgramsOwnIsRefused) {
  TiedNetImpl net;
  const auto adapted = lora::attach(net, {.modules = {"encoder"}, .rank = 2, .alpha = 4});
  const at::Tensor y = DecodedByHand::apply(net.encoder(at::randn({4, 7})).tanh(), net.encoder->weight);
  EXPECT_THAT([&] { y.sum().backward(); }, ThrowsMessage<ConfigError>(HasSubstr("LoRA of 'encoder', libtorch's own Linear: a backward of the program's own")));
}

TEST(Lora, DropsFromWhatLibtorchsLinearSees) {
  PlainNetImpl net;
  const auto adapted = lora::attach(net, {.modules = {"first"}, .dropout = 0.5});
  const torch::NoGradGuard no_grad;
  parameter(net, "first.lora_b").fill_(1);
  const at::Tensor x = at::randn({6, 5});
  const auto on_rank = [&](int64_t replica) {
    const auto apart = nn::drop_apart(net, replica, 2);
    torch::manual_seed(3);
    return net.forward(x);
  };
  EXPECT_TRUE(at::equal(on_rank(0), on_rank(0)));
  EXPECT_FALSE(at::equal(on_rank(0), on_rank(1)));
  net.eval();
  EXPECT_TRUE(at::allclose(on_rank(1), with_merged(net, x, 2), 1e-5, 1e-6));
}

/// By a weight of two layers of libtorch's nobody can tell which of them multiplies. An embedding does not.
TEST(Lora, RefusesLayersOfLibtorchThatShareAWeight) {
  const auto shared = [](auto other) {
    torch::nn::Sequential net(torch::nn::Linear(6, 6), other);
    other->weight = net->template ptr<torch::nn::LinearImpl>(0)->weight;
    return net;
  };
  for (const std::vector<std::string>& modules : {std::vector<std::string>{"0"}, {"1"}, {"*"}}) {
    torch::nn::Sequential net = shared(torch::nn::Linear(6, 6));
    EXPECT_THAT([&] { (void)lora::attach(*net, {.modules = modules}); },
                ThrowsMessage<ConfigError>(::testing::AllOf(HasSubstr("cannot be told apart"), HasSubstr("'0'"), HasSubstr("'1'"))));
  }
  torch::nn::Sequential tied = shared(torch::nn::Embedding(6, 6));
  EXPECT_NO_THROW((void)lora::attach(*tied, {.modules = {"0"}}));
}

TEST(Lora, TrainsWhatIsNamedBeside) {
  Net net;
  const auto adapted = lora::attach(*net, {.modules = {"first"}, .trained = {"*.bias"}});
  EXPECT_TRUE(net->first->bias.requires_grad());
  EXPECT_FALSE(net->first->weight.requires_grad());
}

TEST(Lora, RefusesByName) {
  Net net;
  const auto attach = [&](std::vector<std::string> modules, std::vector<std::string> trained = {}, int64_t rank = 8) {
    return [&net, modules, trained, rank] { (void)lora::attach(*net, {.modules = modules, .rank = rank, .trained = trained}); };
  };
  EXPECT_THAT(attach({"fist"}), ThrowsMessage<ConfigError>(HasSubstr("the nearest path is 'first'")));
  EXPECT_THAT(attach({"first"}, {"head.*"}), ThrowsMessage<ConfigError>(HasSubstr("'head.*' names no parameter")));
  EXPECT_THAT(attach({"first"}, {"plain.bais"}),
              ThrowsMessage<ConfigError>(HasSubstr("the nearest is 'plain.bias' ('*' is any text between two dots, '**' any number of parts)")));
  EXPECT_THAT(attach({"first"}, {}, 0), ThrowsMessage<ConfigError>(HasSubstr("rank = 0")));
  EXPECT_THAT(attach({}), ThrowsMessage<ConfigError>(HasSubstr("no modules are named")));
}

at::Tensor filled(torch::nn::Module& module, const std::string& name) {
  const torch::NoGradGuard no_grad;
  return parameter(module, name).fill_(1);
}

TEST(Lora, AttachesAgainToWhatHasItsMatrices) {
  for (const std::string layer : {"first", "plain"}) {
    Net net;
    const auto output = [&] { return layer == "first" ? net(at::ones({4, 5})) : net->plain(at::ones({4, 3})); };
    const at::Tensor before = output();
    auto adapted = lora::attach(*net, {.modules = {layer}});
    filled(*net, layer + ".lora_b");
    const at::Tensor with = output();
    EXPECT_THAT([&] { adapted = lora::attach(*net, {.modules = {layer}}); },
                ThrowsMessage<ConfigError>(HasSubstr("LoRA of '" + layer + "': it has adapters, and what attached them is alive")));
    adapted.detach();
    EXPECT_TRUE(at::equal(output(), before));
    EXPECT_THAT([&] { adapted = lora::attach(*net, {.modules = {layer}, .rank = 2}); }, ThrowsMessage<ConfigError>(HasSubstr("its matrices are of rank 8")));
    adapted = lora::attach(*net, {.modules = {layer, layer}});
    EXPECT_TRUE(at::equal(output(), with)) << layer;
    EXPECT_FALSE(at::equal(with, before));
  }
}

TEST(Lora, ASecondCallForOtherLayersLeavesTheFirstOnesAsTheyWereTrained) {
  Net net;
  const auto first = lora::attach(*net, {.modules = {"first"}});
  filled(*net, "first.lora_b");
  const auto second = lora::attach(*net, {.modules = {"second"}});
  EXPECT_EQ(parameter(*net, "first.lora_b").min().item<double>(), 1);
  EXPECT_EQ(parameter(*net, "second.lora_b").abs().max().item<double>(), 0);
  EXPECT_GT(parameter(*net, "second.lora_a").abs().max().item<double>(), 0);
}

TEST(Lora, ASecondCallLeavesWhatTheFirstWasToldToTrain) {
  Net net;
  const auto trained = [&] {
    std::vector<std::string> names;
    for (const auto& each : net->named_parameters()) {
      if (each.value().requires_grad() && each.key().find("lora_") == std::string::npos) names.push_back(each.key());
    }
    return names;
  };
  auto first = lora::attach(*net, {.modules = {"first"}, .trained = {"first.bias", "plain.bias"}});
  for (const at::Tensor& parameter : net->parameters()) parameter.set_data(parameter.detach().clone());  // as torch::load may
  auto second = lora::attach(*net, {.modules = {"second"}, .trained = {"plain.bias", "plain.weight"}});
  EXPECT_THAT(trained(), testing::UnorderedElementsAre("first.bias", "plain.bias", "plain.weight"));
  second.detach();
  second = lora::attach(*net, {.modules = {"second"}});
  EXPECT_THAT(trained(), testing::UnorderedElementsAre("first.bias", "plain.bias")) << "what nobody trains any more is frozen";
  first.detach();
  second.detach();
  second = lora::attach(*net, {.modules = {"plain"}});
  EXPECT_THAT(trained(), testing::IsEmpty());
}

/// What a refused call has registered is there, and would be taken for trained matrices.
TEST(Lora, ARefusedCallLeavesNothingUndrawn) {
  Net net, other;
  EXPECT_THROW((void)lora::attach(*net, {.modules = {"first"}, .rank = 4, .trained = {"no.such"}, .seed = 3}), ConfigError);
  const auto attached = lora::attach(*net, {.modules = {"first"}, .rank = 4, .seed = 3}),
             expected = lora::attach(*other, {.modules = {"first"}, .rank = 4, .seed = 3});
  for (const std::string name : {"first.lora_a", "first.lora_b"}) EXPECT_TRUE(at::equal(parameter(*net, name), parameter(*other, name))) << name;
}

}  // namespace
}  // namespace tessera
