#include "tessera/nn/meta.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/head.h"
#include "tessera/nn/init_tape.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sequential.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera::nn {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(OnMetaTest, BuildsPlainModulesWithoutMemory) {
  MemoryTracker tracker;
  TrackMemory track(tracker);
  auto net = on_meta([] {
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::BatchNorm2d(8), torch::nn::Linear(1 << 20, 1 << 20),
                                 torch::nn::Embedding(7, 5), torch::nn::LSTM(4, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  });
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
  for (const auto& buffer : net->buffers()) EXPECT_TRUE(buffer.is_meta());
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_TRUE(at::ones({2}).is_cpu());  // the guard is gone
}

struct Table : torch::nn::Module {
  Table() {
    at::Tensor table = torch::empty({256, 256});
    for (int64_t i = 0; i < 256; ++i) {
      const at::Tensor row = table[i];
      for (int64_t j = 0; j < 256; ++j) row[j].fill_(static_cast<double>(i) - 2 * static_cast<double>(j));
    }
    register_buffer("table", table);
  }
};

TEST(Materialize, ATableMayBeFilledElementByElement) {
  const auto model = on_meta([] { return std::make_shared<Table>(); });
  materialize(*model, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(model->buffers()[0], Table().buffers()[0]));
}

/// Of a constructor that makes it by `make`.
struct Made : torch::nn::Module {
  using Make = std::function<at::Tensor()>;
  explicit Made(const Make& make) { table = register_buffer("table", make()); }
  at::Tensor table;
};

TEST(Materialize, ATableMayBeMadeByOperatorsThatCountOnTheHost) {
  const auto numbers = [] { return at::arange(1, 7, at::kFloat); };
  static const float kValues[] = {3, 1, 2};
  const std::vector<Made::Make> makes{
      [&] { return numbers().repeat({2, 1}); },
      [&] { return at::tile(numbers(), {2, 2}).log(); },
      [&] { return numbers().repeat_interleave(2); },
      [&] { return torch::from_blob(const_cast<float*>(kValues), {3}).clone(); },
      [&] { return numbers().unsqueeze(0).expand({3, 6}).contiguous(); },
      [&] { return at::cumprod(1 - at::linspace(1e-4, 0.02, 10), 0); },
      [&] { return at::einsum("i,j->ij", {numbers(), numbers()}).tril(); },
  };
  for (size_t i = 0; i < makes.size(); ++i) {
    const auto model = on_meta([&] { return std::make_shared<Made>(makes[i]); });
    EXPECT_TRUE(model->table.is_meta() || i == 3) << i;  // which has its numbers
    materialize(*model, 1);
    EXPECT_TRUE(at::equal(model->table, Made(makes[i]).table)) << i;
  }
}

TEST(OnMetaTest, RefusesConstructorsThatLookAtValues) {
  const auto numbers = [] { return at::arange(1, 7, at::kFloat); };
  const std::vector<std::pair<Made::Make, std::string>> refused{
      {[&] { return torch::tensor(std::vector<float>{1, 2, 3}); }, "torch::tensor of a vector"},
      {[&] { return numbers().roll(2); }, "aten::roll"},
      {[&] { return at::ones({2}) * numbers()[2].item<double>(); }, "aten::_local_scalar_dense"},
      {[&] {
         const at::Tensor table = at::empty({3});
         table.accessor<float, 1>()[0] = 1;
         return table;
       },
       "an accessor"},
  };
  for (const auto& [make, named] : refused) {
    EXPECT_THAT(testing_support::refusal([&, &make = make] { (void)on_meta([&] { return std::make_shared<Made>(make); }); }),
                AllOf(HasSubstr(named), HasSubstr("from_blob")));
    EXPECT_THAT(testing_support::refusal([&, &make = make] {
                  (void)on_meta([] { return std::make_shared<torch::nn::LinearImpl>(2, 2); }, [&](torch::nn::Module&) { (void)make(); });
                }),
                HasSubstr(named));
  }
  EXPECT_THROW((void)on_meta([] { return std::make_shared<Made>([] { return at::ones({2}).view({3}); }); }), c10::Error)
      << "the program's own mistakes are its own";
}

TEST(Materialize, RefusesWhatWasWrittenAfterOnMeta) {
  const auto build = [] { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3)); };
  const auto refusal = [](auto& net) -> std::string {
    try {
      materialize(net, 1, testing_support::test_device());
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto fill = [](const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    at::Tensor(tensor).fill_(3);
  };
  auto net = on_meta(build);
  fill(net->named_parameters()["0.bias"]);
  EXPECT_THAT(refusal(net), AllOf(HasSubstr("'0.bias'"), HasSubstr("after on_meta"), HasSubstr("init of on_meta")));
  set_init(net->named_parameters()["0.bias"], InitRule::constant(3));  // said in time, and it holds
  EXPECT_EQ(refusal(net), "accepted");
  EXPECT_TRUE(net->named_parameters()["0.bias"].eq(3).all().item<bool>());
  fill(net->named_parameters()["0.weight"]);  // of real memory: the program's, until it asks for new ones
  EXPECT_EQ(refusal(net), "accepted");

  auto table = on_meta([] {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_buffer("table", torch::zeros({3}));
    return module;
  });
  fill(table->buffers()[0]);
  EXPECT_THAT(refusal(*table), AllOf(HasSubstr("'table'"), HasSubstr("after on_meta")));

  auto looked_at = on_meta(build);
  looked_at->forward(at::empty({5, 4}, at::kMeta));  // moves running statistics
  EXPECT_EQ(refusal(looked_at), "accepted");
}

TEST(Materialize, KeepsHandlesHooksAndWorksForPlainModules) {
  auto net = on_meta([] { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2)); });
  const at::Tensor handle = net->parameters()[0];
  materialize(net, 7, testing_support::test_device());
  EXPECT_TRUE(handle.is_cpu());
  EXPECT_EQ(handle.unsafeGetTensorImpl(), net->parameters()[0].unsafeGetTensorImpl());
  EXPECT_LE(handle.abs().max().item<float>(), 0.5F);  // 1 / sqrt(4)
  EXPECT_GT(handle.abs().max().item<float>(), 0.2F);
  int calls = 0;
  const auto listening = GradientDispatcher::of(handle).listen([&](const at::Tensor&) { ++calls; });
  net->forward(at::randn({5, 4})).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(handle.grad().sizes(), handle.sizes());
  for (const auto& buffer : net->named_buffers()) {
    if (buffer.key() == "1.num_batches_tracked") {
      EXPECT_EQ(buffer.value().item<int64_t>(), 1);
    }
  }
}

TEST(Materialize, BuffersAreRightAndUnknownOnesAreRefused) {
  auto norm = on_meta([] { return torch::nn::BatchNorm1d(3); });
  materialize(norm, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(norm->running_mean, at::zeros({3})));
  EXPECT_TRUE(at::equal(norm->running_var, at::ones({3})));
  EXPECT_TRUE(at::equal(norm->weight, at::ones({3})));

  struct TableImpl : Module {
    explicit TableImpl(bool knows) : knows(knows) { table = register_buffer("table", at::empty({4})); }
    bool reset_buffers() override {
      if (knows) at::arange_out(table, 4);
      return knows;
    }
    bool knows;
    at::Tensor table;
  };
  auto good = on_meta([] { return std::make_shared<TableImpl>(true); });
  materialize(*good, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(good->table, at::arange(4, at::kFloat)));
  auto bad = on_meta([] { return std::make_shared<TableImpl>(false); });
  try {
    materialize(*bad, 1, testing_support::test_device());
    FAIL() << "unknown buffers were accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("reset_buffers"));
  }
}

TEST(Materialize, ParametersWithoutARuleAreNamed) {
  struct RawImpl : torch::nn::Module {
    RawImpl() { scale = register_parameter("scale", at::empty({3})); }
    at::Tensor scale;
  };
  auto raw = on_meta([] { return std::make_shared<RawImpl>(); });
  auto root = std::make_shared<torch::nn::Module>("root");
  struct Root : torch::nn::Module {
    explicit Root(std::shared_ptr<RawImpl> raw) { register_module("raw", raw); }
  };
  auto holder = std::make_shared<Root>(raw);
  try {
    materialize(*holder, 1, testing_support::test_device());
    FAIL() << "a parameter without a rule was accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'raw.scale'"));
    EXPECT_THAT(error.what(), HasSubstr("set_init"));
  }
  EXPECT_TRUE(raw->scale.is_meta());
  set_init(raw->scale, InitRule::constant(3));
  materialize(*holder, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(raw->scale, at::full({3}, 3.0)));
}

/// What a rule says of a tensor, held against the values: within bounds, and spread over them.
void expect_uniform(const at::Tensor& values, double bound) {
  EXPECT_LE(values.abs().max().item<double>(), bound * 1.0001);
  EXPECT_GT(values.abs().max().item<double>(), bound * 0.8);
}

TEST(OnMetaModules, OfLibtorchGetTheValuesOfTheirOwnConstructors) {
  auto encoder = on_meta([] {
    return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16), 2));
  });
  materialize(encoder, 3, testing_support::test_device());
  const auto parameters = encoder->named_parameters();
  expect_uniform(parameters["layers.0.self_attn.in_proj_weight"], std::sqrt(6.0 / (24 + 8)));
  EXPECT_TRUE(at::equal(parameters["layers.0.self_attn.in_proj_bias"], at::zeros({24})));
  EXPECT_TRUE(at::equal(parameters["layers.1.self_attn.out_proj.bias"], at::zeros({8})));
  EXPECT_TRUE(at::equal(parameters["layers.1.norm2.weight"], at::ones({8})));
  const torch::nn::TransformerEncoder plain(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16), 2));
  for (const auto& of : {parameters, plain->named_parameters()}) {  // its layers are clones of one
    EXPECT_TRUE(at::equal(of["layers.0.linear1.weight"], of["layers.1.linear1.weight"]));
  }

  auto attention = on_meta([] { return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).kdim(6).vdim(4).add_bias_kv(true)); });
  materialize(attention, 3, testing_support::test_device());
  expect_uniform(attention->k_proj_weight, std::sqrt(6.0 / (8 + 6)));
  EXPECT_GT(attention->bias_k.abs().max().item<float>(), 0);

  auto recurrent = on_meta([] { return torch::nn::Sequential(torch::nn::LSTM(4, 9), torch::nn::GRU(4, 9), torch::nn::RNN(4, 9)); });
  materialize(recurrent, 3, testing_support::test_device());
  for (const at::Tensor& parameter : recurrent->parameters()) expect_uniform(parameter, 1.0 / 3);

  auto norm = on_meta([] { return torch::nn::BatchNorm2d(3); });
  materialize(norm, 3, testing_support::test_device());
  EXPECT_TRUE(at::equal(norm->running_var, at::ones({3})));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
}

TEST(OnMetaModules, DrawOnMetaWhatTheyDrawBesideIt) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(4),
                                 torch::nn::LSTM(4, 4), torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 5).padding_idx(2)), torch::nn::GroupNorm(2, 4));
  };
  auto on = on_meta(make), beside = make();
  materialize(on, 5, testing_support::test_device());
  materialize(beside, 5, testing_support::test_device());
  for (size_t i = 0; i < on->parameters().size(); ++i) EXPECT_TRUE(at::equal(on->parameters()[i], beside->parameters()[i])) << i;

  torch::nn::MultiheadAttention attention(8, 2), plain(8, 2);
  auto lazily = on_meta([] { return torch::nn::MultiheadAttention(8, 2); });
  materialize(plain, 5, testing_support::test_device());
  materialize(lazily, 5, testing_support::test_device());
  for (size_t i = 0; i < plain->parameters().size(); ++i) EXPECT_TRUE(at::equal(plain->parameters()[i], lazily->parameters()[i])) << i;
}

/// A norm, tables and initializations as users write them.
struct HandWrittenImpl : torch::nn::Module {
  HandWrittenImpl() {
    scale = register_parameter("scale", torch::ones({6}));
    shift = register_parameter("shift", torch::full({6}, 0.25));
    positions = register_parameter("positions", torch::randn({12, 6}) * 0.02);
    square = register_parameter("square", torch::empty({6, 6}));
    torch::nn::init::orthogonal_(square);
    mask = register_buffer("mask", torch::tril(torch::ones({4, 4})).view({1, 4, 4}));
    at::Tensor table = torch::zeros({5, 6});
    const at::Tensor angles = torch::arange(0, 5, torch::kFloat).unsqueeze(1) * torch::exp(torch::arange(0, 6, 2, torch::kFloat) * -0.5);
    table.index_put_({torch::indexing::Slice(), torch::indexing::Slice(0, torch::indexing::None, 2)}, torch::sin(angles));
    table.index_put_({torch::indexing::Slice(), torch::indexing::Slice(1, torch::indexing::None, 2)}, torch::cos(angles));
    positional = register_buffer("positional", table);
    weights = register_buffer("weights", torch::tensor({1.0F, 2.0F, 0.5F}));
    linear = register_module("linear", torch::nn::Linear(6, 6));
    torch::nn::init::normal_(linear->weight, 0.0, 0.02);
    torch::nn::init::zeros_(linear->bias);
  }
  at::Tensor scale, shift, positions, square, mask, positional, weights;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(HandWritten);

TEST(OnMetaModules, DistributionsAreScaledByNegativeNumbersToo) {
  struct Scaled : torch::nn::Module {
    at::Tensor uniform = register_parameter("uniform", torch::rand({256}) * -2), normal = register_parameter("normal", torch::randn({256}) * -3);
  };
  auto lazy = on_meta([] { return std::make_shared<Scaled>(); });
  materialize(*lazy, 4, testing_support::test_device());
  EXPECT_GE(lazy->uniform.min().item<float>(), -2);
  EXPECT_LE(lazy->uniform.max().item<float>(), 0);
  EXPECT_NEAR(lazy->uniform.mean().item<float>(), -1, 0.2);
  EXPECT_NEAR(lazy->normal.std().item<float>(), 3, 0.6);
}

/// Mean, deviation and what tells whole numbers, of both parts where there are two.
std::vector<double> figures_of(const at::Tensor& tensor) {
  const at::Tensor parts = (tensor.is_complex() ? at::view_as_real(tensor.cpu()) : tensor.cpu().unsqueeze(-1)).to(at::kDouble).flatten(0, -2);
  std::vector<double> figures;
  for (int64_t part = 0; part < parts.size(1); ++part) {
    const at::Tensor numbers = parts.select(1, part);
    for (const at::Tensor& figure : {numbers.mean(), numbers.std(), numbers.eq(numbers.round()).to(at::kDouble).mean()})
      figures.push_back(figure.item<double>());
  }
  return figures;
}

/// A rule makes real numbers of 32 bits. What a constructor makes of others keeps its distribution: both parts, whole numbers, rounded ones.
TEST(OnMetaModules, NumbersOfOtherKindsAreThoseOfTheirConstructor) {
  // The deviation of an exponential distribution is known to 0.01 by as many numbers: a sixth of what is allowed.
  constexpr int64_t kNumbers = 40000;
  torch::manual_seed(1);  // what other tests have drawn does not decide
  const at::TensorOptions complex = at::kComplexFloat;
  const std::vector<std::function<at::Tensor()>> makers{
      [&] { return at::randn({kNumbers}, complex); },
      [&] { return at::rand({kNumbers}, complex) * 0.1; },
      [&] { return at::empty({kNumbers}, complex).normal_(0.5, 2); },
      [&] { return at::randn({kNumbers}, complex) * 3 + 1; },
      [&] { return at::view_as_complex(at::randn({kNumbers, 2})); },
      [&] { return at::view_as_real(at::randn({kNumbers}, complex)); },
      [&] { return at::view_as_real(at::ones({kNumbers}, complex)).clone(); },
      [&] { return at::real(at::randn({kNumbers}, complex)).contiguous(); },
      [&] { return at::abs(at::randn({kNumbers}, complex)); },
      [&] {
        const at::Tensor z = at::randn({kNumbers}, complex);
        return at::real(z * z.conj()).contiguous();
      },
      [] { return at::div(at::rand({kNumbers}) * 10, 1, "floor"); },
      [&] {
        const at::Tensor made = at::empty({kNumbers}, complex);
        at::view_as_real(made).uniform_(-1, 3);
        return made;
      },
      [] { return (at::rand({kNumbers}) * 10).to(at::kLong).to(at::kFloat); },
      [] { return at::full({kNumbers}, 2.7).to(at::kLong).to(at::kFloat); },
      [] { return at::randn({kNumbers}).to(at::kBool).to(at::kFloat); },
      [] { return at::zeros({kNumbers}, at::kInt).copy_(at::rand({kNumbers}) * 10).to(at::kFloat); },
      [] { return (at::randn({kNumbers}) * 64).to(at::kFloat8_e4m3fn).to(at::kFloat); },
  };
  for (size_t i = 0; i < makers.size(); ++i) {
    struct Drawn : torch::nn::Module {
      explicit Drawn(const at::Tensor& made) : made(register_parameter("made", made)) {}
      at::Tensor made;
    };
    auto lazy = on_meta([&] { return std::make_shared<Drawn>(makers[i]()); });
    materialize(*lazy, 4);
    const auto plain = figures_of(makers[i]()), drawn = figures_of(lazy->made.detach());
    ASSERT_EQ(drawn.size(), plain.size());
    if (lazy->made.is_complex()) EXPECT_FALSE(at::equal(at::real(lazy->made), at::imag(lazy->made))) << i << ", drawn once for both parts";
    for (size_t j = 0; j < plain.size(); ++j) EXPECT_NEAR(drawn[j], plain[j], 0.06 * std::max(1.0, plain[1])) << i << ", figure " << j;
  }
}

/// Through other formats, into complex numbers, and into buffers.
TEST(OnMetaModules, CopiesOfAnotherKindHaveTheNumbersOfWhatTheyCopy) {
  struct Copies : torch::nn::Module {
    at::Tensor narrow = register_parameter("narrow", at::randn({40, 30}).to(at::kBFloat16));
    at::Tensor wide = register_parameter("wide", at::empty({40, 30}).copy_(narrow));
    at::Tensor complex = register_parameter("complex", at::zeros({40, 30}, at::kComplexFloat).copy_(narrow));
    at::Tensor average = register_buffer("average", wide.detach().clone());
    at::Tensor codes = register_buffer("codes", at::rand({50})), same = register_buffer("same", codes.clone());
  };
  auto lazy = on_meta([] { return std::make_shared<Copies>(); });
  materialize(*lazy, 4);
  EXPECT_TRUE(at::equal(lazy->wide.to(at::kBFloat16), lazy->narrow));
  EXPECT_TRUE(at::equal(at::real(lazy->complex), lazy->wide));
  EXPECT_TRUE(at::equal(at::imag(lazy->complex), at::zeros({40, 30})));
  EXPECT_TRUE(at::equal(lazy->average, lazy->wide));
  EXPECT_TRUE(at::equal(lazy->same, lazy->codes));
  EXPECT_GT(lazy->codes.max().item<float>(), 0);

  struct Derived : torch::nn::Module {
    at::Tensor weight = register_parameter("weight", at::rand({40})), codes = register_buffer("codes", (weight.detach() * 255).to(at::kByte));
  };
  auto derived = on_meta([] { return std::make_shared<Derived>(); });
  EXPECT_THAT([&] { materialize(*derived, 4); }, ThrowsMessage<ConfigError>(HasSubstr("'codes' is computed from the random numbers of 'weight'")));
}

TEST(Materialize, BothPartsOfAComplexParameterAreDrawnByItsRule) {
  for (const auto& rule : {InitRule::normal(0.5, 2), InitRule::uniform(-1, 3)}) {
    const at::Tensor whole = at::zeros({100, 50}, at::kComplexFloat), part = at::zeros({40, 50}, at::kComplexFloat);
    for (const at::Tensor& tensor : {whole, part}) {
      set_init(tensor, rule);
      set_slice(tensor, tensor.is_same(whole) ? Slice::whole("w", {100, 50}) : Slice::along("w", {100, 50}, 0, 60, 40));
      draw(tensor, 3);
    }
    EXPECT_TRUE(at::equal(part, whole.narrow(0, 60, 40)));
    const at::Tensor plain = at::empty({5000}, at::kComplexFloat);
    const auto expected = figures_of(rule.kind == InitRule::Kind::Normal ? plain.normal_(0.5, 2) : plain.uniform_(-1, 3)), drawn = figures_of(whole);
    for (size_t j = 0; j < expected.size(); ++j) EXPECT_NEAR(drawn[j], expected[j], 0.12) << j;
  }
}

TEST(OnMetaModules, HandWrittenOnesGetTheValuesOfTheirConstructor) {
  HandWritten plain;
  auto lazy = on_meta([] { return HandWritten(); });
  for (const at::Tensor& tensor : lazy->buffers()) EXPECT_TRUE(tensor.is_meta());
  materialize(lazy, 4, testing_support::test_device());
  EXPECT_TRUE(at::equal(lazy->scale, at::ones({6})));
  EXPECT_TRUE(at::equal(lazy->shift, plain->shift));
  EXPECT_TRUE(at::equal(lazy->mask, plain->mask));
  EXPECT_TRUE(at::equal(lazy->positional, plain->positional));
  EXPECT_TRUE(at::equal(lazy->weights, plain->weights));
  EXPECT_TRUE(at::equal(lazy->linear->bias, at::zeros({6})));
  EXPECT_NEAR(lazy->linear->weight.std().item<double>(), 0.02, 0.01);  // not libtorch's own 0.24
  EXPECT_NEAR(lazy->positions.std().item<double>(), 0.02, 0.005);
  EXPECT_TRUE(at::allclose(lazy->square.matmul(lazy->square.t()), at::eye(6), 1e-4, 1e-5));

  // Layouts hold parts of the same.
  auto cut = on_meta([] { return HandWritten(); });
  assign_paths(*cut);
  for (const auto& parameter : unique_parameters(*cut)) {
    const auto shape = parameter.tensor.sizes().vec();
    set_slice(parameter.tensor, Slice::along(parameter.name, shape, 0, 1, shape[0] - 1));
  }
  materialize(cut, 4, testing_support::test_device());
  for (size_t i = 0; i < cut->parameters().size(); ++i) {
    const at::Tensor whole = lazy->parameters()[i];
    EXPECT_TRUE(at::equal(cut->parameters()[i], whole.narrow(0, 1, whole.size(0) - 1))) << i;
  }
}

TEST(OnMetaModules, AnInitFunctionHasTheLastWord) {
  const auto init = [](torch::nn::Module& module) {
    if (auto* conv = module.as<torch::nn::Conv2dImpl>()) torch::nn::init::normal_(conv->weight, 0.0, 0.02);
    if (auto* norm = module.as<torch::nn::BatchNorm2dImpl>()) {
      torch::nn::init::normal_(norm->weight, 1.0, 0.02);
      torch::nn::init::constant_(norm->running_var, 4);
    }
  };
  auto net = on_meta([] { return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3)), torch::nn::BatchNorm2d(8), Linear(4, 4)); }, init);
  materialize(net, 1, testing_support::test_device());
  EXPECT_NEAR(net->parameters()[0].std().item<double>(), 0.02, 0.004);
  EXPECT_NEAR(net->named_parameters()["1.weight"].mean().item<double>(), 1, 0.03);
  EXPECT_TRUE(at::equal(net->named_buffers()["1.running_var"], at::full({8}, 4.0)));

  auto ours = on_meta([] { return Sequential(Linear(4, 4)); },
                      [](torch::nn::Module& module) {
                        if (auto* linear = module.as<LinearImpl>()) torch::nn::init::constant_(linear->weight, 7);
                      });
  materialize(ours, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(ours->parameters()[0], at::full({4, 4}, 7.0)));
  set_init(ours->parameters()[0], InitRule::constant(3));  // later still
  materialize(ours, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(ours->parameters()[0], at::full({4, 4}, 3.0)));
}

TEST(OnMetaModules, APlainCopyOfAParameterIsOne) {
  struct Copies : torch::nn::Module {
    Copies() {
      register_module("a", a);
      register_module("b", b);
      register_module("ours", ours);
      register_module("mine", mine);
      const at::NoGradGuard no_grad;
      b->weight.copy_(a->weight);
      c = register_parameter("c", a->weight.detach().clone());
      d = register_parameter("d", torch::randn({6, 8}));
      d.set_data(a->weight.detach().clone());
      mine->weight.copy_(ours->weight);
      e = register_parameter("e", ours->weight.detach().clone());
      ruled = register_parameter("ruled", at::empty({6}));
      set_init(ruled, InitRule::normal(0, 1));
      f = register_parameter("f", ruled.detach().clone());
    }
    torch::nn::Linear a{8, 6}, b{8, 6};
    Linear ours{4, 4}, mine{4, 4};
    at::Tensor c, d, e, ruled, f;
  };
  auto model = on_meta([] { return std::make_shared<Copies>(); });
  for (int time = 0; time < 2; ++time) {
    materialize(*model, 3, testing_support::test_device());
    for (const at::Tensor& copy : {model->b->weight, model->c, model->d}) EXPECT_TRUE(at::equal(copy, model->a->weight));
    EXPECT_TRUE(at::equal(model->mine->weight, model->ours->weight));
    EXPECT_TRUE(at::equal(model->e, model->ours->weight));
    EXPECT_TRUE(at::equal(model->f, model->ruled));
    EXPECT_FALSE(at::equal(model->a->bias, model->b->bias));
  }
  auto cut = on_meta([] { return std::make_shared<Copies>(); });
  assign_paths(*cut);
  Slice slice = slice_of(cut->c);
  slice.boxes = {{.offset = {2, 0}, .size = {3, 8}}};
  set_slice(cut->c, slice);
  materialize(*cut, 3, testing_support::test_device());
  EXPECT_TRUE(at::equal(cut->c, model->a->weight.narrow(0, 2, 3)));

  struct Scaled : torch::nn::Module {
    Scaled() {
      register_module("a", a);
      register_module("b", b);
      const at::NoGradGuard no_grad;
      b->weight.copy_(a->weight * 2);
    }
    torch::nn::Linear a{8, 6}, b{8, 6};
  };
  auto scaled = on_meta([] { return std::make_shared<Scaled>(); });
  try {
    materialize(*scaled, 3, testing_support::test_device());
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'b.weight' is computed from the random numbers of 'a.weight'"));
  }
}

TEST(OnMetaModules, WhatHasTheShapeOfAParameterIsNoCopyOfIt) {
  struct Alike : torch::nn::Module {
    Alike() {
      const at::NoGradGuard no_grad;
      a = register_parameter("a", at::rand({6, 8}));
      filled = register_parameter("filled", at::full_like(a, 0.5));
      drawn = register_parameter("drawn", at::rand_like(a, at::kFloat));
    }
    at::Tensor a, filled, drawn;
  };
  auto model = on_meta([] { return std::make_shared<Alike>(); });
  materialize(*model, 3, testing_support::test_device());
  EXPECT_TRUE(at::equal(model->filled, at::full_like(model->a, 0.5)));
  EXPECT_FALSE(at::equal(model->drawn, model->a));
}

TEST(OnMetaModules, WhatIsNeverFilledIsRefusedByName) {
  const auto refusal = [](auto&& make) -> std::string {
    auto module = on_meta(make);
    try {
      materialize(*module, 1, testing_support::test_device());
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  struct EmptyBuffer : torch::nn::Module {
    EmptyBuffer() { register_buffer("cache", torch::empty({3})); }
  };
  EXPECT_THAT(refusal([] { return std::make_shared<EmptyBuffer>(); }), HasSubstr("'cache'"));
  struct HalfFilled : torch::nn::Module {
    HalfFilled() {
      at::Tensor half = register_parameter("half", torch::empty({4, 2}));
      const at::NoGradGuard no_grad;
      half.narrow(0, 0, 2).normal_();
    }
  };
  EXPECT_THAT(refusal([] { return std::make_shared<HalfFilled>(); }), HasSubstr("part of 'half'"));
  struct Dice : torch::nn::Module {
    Dice() { register_buffer("dice", torch::randint(1, 7, {5})); }
  };
  EXPECT_EQ(refusal([] { return std::make_shared<Dice>(); }), "accepted");
  struct WeightNorm : torch::nn::Module {
    WeightNorm() {
      const at::Tensor v = register_parameter("v", torch::randn({4, 2}));
      register_parameter("g", v.detach().norm(2, 1));
    }
  };
  EXPECT_THAT(refusal([] { return std::make_shared<WeightNorm>(); }), HasSubstr("'g' is computed from the random numbers of 'v'"));
}

TEST(Materialize, ValuesDependOnSeedAndNameAlone) {
  const auto build = [](bool meta) {
    const auto make = [] { return Sequential(Linear(5, 3), Linear(5, 3)); };
    return meta ? on_meta(make) : make();
  };
  auto a = build(true), b = build(false), c = build(true);
  materialize(a, 1, testing_support::test_device());
  materialize(b, 1, testing_support::test_device());
  materialize(c, 2, testing_support::test_device());
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a->parameters()[i], b->parameters()[i]));
    EXPECT_FALSE(at::equal(a->parameters()[i], c->parameters()[i]));
  }
  EXPECT_FALSE(at::equal(a->parameters()[0], a->parameters()[2]));
}

TEST(Materialize, AnySliceHoldsWhatTheWholeHoldsThere) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  for (int trial = 0; trial < 60; ++trial) {
    const std::vector<int64_t> shape{pick(1, 9), pick(1, 9), pick(1, 4)};
    Slice slice{"layers.3.w", shape, {}};
    const int kind = trial % 4;
    if (kind == 0) {  // rows, possibly none
      const int64_t begin = pick(0, shape[0]);
      slice = Slice::along("layers.3.w", shape, 0, begin, pick(0, shape[0] - begin));
    } else if (kind == 1) {  // columns
      const int64_t begin = pick(0, shape[1] - 1);
      slice = Slice::along("layers.3.w", shape, 1, begin, pick(1, shape[1] - begin));
    } else if (kind == 2) {  // two ends, as zig-zag layouts hold them
      if (shape[0] < 2) continue;
      slice.boxes = {{{0, 0, 0}, {1, shape[1], shape[2]}}, {{shape[0] - 1, 0, 0}, {1, shape[1], shape[2]}}};
    } else {  // boxes that differ in two dimensions: held flat
      if (shape[0] < 2 || shape[1] < 2) continue;
      slice.boxes = {{{0, 0, 0}, {1, 1, shape[2]}}, {{1, 1, 0}, {shape[0] - 1, shape[1] - 1, shape[2]}}};
    }
    for (const InitRule& rule : {InitRule::normal(0.5, 2), InitRule::uniform(-1, 3)}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        at::Tensor whole = at::empty(shape, dtype), part = at::empty(slice.local_shape(), dtype);
        set_slice(whole, Slice::whole("layers.3.w", shape));
        set_slice(part, slice);
        for (const auto& tensor : {whole, part}) {
          set_init(tensor, rule);
          draw(tensor, 11);
        }
        EXPECT_TRUE(at::equal(part, take(whole, slice))) << "trial " << trial;
      }
    }
  }
}

TEST(Materialize, TakesTheShapeOfTheSlice) {
  auto linear = on_meta([] { return Linear(4, 6); });
  assign_paths(*linear, "layers.0.w1");
  EXPECT_EQ(slice_of(linear->weight).name, "layers.0.w1.weight");
  set_slice(linear->weight, Slice::along("layers.0.w1.weight", {6, 4}, 0, 2, 3));
  set_slice(linear->bias, Slice::along("layers.0.w1.bias", {6}, 0, 2, 3));
  materialize(linear, 5, testing_support::test_device());
  EXPECT_EQ(linear->weight.sizes(), (std::vector<int64_t>{3, 4}));
  auto whole = Linear(4, 6);
  assign_paths(*whole, "layers.0.w1");
  materialize(whole, 5, testing_support::test_device());
  EXPECT_TRUE(at::equal(linear->weight, whole->weight.narrow(0, 2, 3)));
  EXPECT_TRUE(at::equal(linear->bias, whole->bias.narrow(0, 2, 3)));
  linear(at::randn({2, 4})).sum().backward();
  EXPECT_EQ(linear->weight.grad().sizes(), linear->weight.sizes());
}

TEST(Materialize, OnMetaTheSameBytesAreAccountedForAsOnTheCpu) {
  const auto bytes = [](at::Device device) {
    MemoryTracker tracker;
    TrackMemory track(tracker);
    auto net = on_meta([] { return Sequential(Linear(33, 17), Embedding(5, 3), torch::nn::BatchNorm1d(3)); });
    EXPECT_EQ(tracker.current(), 0);
    materialize(net, 1, device);
    EXPECT_EQ(tracker.current(), tracker.current(MemoryCategory::Parameters));
    materialize(net, 1, device);  // twice: not counted twice
    return tracker.current();
  };
  const int64_t expected = 4 * (33 * 17 + 17 + 5 * 3 + 3 * 4) + 8;
  EXPECT_EQ(bytes(at::kCPU), expected);
  EXPECT_EQ(bytes(at::kMeta), expected);
}

TEST(Parameter, PaddingRowsAreZeroInTheSliceThatHoldsThem) {
  Embedding whole(EmbeddingOptions(6, 2).padding_idx(-2));
  materialize(whole, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(whole->weight[4], at::zeros({2})));
  EXPECT_FALSE(at::equal(whole->weight[3], at::zeros({2})));
  auto part = on_meta([] { return Embedding(EmbeddingOptions(6, 2).padding_idx(4)); });
  set_slice(part->weight, Slice::along("weight", {6, 2}, 0, 3, 2));
  materialize(part, 1, testing_support::test_device());
  EXPECT_TRUE(at::equal(part->weight, whole->weight.narrow(0, 3, 2)));
}

struct TiedImpl : Module {
  TiedImpl() : embed(5, 3), head(embed->weight) {
    register_module("embed", embed);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(embed(ids)); }
  Embedding embed;
  LanguageModelHead head;
};
TESSERA_MODULE(Tied);

TEST(Parameter, TiedOnesAreListedOnceWithTheirAliases) {
  auto tied = on_meta([] { return Tied(); });
  EXPECT_EQ(tied->named_parameters().size(), 2u);
  auto unique = unique_parameters(*tied);
  ASSERT_EQ(unique.size(), 1u);
  EXPECT_EQ(unique[0].name, "embed.weight");
  EXPECT_THAT(unique[0].aliases, ElementsAre("head.weight"));
  materialize(tied, 3, testing_support::test_device());
  EXPECT_EQ(tied->embed->weight.unsafeGetTensorImpl(), tied->head->weight.unsafeGetTensorImpl());
  EXPECT_EQ(slice_of(tied->head->weight).name, "embed.weight");
  int calls = 0;
  const auto listening = GradientDispatcher::of(unique[0].tensor).listen([&](const at::Tensor&) { ++calls; });
  tied(at::tensor({0, 4})).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(Parameter, SlicesBelongToTheTensorAndItsDetachedAliases) {
  at::Tensor tensor = at::ones({4, 2});
  EXPECT_FALSE(has_slice(tensor));
  EXPECT_TRUE(slice_of(tensor).is_whole());
  set_slice(tensor, Slice::along("w", {8, 2}, 0, 4, 4));
  const at::Tensor alias = tensor.detach();
  EXPECT_EQ(slice_of(alias).name, "w");
  set_slice(tensor, Slice::whole("v", {4, 2}));
  EXPECT_EQ(slice_of(alias).name, "w");  // its own from then on
  EXPECT_EQ(slice_of(tensor.narrow(0, 0, 1)).name, "");
  set_init(tensor, InitRule::ones());
  EXPECT_EQ(slice_of(tensor).name, "v");
  EXPECT_THROW(set_slice(tensor, Slice::along("w", {8, 2}, 0, 6, 4)), InternalError);
}

TEST(Parameter, DefaultsFollowLibtorch) {
  const torch::nn::Linear linear(16, 2);
  EXPECT_DOUBLE_EQ(default_init(*linear, "weight")->b, 0.25);
  EXPECT_DOUBLE_EQ(default_init(*linear, "bias")->b, 0.25);
  const torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 8, 2).groups(2));
  EXPECT_DOUBLE_EQ(default_init(*conv, "bias")->b, 1 / std::sqrt(8.0));
  const torch::nn::LSTM lstm(4, 9);
  EXPECT_DOUBLE_EQ(default_init(*lstm, "weight_ih_l0")->b, 1.0 / 3);
  const torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({3}));
  EXPECT_EQ(default_init(*norm, "weight")->a, 1);
  EXPECT_EQ(default_init(*norm, "bias")->a, 0);
  const torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).padding_idx(1));
  EXPECT_EQ(default_init(*embedding, "weight")->zero_row, 1);
  EXPECT_FALSE(default_init(torch::nn::Module("other"), "weight"));
}

}  // namespace
}  // namespace tessera::nn
