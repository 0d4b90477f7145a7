// Modules of libtorch in programs as they are published: no base of ours, model->forward(x), optimizers of torch::optim, several models in one loop.

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/norm.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

class Foreign : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(FullyShard, Foreign, ::testing::Values(1, 2, 3));

constexpr int64_t kRows = 6;  // divides by 1, 2, 3

at::Tensor rows_of(const at::Tensor& all, int ranks, int rank, int64_t dim = 0) { return all.narrow(dim, rank * (kRows / ranks), kRows / ranks); }

/// Trains `make()`'s model, which returns a loss that is a mean over the batch, alone and over ranks, evaluating on the way.
template <class Make, class Loss>
void expect_as_alone(int ranks, FullyShardOptions options, const Make& make, const Loss& loss, const at::Tensor& data, int64_t dim = 0,
                     double bound = 20 * parity) {
  const auto train = [&](auto& model, const at::Tensor& mine) {
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3).eps(1e-3).weight_decay(0.01));
    std::vector<double> seen;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss(*model, mine).backward();
      optimizer.step();
      const at::NoGradGuard no_grad;
      model->eval();
      seen.push_back(loss(*model, data).template item<double>());
      model->train();
    }
    return seen;
  };
  const auto whole = make();
  const std::vector<double> expected_losses = train(whole, data);
  const Gradients expected = named_values(*whole);
  options.average = true;
  run_ranks(ranks, [&](World& world) {
    const auto model = make();
    auto sharded = fully_shard(*model, world.group(), options);
    const std::vector<double> losses = train(model, rows_of(data, ranks, world.rank(), dim));
    EXPECT_LT(slice_difference(*model, expected, /*values=*/true), bound);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected_losses[i], 1e-4 * std::abs(expected_losses[i]));
  });
}

/// A convolution, a norm over channels and a linear layer, by their functions' names; pictures in, classes out.
struct Convolutional : torch::nn::Module {
  Convolutional()
      : conv1(torch::nn::Conv2dOptions(1, 5, 3).padding(1)), conv2(torch::nn::Conv2dOptions(5, 4, 3).padding(1).bias(false)), norm(2, 4), fc(4 * 16, 3) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("norm", norm);
    register_module("fc", fc);
    fill_parameters(*this);
  }
  at::Tensor forward(at::Tensor x) {
    x = torch::relu(conv1->forward(x));
    x = torch::relu(norm->forward(conv2->forward(x)));
    return at::log_softmax(fc->forward(x.flatten(1)), 1);
  }
  torch::nn::Conv2d conv1, conv2;
  torch::nn::GroupNorm norm;
  torch::nn::Linear fc;
};

TEST_P(Foreign, ConvolutionsInTheUsualLoop) {
  const auto loss = [](Convolutional& model, const at::Tensor& x) { return -model.forward(x).select(1, 0).mean(); };
  for (const std::string wrap : {"", "conv*"}) {
    expect_as_alone(GetParam(), {.wrap = wrap}, [] { return std::make_shared<Convolutional>(); }, loss, random_tensor({kRows, 1, 4, 4}, "pictures"));
  }
}

/// Embedding, LSTM, tied look-up by the functional name.
struct Recurrent : torch::nn::Module {
  Recurrent() : embedding(11, 6), lstm(torch::nn::LSTMOptions(6, 7).num_layers(2).batch_first(true)), head(7, 11) {
    register_module("embedding", embedding);
    register_module("lstm", lstm);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor out = std::get<0>(lstm->forward(embedding->forward(ids)));
    return head->forward(out);
  }
  torch::nn::Embedding embedding;
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};

TEST_P(Foreign, RecurrentLanguageModel) {
  const at::Tensor ids = at::arange(kRows * 5).remainder(11).view({kRows, 5});
  const auto loss = [](Recurrent& model, const at::Tensor& x) { return at::cross_entropy_loss(model.forward(x).flatten(0, 1), x.flatten()); };
  for (const std::string wrap : {"", "*"}) expect_as_alone(GetParam(), {.wrap = wrap}, [] { return std::make_shared<Recurrent>(); }, loss, ids);
}

/// The head of ours with its fused loss, whose weight one rank may hold whole, behind libtorch's layers.
struct WithFusedLoss : torch::nn::Module {
  WithFusedLoss() {
    register_module("embedding", embedding);
    register_module("gru", gru);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(std::get<0>(gru->forward(embedding->forward(ids))), ids) / ids.numel(); }
  torch::nn::Embedding embedding{11, 6};
  torch::nn::GRU gru{torch::nn::GRUOptions(6, 6).batch_first(true)};
  nn::LanguageModelHead head{6, 11};
};

TEST_P(Foreign, AFusedLossBehindPlainLayers) {
  const at::Tensor ids = at::arange(kRows * 5).remainder(11).view({kRows, 5});
  const auto loss = [](WithFusedLoss& model, const at::Tensor& x) { return model.forward(x); };
  for (const std::string wrap : {"", "*"}) {
    expect_as_alone(GetParam(), {.wrap = wrap}, [] { return std::make_shared<WithFusedLoss>(); }, loss, ids);
  }
}

/// libtorch's encoder, whose attention checks its weights, with a table that is read by a slice and a parameter that comes first, alone.
struct Encoder : torch::nn::Module {
  Encoder() : encoder(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0), 2)), head(8, 8) {
    positions = register_parameter("positions", at::empty({9, 1, 8}));
    log_scale = register_parameter("log_scale", at::empty({}));
    register_module("encoder", encoder);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = encoder->forward(x * log_scale.exp() + positions.slice(0, 0, x.size(0)), {}, {});
    return torch::nn::functional::linear(h, head->weight.t(), head->bias);
  }
  torch::nn::TransformerEncoder encoder;
  torch::nn::Linear head;
  at::Tensor positions, log_scale;
};

TEST_P(Foreign, TransformerEncoder) {
  const auto loss = [](Encoder& model, const at::Tensor& x) { return (model.forward(x) - x).square().mean(); };
  for (const std::string wrap : {"", "encoder.layers.*"}) {
    expect_as_alone(GetParam(), {.wrap = wrap}, [] { return std::make_shared<Encoder>(); }, loss, random_tensor({5, kRows, 8}, "sequences"), /*dim=*/1);
  }
}

/// As PyTorch's example writes it: the discriminator has two backward passes before its step, and the generator's goes through it.
template <class Step>
void gan(torch::nn::Sequential& generator, torch::nn::Sequential& discriminator, const at::Tensor& real, const at::Tensor& noise, const Step& look) {
  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(2e-3).eps(1e-3));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(), torch::optim::AdamOptions(5e-3).eps(1e-3));
  for (int step = 0; step < 3; ++step) {
    discriminator->zero_grad();
    at::binary_cross_entropy_with_logits(discriminator->forward(real), at::ones({real.size(0), 1})).backward();
    const at::Tensor fake = generator->forward(noise);
    at::binary_cross_entropy_with_logits(discriminator->forward(fake.detach()), at::zeros({real.size(0), 1})).backward();
    discriminator_optimizer.step();
    generator->zero_grad();
    at::binary_cross_entropy_with_logits(discriminator->forward(fake), at::ones({real.size(0), 1})).backward();
    generator_optimizer.step();
    look(generator->forward(noise));  // with gradients, and no backward: a picture for the log
  }
}

std::pair<torch::nn::Sequential, torch::nn::Sequential> adversaries() {
  using torch::nn::Linear;
  torch::nn::Sequential generator(Linear(4, 9), torch::nn::ReLU(), Linear(9, 5)), discriminator(Linear(5, 7), torch::nn::LeakyReLU(), Linear(7, 1));
  fill_parameters(*generator, 1);
  fill_parameters(*discriminator, 2);
  return {generator, discriminator};
}

TEST_P(Foreign, AdversariesSideBySide) {
  const int ranks = GetParam();
  const at::Tensor real = random_tensor({kRows, 5}, "real"), noise = random_tensor({kRows, 4}, "noise");
  auto [generator, discriminator] = adversaries();
  gan(generator, discriminator, real, noise, [](const at::Tensor&) {});
  const Gradients made = named_values(*generator), judged = named_values(*discriminator);
  for (const bool generator_first : {true, false}) {
    run_ranks(ranks, [&](World& world) {
      auto [mine, other] = adversaries();
      // Made and destroyed in either order.
      auto sharded = fully_shard(*mine.ptr(), world.group(), {.wrap = "2", .average = true});
      auto judging = fully_shard(*other.ptr(), world.group(), {.average = true});
      gan(mine, other, rows_of(real, ranks, world.rank()), rows_of(noise, ranks, world.rank()), [](const at::Tensor&) {});
      mine->zero_grad();  // parameters of a forward without a backward: the optimizer's next look at them finds slices
      EXPECT_LT(slice_difference(*other, judged, /*values=*/true), 20 * parity);
      (generator_first ? sharded : judging).reset();
      const Gradients left = named_values(generator_first ? *mine : *other);
      EXPECT_FALSE(left.empty());
    });
  }
}

TEST_P(Foreign, TeacherAndStudent) {
  const int ranks = GetParam();
  const at::Tensor x = random_tensor({kRows, 5}, "x");
  const auto distil = [](Net& student, Net& teacher, const at::Tensor& mine) {
    torch::optim::SGD optimizer(student.parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      at::Tensor target;
      if (step % 2 == 0) {
        const at::NoGradGuard no_grad;  // in training mode, as many programs forget
        target = teacher.forward(mine);
      } else {
        target = teacher.forward(mine).detach();  // frozen, with gradients
      }
      at::mse_loss(student.forward(mine), target).backward();
      optimizer.step();
    }
  };
  const auto make = [](uint64_t seed, bool frozen) {
    auto net = std::make_shared<Net>();
    fill_parameters(*net, seed);
    for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(!frozen);
    return net;
  };
  const auto student = make(1, false), teacher = make(2, true);
  distil(*student, *teacher, x);
  const Gradients expected = named_values(*student);
  run_ranks(ranks, [&](World& world) {
    const auto mine = make(1, false), other = make(2, true);
    auto first = fully_shard(*other, world.group(), {.wrap = "middle"});
    auto second = fully_shard(*mine, world.group(), {.wrap = "middle", .average = true});
    distil(*mine, *other, rows_of(x, ranks, world.rank()));
    EXPECT_LT(slice_difference(*mine, expected, /*values=*/true), 10 * parity);
  });
}

/// Gradients flow through a frozen model to what it is given.
TEST_P(Foreign, AFrozenModelPassesGradientsOn) {
  const int ranks = GetParam();
  const at::Tensor x = random_tensor({kRows, 5}, "x");
  for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
    DeepNet whole;
    for (const at::Tensor& parameter : whole->parameters()) parameter.set_requires_grad(false);
    const at::Tensor all = x.clone().requires_grad_();
    whole(all).square().sum().backward();
    run_ranks(ranks, [&](World& world) {
      DeepNet net;
      for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      for (int pass = 0; pass < 2; ++pass) {
        const at::Tensor mine = rows_of(x, ranks, world.rank()).clone().requires_grad_();
        net(mine).square().sum().backward();
        const at::Tensor want = rows_of(all.grad(), ranks, world.rank());
        EXPECT_LT((mine.grad() - want).abs().max().item<double>(), parity * want.abs().max().item<double>());
      }
    });
  }
}

/// The gradient's own gradient: a pass that is for the input's gradient alone completes no step.
TEST_P(Foreign, AGradientPenalty) {
  const int ranks = GetParam();
  const at::Tensor x = random_tensor({kRows, 5}, "x");
  const auto penalized = [](auto&& forward, const at::Tensor& mine) {
    const at::Tensor input = mine.clone().requires_grad_();
    const at::Tensor out = forward(input);
    const at::Tensor slope = torch::autograd::grad({out.sum()}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true).at(0);
    (out.square().sum() + (slope.square().sum(1) - 1).square().sum()).backward();
  };
  for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
    DeepNet whole;
    penalized([&](const at::Tensor& input) { return whole(input); }, x);
    Gradients expected = named_gradients(*whole);
    run_ranks(ranks, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .find_unused_parameters = true, .trigger = trigger});
      DeepNet other;
      auto strict = fully_shard(other, world.group(), {.wrap = "block*", .trigger = trigger});
      penalized([&](const at::Tensor& input) { return net(input); }, rows_of(x, ranks, world.rank()));
      EXPECT_LT(slice_difference(*net, expected), 20 * parity);
      penalized([&](const at::Tensor& input) { return other(input); }, rows_of(x, ranks, world.rank()));
      EXPECT_LT(slice_difference(*other, expected), 20 * parity);
    });
  }
}

/// A gradient that is asked for has a history of its own, an embedding's too: it is not added up in a step's place.
struct Steep : torch::nn::Module {
  Steep() : words(7, 4), out(4, 7) {
    register_module("words", words);
    register_module("out", out);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor first = out->forward(words->forward(ids).tanh()).square().sum();
    const auto slopes = torch::autograd::grad({first}, {words->weight, out->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return first + slopes[0].square().sum() + slopes[1].square().sum();
  }
  nn::Embedding words;
  torch::nn::Linear out;
};

TEST_P(Foreign, DerivativesByWeightsHaveDerivativesThemselves) {
  const int ranks = GetParam();
  const at::Tensor ids = random_tensor({kRows}, "ids").mul(50).abs().to(at::kLong).remainder(7);
  Steep whole;
  whole.forward(ids).backward();
  Gradients expected = named_gradients(whole);
  for (auto& [name, gradient] : expected) gradient.mul_(ranks);  // each rank has all rows
  run_ranks(ranks, [&](World& world) {
    Steep net;
    const auto sharded = fully_shard(net, world.group(), {.param_dtype = at::kFloat});
    net.forward(ids).backward();
    EXPECT_LT(slice_difference(net, expected), 20 * parity);
  });
}

/// Statistics of rank 0's batches are every rank's, so that evaluation is the same everywhere.
struct Normalized : torch::nn::Module {
  Normalized() : first(5, 6), norm(6), last(6, 3) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last->forward(norm->forward(first->forward(x))); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
};

/// A network of derivatives by its input, whose learned coefficient is first met behind torch::autograd::grad, by an operator that a log could be.
struct Physics : torch::nn::Module {
  Physics() {
    coefficient = register_parameter("coefficient", at::empty({}));
    register_module("net", net);
    fill_parameters(*this);
  }
  at::Tensor loss(const at::Tensor& data) {
    const at::Tensor x = data.detach().clone().requires_grad_();
    const at::Tensor u = net->forward(x), slope = torch::autograd::grad({u.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return (slope * coefficient.sum() + u).square().mean() + net->forward(data).square().mean();
  }
  torch::nn::Sequential net{torch::nn::Linear(2, 9), torch::nn::Tanh(), torch::nn::Linear(9, 1)};
  at::Tensor coefficient;
};

TEST_P(Foreign, DerivativesByTheInputBeforeANumberIsMadeOfAParameter) {
  const int ranks = GetParam();
  const at::Tensor points = random_tensor({kRows, 2}, "points");
  const auto train = [](Physics& model, const at::Tensor& mine) {
    torch::optim::SGD optimizer(model.parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model.loss(mine).backward();
      optimizer.step();
    }
  };
  Physics whole;
  train(whole, points);
  for (const std::string wrap : {"", "net"}) {
    run_ranks(ranks, [&](World& world) {
      Physics model;
      auto sharded = fully_shard(model, world.group(), {.wrap = wrap, .average = true});
      train(model, rows_of(points, ranks, world.rank()));
      EXPECT_LT(slice_difference(model, named_values(whole), /*values=*/true), 10 * parity);
      if (ranks == 1) return;
      // A number of a slice that has been written since is a line for the log again.
      const at::Tensor x = points.clone().requires_grad_();
      torch::autograd::grad({model.net->forward(x).sum()}, {x});
      {
        const at::NoGradGuard no_grad;
        model.coefficient.mul_(0.5);
      }
      EXPECT_THAT(refusal([&] { model.coefficient.sum(); }), HasSubstr("'coefficient'"));
    });
  }
}

TEST(FullyShard, BuffersAreThoseOfRankZero) {
  const at::Tensor x = random_tensor({kRows, 5}, "x");
  for (const bool hybrid : {false, true}) {
    run_ranks(hybrid ? 4 : 3, [&](World& world) {
      const int rank = world.rank();
      comm::Group shard = world.group(), replicate;
      if (hybrid) {
        const int first = rank / 2 * 2;
        shard = world.subgroup({first, first + 1}, "shard" + std::to_string(first));
        replicate = world.subgroup({rank % 2, rank % 2 + 2}, "replicate" + std::to_string(rank % 2));
      }
      const auto model = std::make_shared<Normalized>();
      auto sharded = fully_shard(*model, shard, {.wrap = "last", .average = true, .replicate = replicate});
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        model->forward(x * (1 + rank) + rank).square().mean().backward();
        optimizer.step();
      }
      model->eval();
      const at::NoGradGuard no_grad;
      const at::Tensor mine = at::cat({model->norm->running_mean, model->norm->running_var, model->forward(x).flatten()});
      const at::Tensor all = at::empty({world.size() * mine.numel()});
      comm::all_gather(world.group(), all, mine);
      for (int other = 0; other < world.size(); ++other) EXPECT_TRUE(at::equal(all.narrow(0, other * mine.numel(), mine.numel()), mine));
      EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 2);
      Normalized alone;
      alone.forward(x);
      if (rank == 0) EXPECT_GT((model->norm->running_mean - alone.norm->running_mean).abs().max().item<double>(), 0);
    });
  }
}

/// Layers of tessera in a module of libtorch, whose operators trigger: each looks at its weight before an operator does.
struct WithOurs : torch::nn::Module {
  WithOurs() {
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("linear", linear);
    register_module("head", head);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(at::tanh(linear(norm(embedding(ids))))); }
  nn::Embedding embedding{12, 6};
  nn::RMSNorm norm{6};
  nn::Linear linear{6, 6};
  torch::nn::Linear head{6, 12};
};

TEST_P(Foreign, LayersOfOursInAPlainModule) {
  const at::Tensor ids = at::arange(kRows * 2).remainder(12).view({kRows, 2});
  const auto loss = [](WithOurs& model, const at::Tensor& x) { return at::cross_entropy_loss(model.forward(x).flatten(0, 1), x.flatten()); };
  for (const std::string wrap : {"", "*"}) expect_as_alone(GetParam(), {.wrap = wrap}, [] { return std::make_shared<WithOurs>(); }, loss, ids);
}

/// A function of a program's own over a parameter that no operator has seen: autograd has taken down the slice's shape.
struct OwnProduct : torch::autograd::Function<OwnProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight, const at::Tensor& x) {
    context->save_for_backward({x});
    return at::linear(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    return {grads[0].t().mm(context->get_saved_variables()[0]), at::Tensor()};
  }
};

TEST(FullyShard, AFunctionOfTheProgramsThatComesFirstIsNamed) {
  struct Own : torch::nn::Module {
    explicit Own(int64_t rows) {
      weight = register_parameter("weight", at::empty({rows, 5}));
      fill_parameters(*this);
    }
    at::Tensor weight;
  };
  // Of two rows a rank has one, over which autograd would add the whole's up; six have no such way.
  for (const int64_t rows : {2, 6}) {
    run_ranks(2, [&](World& world) {
      Own model(rows);
      auto sharded = fully_shard(model, world.group());
      const at::Tensor x = random_tensor({3, 5}, "x");
      EXPECT_THAT(refusal([&] { OwnProduct::apply(model.weight, x).square().sum().backward(); }),
                  ::testing::AllOf(HasSubstr("'weight'"), HasSubstr("autograd::Function")));
      model.zero_grad();
      const at::Tensor first = x + at::linear(x, model.weight).sum() * 0;
      OwnProduct::apply(model.weight, first).square().sum().backward();
      Own whole(rows);
      OwnProduct::apply(whole.weight, x).square().sum().backward();
      EXPECT_TRUE(at::allclose(model.weight.grad() / 2, whole.weight.grad().narrow(0, world.rank() * rows / 2, rows / 2)));
    });
  }
}

/// Sets its shift and scale by its first batch.
struct ActNorm : torch::nn::Module {
  explicit ActNorm(int64_t width) : loc(register_parameter("loc", at::zeros({width}))), scale(register_parameter("scale", at::ones({width}))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!initialized) {
      const at::NoGradGuard no_grad;
      loc.copy_(x.mean(0));
      scale.copy_(x.std(0) + 0.1);
      initialized = true;
    }
    return (x - loc) / scale;
  }
  at::Tensor loc, scale;
  bool initialized = false;
};

TEST_P(Foreign, ParametersThatAForwardSetsAreRefusedWhereRanksHaveSlices) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    const at::Tensor x = random_tensor({5, 8}, "x");
    ActNorm early(8), late(8), behind(8);
    early.forward(x);
    auto before = fully_shard(early, world.group());
    early.forward(x).sum().backward();
    auto sharded = fully_shard(late, world.group());
    auto too = fully_shard(behind, world.group());
    behind.initialized = true;
    const at::Tensor used = behind.forward(x);
    behind.initialized = false;
    if (ranks == 1) return late.forward(x).sum().backward();
    // One of two ranks has all of `loc`, and finds nothing wrong before `scale`.
    const auto said = ::testing::AllOf(::testing::ContainsRegex("aten::copy_ writes '(loc|scale)' of shape .8."), HasSubstr("before fully_shard"));
    EXPECT_THAT(refusal([&] { late.forward(x); }), said);
    EXPECT_THAT(refusal([&] { behind.forward(x); }), said) << "while the parameter is whole";
  });
}

/// One seed on all ranks, as a program on one device has it.
TEST_P(Foreign, DrawingIntoASliceIsRefused) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    const auto model = std::make_shared<torch::nn::LinearImpl>(4, 6);
    fill_parameters(*model);
    auto sharded = fully_shard(*model, world.group());
    if (ranks == 1) return torch::nn::init::normal_(model->weight), void();
    const at::Tensor before = model->weight.detach().clone(), x = random_tensor({3, 4}, "x");
    const auto refused = [&] {
      EXPECT_THAT(refusal([&] { torch::nn::init::normal_(model->weight); }),
                  ::testing::AllOf(HasSubstr("aten::normal_"), HasSubstr("'weight'"), HasSubstr("materialize"), HasSubstr("unshard")));
      EXPECT_THAT(refusal([&] { model->reset_parameters(); }), HasSubstr("aten::uniform_"));
      EXPECT_THAT(refusal([&] {
                    const at::NoGradGuard no_grad;
                    at::normal_out(model->weight, 0.0, 1.0, model->weight.sizes());
                  }),
                  ::testing::AllOf(HasSubstr("aten::normal"), HasSubstr("'weight'")));
      if (before.numel() == 0) return;  // libtorch divides by the number of rows before any operator
      EXPECT_THAT(refusal([&] { torch::nn::init::orthogonal_(model->weight); }), ::testing::AllOf(HasSubstr("orthogonal"), HasSubstr("'weight'")));
    };
    refused();
    EXPECT_TRUE(at::equal(model->weight.detach(), before));
    const at::Tensor loss = model->forward(x).sum();
    refused();  // while the parameter is whole
    loss.backward();
    model->weight.detach().normal_();  // this rank's rows
    unshard(*model);
    torch::nn::init::normal_(model->weight);
  });
}

}  // namespace
}  // namespace tessera
