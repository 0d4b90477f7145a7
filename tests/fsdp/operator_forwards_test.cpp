#include <functional>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/collectives.h"

/// Forwards that begin, and end, with operators over parameters, where no module is called.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// Plain libtorch whose forward begins in a way of one's choice with parameters alone.
struct Begins : torch::nn::Module {
  enum class With { Slice, Softmax, Sum, Cast, Copy, Detached, DetachedRow };
  explicit Begins(With with) : with(with) {
    positions = register_parameter("positions", at::empty({8, 6}));
    delta = register_parameter("delta", at::empty({8, 6}));
    row = register_parameter("row", at::empty({6}));
    fill_parameters(*this);
  }
  at::Tensor begin() const {
    switch (with) {
      case With::Slice:
        return positions.slice(0, 0, 4) + delta.slice(0, 4, 8);
      case With::Softmax:
        return positions.softmax(0).slice(0, 0, 4) * delta.slice(0, 0, 4);
      case With::Sum:
        return (positions + delta).slice(0, 0, 4);
      case With::Cast:
        return positions.to(at::kBFloat16).to(at::kFloat).slice(0, 0, 4) * delta.slice(0, 0, 4);
      case With::Copy:
        return positions.clone().slice(0, 0, 4) * delta.slice(0, 0, 4);
      case With::Detached:
        return at::linear(at::ones({4, 6}), positions.detach()).slice(1, 0, 6) + delta.slice(0, 0, 4);
      case With::DetachedRow:
        return (row.detach() * at::ones({4, 1})).slice(1, 0, 6) + delta.slice(0, 0, 4);
    }
    return {};
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor w = begin();
    return at::linear(x, w);
  }
  With with;
  at::Tensor positions, delta, row;
};

TEST(FullyShardLoop, AForwardOverOperatorsIsRightOrRefused) {
  using With = Begins::With;
  const at::Tensor x = random_tensor({3, 6}, "x");
  for (const auto with : {With::Slice, With::Softmax, With::Sum, With::Cast, With::Copy, With::Detached, With::DetachedRow}) {
    Begins whole(with);
    const at::Tensor out = whole.forward(x);
    out.square().sum().backward();
    const Gradients expected = named_gradients(whole);
    for (const bool training : {true, false}) {
      for (const bool gradients : {true, false}) {
        SCOPED_TRACE(::testing::Message() << "begins with " << static_cast<int>(with) << (training ? " training" : " evaluating")
                                          << (gradients ? " with gradients" : ""));
        run_ranks(2, [&](World& world) {
          Begins net(with);
          auto sharded = fully_shard(net, world.group(), {.average = true, .find_unused_parameters = true});
          net.train(training);
          const at::AutoGradMode mode(gradients);
          at::Tensor mine;
          std::string said;
          try {
            mine = net.forward(x);
          } catch (const ConfigError& error) {
            said = error.what();
          }
          if (said.empty()) {
            EXPECT_TRUE(mine.sizes() == out.sizes() && (mine - out).abs().max().item<double>() < 1e-5);
            if (!gradients) return;
            mine.square().sum().backward();
            EXPECT_LT(slice_difference(net, expected), parity);
          } else {
            EXPECT_THAT(said, HasSubstr("fully_shard: "));
            EXPECT_THAT(said, AnyOf(HasSubstr("'positions'"), HasSubstr("'delta'"), HasSubstr("'row'")));
            EXPECT_TRUE(!gradients || with == With::Detached || with == With::DetachedRow)
                << said;  // where gradients are recorded a forward is told from an optimizer
          }
        });
      }
    }
  }
}

TEST(FullyShardLoop, ALineForTheLogOnOneRankStartsNothing) {
  run_ranks(2,
            [&](World& world) {
              Net net;
              auto sharded = fully_shard(net, world.group(), {.wrap = "middle", .average = true});
              torch::optim::SGD optimizer(net.parameters(), 0.1);
              const Batch mine = part_of(whole_batch(samples), 2, world.rank());
              if (world.rank() == 0) {
                EXPECT_THAT(refusal([&] { net.middle->weight.norm(); }), HasSubstr("detach()"));
                std::ostringstream line;
                EXPECT_THAT(refusal([&] { line << net.middle->weight; }), HasSubstr("detach()"));
                line << net.middle->weight.detach() << net.middle->weight.detach().norm();
                const at::NoGradGuard no_grad;
                EXPECT_THAT(refusal([&] { net.middle->weight.norm(); }), HasSubstr("detach()"));
                EXPECT_THAT(refusal([&] { net.middle->clone(); }), AllOf(HasSubstr("'middle.weight'"), HasSubstr("unshard(model)")));
              }
              backward(net, mine);
              optimizer.step();
            },
            {.timeout = std::chrono::seconds(20)});
}

/// With gradients recorded a learned scale that is printed is the first operator of a forward, as far as anybody knows, and parameters are whole from there on.
TEST(FullyShardLoop, AForwardThatALineForTheLogBeganIsOverWhenAnOptimizerSteps) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;
  const std::vector<Make> optimizers{
      [](const auto& all) { return std::make_unique<torch::optim::Adam>(all, torch::optim::AdamOptions(0.05).amsgrad(true)); },
      [](const auto& all) { return std::make_unique<torch::optim::AdamW>(all, 0.05); },
      [](const auto& all) { return std::make_unique<torch::optim::RMSprop>(all, torch::optim::RMSpropOptions(0.05).momentum(0.5)); },
      [](const auto& all) { return std::make_unique<torch::optim::Adagrad>(all, 0.05); },
      [](const auto& all) { return std::make_unique<torch::optim::SGD>(all, torch::optim::SGDOptions(0.05).momentum(0.5)); }};
  const at::Tensor x = random_tensor({4, 5}, "x");
  for (const Make& make : optimizers) {
    const auto loop = [&](ScaledLayer& net, torch::optim::Optimizer& optimizer) {
      std::vector<double> lines;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        net.forward(x).square().sum().backward();
        lines.push_back(net.scale.exp().item<double>());
        optimizer.step();
        {
          const at::NoGradGuard no_grad;
          net.eval();  // what tells a forward from an optimizer
          lines.push_back(net.scale.exp().item<double>());
          net.train();
        }
      }
      return lines;
    };
    ScaledLayer whole;
    const auto optimizer = make(whole.parameters());
    const std::vector<double> expected = loop(whole, *optimizer);
    for (const int ranks : {2, 3}) {
      run_ranks(ranks,
                [&](World& world) {
                  ScaledLayer net;
                  auto sharded = fully_shard(net, world.group(), {.average = true});
                  const auto own = make(net.parameters());
                  const std::vector<double> lines = loop(net, *own);
                  for (size_t i = 0; i < lines.size(); ++i) EXPECT_NEAR(lines[i], expected[i], 1e-5);
                  EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
                },
                {.timeout = std::chrono::seconds(20)});
    }
  }
}

/// Derivatives by the input, and a learned scale of which one rank has all and the others nothing.
struct ScaledNet : torch::nn::Module {
  ScaledNet() {
    scale = register_parameter("scale", at::empty({}));
    register_module("net", net);
    fill_parameters(*this);
  }
  at::Tensor loss(const at::Tensor& data) {
    const at::AutoGradMode recorded(true);
    const at::Tensor x = data.detach().clone().requires_grad_(), out = net->forward(x);
    const at::Tensor slope = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return (slope * scale + out).square().mean();
  }
  torch::nn::Sequential net{torch::nn::Linear(2, 10), torch::nn::Tanh(), torch::nn::Linear(10, 1)};
  at::Tensor scale;
};

/// Other weights for a forward that records gradients, though nothing around it does, and then the trained ones back.
TEST(FullyShardLoop, WeightsArePutBackBehindAForwardThatRecordedGradients) {
  const at::Tensor x = random_tensor({6, 2}, "x");
  const auto loop = [](ScaledNet& net, const at::Tensor& mine) {
    torch::optim::SGD optimizer(net.parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net.loss(mine).backward();
      optimizer.step();
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> kept;
      for (const at::Tensor& parameter : net.parameters()) {
        kept.push_back(parameter.data());
        parameter.set_data(parameter.detach() * 0.5);
      }
      net.loss(mine);
      for (size_t i = 0; i < kept.size(); ++i) net.parameters()[i].set_data(kept[i]);
    }
  };
  ScaledNet whole;
  loop(whole, x);
  for (const int ranks : {2, 3}) {
    for (const std::string wrap : {"", "net"}) {
      run_ranks(ranks,
                [&](World& world) {
                  ScaledNet net;
                  auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
                  loop(net, x.narrow(0, 6 / ranks * world.rank(), 6 / ranks));
                  EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
                },
                {.timeout = std::chrono::seconds(20)});
    }
  }
}

TEST(FullyShardLoop, AShapeThatASliceHasTooDoesNotEndAForward) {
  for (const int ranks : {2, 3}) {
    for (const bool first : {true, false}) {
      for (const std::string wrap : {"", "*"}) {
        Patches whole(first);
        const at::Tensor x = random_tensor({8, 5, 3}, "x");
        whole.forward(x).square().sum().backward();
        const Gradients expected = named_gradients(whole);
        run_ranks(ranks,
                  [&](World& world) {
                    Patches net(first);
                    auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
                    const auto evaluate = [&] {
                      const at::NoGradGuard no_grad;
                      for (int64_t rows = 1; rows <= 8; ++rows) {
                        const at::Tensor some = x.narrow(0, 0, rows);
                        EXPECT_TRUE(at::allclose(net.forward(some), whole.forward(some), 1e-5, 1e-6)) << rows << " rows, " << ranks << " ranks";
                      }
                    };
                    for (int step = 0; step < 2; ++step) {
                      net.eval();
                      evaluate();
                      net.train();
                      net.zero_grad();
                      const at::Tensor loss = net.forward(x).square().sum();
                      evaluate();  // within the step
                      loss.backward();
                      EXPECT_LT(slice_difference(net, expected), parity);
                    }
                  },
                  {.timeout = std::chrono::seconds(20)});
      }
    }
  }
}

/// Products whose input has, for some number of rows, the shape of a slice of their weight: of a slice comes a shape that nobody refuses.
struct Products : torch::nn::Module {
  Products() {
    weight = register_parameter("weight", at::empty({8, 6}));
    register_module("square", square);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return square(at::linear(x, weight)); }
  at::Tensor weight;
  torch::nn::Linear square{8, 8};
};

TEST(FullyShardLoop, AnInputOfASlicesShapeWithinAStep) {
  for (const std::string wrap : {"", "*"}) {
    run_ranks(2, [&](World& world) {
      Products whole, net;
      auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
      const at::Tensor x = random_tensor({8, 6}, "x");
      const at::Tensor loss = net.forward(x).square().sum();
      const at::NoGradGuard no_grad;
      for (int64_t rows = 1; rows <= 8; ++rows) {
        const at::Tensor out = net.forward(x.narrow(0, 0, rows)), expected = whole.forward(x.narrow(0, 0, rows));
        ASSERT_EQ(out.sizes(), expected.sizes());
        EXPECT_TRUE(at::allclose(out, expected));
      }
    });
  }
}

TEST(FullyShardLoop, OneRankThatHasAllRowsIsNotLeftAlone) {
  run_ranks(2,
            [&](World& world) {
              Patches net(true);
              auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
              const at::NoGradGuard no_grad;
              const int64_t mine = nn::slice_of(net.positions).numel();
              EXPECT_TRUE(mine == 0 || mine == 20);
              at::Tensor average = at::zeros({1, 5, 4}), slices = net.positions.detach().clone();
              slices.mul_(0.5).add_(net.positions, 0.5);
              EXPECT_TRUE(at::equal(slices, net.positions.detach()));
              if (mine == 0) {  // the other rank sees a slice beside one of its shape
                EXPECT_THAT(refusal([&] { average.add_(net.positions); }), HasSubstr("'positions'"));
                EXPECT_THAT(refusal([&] { (void)(at::ones({1, 5, 4}) + net.positions); }), HasSubstr("eval()"));
              } else {
                average.add_(net.positions);
              }
              net.eval();
              (void)net.forward(random_tensor({1, 5, 3}, "x"));
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST(FullyShardLoop, WhatIsMadeLikeAParameterIsAsLargeAsTheWhole) {
  const std::vector<Gate::Use> uses{
      [](auto& h, auto& x, auto& g) { return h * g + x * (1 - g); },
      [](auto& h, auto& x, auto& g) { return x / (1 / g) + h; },
      [](auto& h, auto& x, auto& g) { return h + x * (at::ones_like(g) - g); },
      [](auto& h, auto& x, auto& g) { return h * at::where(g > 0.7, g, at::zeros_like(g)) + x; },
      [](auto& h, auto& x, auto& g) { return h * at::softplus(g) + x * at::full_like(g, 0.5); },
      [](auto& h, auto& x, auto& g) { return h + x * at::zeros_like(g).copy_(g); },
      [](auto& h, auto& x, auto& g) { return h * (g + at::empty_like(g).fill_(2)) + x; },
  };
  for (const int ranks : {1, 2, 3}) {
    for (const int64_t size : {2, 3, 6}) {
      for (size_t i = 0; i < uses.size(); ++i) {
        for (const std::string wrap : {"", "in"}) {
          SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << size << " channels, use " << i << ", wrap '" << wrap << "'");
          const auto trained = [&](Gate& net, int rank, int of) {
            std::vector<at::Tensor> seen;
            torch::optim::Adam adam(net.parameters(), 0.01);
            for (int step = 0; step < 3; ++step) {
              net.train();
              adam.zero_grad();
              const at::Tensor x = random_tensor({6, size}, "x" + std::to_string(step));
              net.forward(x.chunk(of)[rank]).square().sum().backward();
              if (step != 1) adam.step();
              {
                const at::NoGradGuard no_grad;
                net.eval();
                seen.push_back(net.forward(x).clone());
              }
              if (step == 1) adam.step();  // the evaluation stood between the gradients and their update
            }
            return seen;
          };
          Gate whole(size, uses[i]);
          const std::vector<at::Tensor> want = trained(whole, 0, 1);
          run_ranks(ranks,
                    [&](World& world) {
                      Gate net(size, uses[i]);
                      auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
                      const std::vector<at::Tensor> got = trained(net, world.rank(), ranks);
                      for (size_t step = 0; step < want.size(); ++step) {
                        ASSERT_EQ(got[step].sizes(), want[step].sizes());
                        EXPECT_LT((got[step] - want[step]).abs().max().item<double>(), 1e-5) << step;
                      }
                    },
                    {.timeout = std::chrono::seconds(20)});
        }
      }
    }
  }
}

/// As compilers evaluate `in(x) * g + x * (1 - g)`: the right side first.
TEST(FullyShardLoop, AForwardMayBeginWithANumberMinusAParameter) {
  const std::vector<Gate::Use> begins{[](auto&, auto& x, auto& g) { return x * (1 - g); }, [](auto&, auto& x, auto& g) { return x + 2.5 / g; }};
  const Gate::Use plain = [](auto& h, auto&, auto&) { return h; };
  const auto trained = [](Gate& net, int rank, int of) {
    std::vector<at::Tensor> seen;
    torch::optim::SGD sgd(net.parameters(), 0.01);
    const at::Tensor x = random_tensor({6, 3}, "x");
    for (int step = 0; step < 3; ++step) {
      net.train();
      sgd.zero_grad();
      net.forward(x.chunk(of)[rank]).square().sum().backward();
      sgd.step();
      const at::NoGradGuard no_grad;
      net.eval();
      seen.push_back(net.forward(x).clone());
    }
    return seen;
  };
  for (const int ranks : {1, 2, 3}) {
    for (const Gate::Use& begin : begins) {
      for (const std::string wrap : {"", "in"}) {
        Gate whole(3, plain);
        whole.begin = begin;
        const std::vector<at::Tensor> want = trained(whole, 0, 1);
        run_ranks(ranks,
                  [&](World& world) {
                    Gate net(3, plain);
                    net.begin = begin;
                    auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
                    const std::vector<at::Tensor> got = trained(net, world.rank(), ranks);
                    for (size_t step = 0; step < want.size(); ++step) {
                      ASSERT_EQ(got[step].sizes(), want[step].sizes());
                      EXPECT_LT((got[step] - want[step]).abs().max().item<double>(), 1e-5) << ranks << " ranks, step " << step;
                    }
                    if (ranks == 1) return;
                    net.train();
                    net.in(random_tensor({1, 3}, "x")).sum().backward();
                    const at::NoGradGuard no_grad;
                    EXPECT_THAT(refusal([&] { (void)(1 - net.g); }), HasSubstr("'g'")) << "an optimizer, or a line for a log";
                  },
                  {.timeout = std::chrono::seconds(20)});
      }
    }
  }
}

TEST(FullyShardLoop, AnOptimizersStateIsASlicesBehindAnEvaluationToo) {
  Gate whole(6, [](auto& h, auto& x, auto& g) { return h * g + x; });
  const auto trained = [](Gate& net, int rank, int of) {
    torch::optim::Adam adam(net.parameters(), 0.01);
    const at::Tensor x = random_tensor({6, 6}, "x");
    for (int step = 0; step < 2; ++step) {
      adam.zero_grad();
      net.forward(x.chunk(of)[rank]).square().sum().backward();
      net.eval();
      const at::NoGradGuard no_grad;
      (void)net.forward(x);
      adam.step();  // the first makes its state
    }
  };
  trained(whole, 0, 1);
  const Gradients expected = named_values(whole);
  run_ranks(2, [&](World& world) {
    Gate net(6, whole.use);
    auto sharded = fully_shard(net, world.group(), {.wrap = "in"});
    trained(net, world.rank(), 2);
    EXPECT_LT(slice_difference(net, expected, /*values=*/true), 1e-5);
  });
}

/// Looks up the nearest code within its forward, without gradients; the codes are used by nothing before.
struct Quantizer : torch::nn::Module {
  explicit Quantizer(bool decodes) : decodes(decodes) {
    register_module("enc", enc);
    codes = register_parameter("codes", at::empty({6, 4}));
    if (decodes) register_module("dec", dec);
    fill_parameters(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor z = enc(x);
    at::Tensor nearest, count;
    {
      const at::NoGradGuard no_grad;
      nearest = at::cdist(z, codes).argmin(1);
      count = at::zeros_like(codes).add(1).sum();
    }
    const at::Tensor q = codes.index_select(0, nearest), passed = z + (q - z).detach();
    return (q - z.detach()).square().sum() + (z - q.detach()).square().sum() + (decodes ? dec(passed) : passed).square().sum() / count;
  }
  bool decodes;
  torch::nn::Linear enc{3, 4}, dec{4, 3};
  at::Tensor codes;
};

TEST(FullyShardLoop, ABlockWithoutGradientsInAForwardHasTheWhole) {
  const at::Tensor x = random_tensor({6, 3}, "x");
  for (const bool decodes : {false, true}) {
    const auto train = [](Quantizer& net, const at::Tensor& mine) {
      torch::optim::SGD optimizer(net.parameters(), 0.01);
      std::vector<at::Tensor> losses;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = net.loss(mine);  // with the gradients of the step before
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
        losses.push_back(loss.detach());
      }
      return at::stack(losses);
    };
    Quantizer whole(decodes);
    train(whole, x);
    for (const int ranks : {2, 3}) {
      for (const std::string wrap : {"", "enc", "*"}) {
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, wrap '" << wrap << "'" << (decodes ? ", decodes" : ""));
        run_ranks(ranks,
                  [&](World& world) {
                    Quantizer net(decodes);
                    const auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
                    train(net, x.chunk(ranks)[world.rank()]);
                    EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 10 * parity);
                  },
                  {.timeout = std::chrono::seconds(20)});
      }
    }
  }
}

/// A table beside values that may have the shape of some rank's rows of it.
struct Table : torch::nn::Module {
  using Use = std::function<at::Tensor(const at::Tensor& table, const at::Tensor& h)>;
  Table(int64_t rows, Use use) : use(std::move(use)) {
    register_module("in", in);
    table = register_parameter("table", at::empty({rows, 4}));
    register_module("out", out);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return use(table, at::tanh(in(x))).sum() + out(table).sum(); }
  Use use;
  torch::nn::Linear in{3, 4}, out{4, 4};
  at::Tensor table;
};

TEST(FullyShardLoop, AForwardWithoutGradientsHasTheWholeBesideValuesOfASlicesShape) {
  const std::vector<Table::Use> uses{
      [](auto& p, auto& h) { return (h + p).square(); },
      [](auto& p, auto& h) { return at::where(h > 0, h, p); },
      [](auto& p, auto& h) { return h.lerp(p, 0.3); },
      [](auto& p, auto& h) { return at::cosine_similarity(h, p, 1).exp(); },
      [](auto& p, auto& h) { return at::cdist(h, p); },
      [](auto& p, auto& h) { return at::inner(h, p).exp(); },
      [](auto& p, auto& h) { return h.sum() * at::zeros_like(p).add(1).sum(); },
      [](auto& p, auto& h) { return at::matmul(h, (p * at::full_like(p, 0.7)).t()).exp(); },
      [](auto& p, auto& h) { return h.sum() * at::ones_like(p).sum(); },
      [](auto& p, auto& h) {
        (void)p.detach();  // which ends no forward
        return at::cdist(h, p);
      },
  };
  for (const int ranks : {2, 3}) {
    for (const int64_t rows : std::vector<int64_t>{ranks, 6}) {
      for (const int64_t batch : {1, 2, 3}) {
        for (size_t i = 0; i < uses.size(); ++i) {
          if (i < 4 && batch > 1) continue;  // which do not broadcast
          Table whole(rows, uses[i]);
          const at::Tensor x = random_tensor({batch, 3}, "x");
          const auto steps = [&](Table& net) {
            std::vector<double> seen;
            torch::optim::SGD sgd(net.parameters(), 0.01);
            const auto look = [&] {
              const at::NoGradGuard no_grad;
              seen.push_back(net.forward(x).template item<double>());
            };
            for (int step = 0; step < 2; ++step) {
              look();  // in training mode
              sgd.zero_grad();
              (net.in(x).sum() + net.table.square().sum() + net.out(net.table).sum()).backward();
              sgd.step();
              look();
              net.eval();
              look();
              net.train();
            }
            return seen;
          };
          const std::vector<double> expected = steps(whole);
          for (const std::string wrap : {"", "*"}) {
            SCOPED_TRACE(::testing::Message() << "use " << i << ", " << rows << " rows beside " << batch << ", " << ranks << " ranks, wrap '" << wrap << "'");
            run_ranks(ranks,
                      [&](World& world) {
                        Table net(rows, uses[i]);
                        const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
                        const std::vector<double> seen = steps(net);
                        for (size_t k = 0; k < seen.size(); ++k) EXPECT_NEAR(seen[k], expected[k], 1e-4 * std::abs(expected[k])) << k;
                      },
                      {.timeout = std::chrono::seconds(20)});
          }
        }
      }
    }
  }
}

/// Where nothing says that a forward runs: by the layout, so that no rank waits for one that refuses, or has taken its rows.
TEST(FullyShardLoop, AnOperatorThatMayBeAForwardsIsRefusedOnEveryRankThatCanTell) {
  for (const int ranks : {2, 3}) {
    for (const int64_t rows : {5, 6}) {
      for (const std::string wrap : {"", "*"}) {
        run_ranks(ranks, [&](World& world) {
          Table net(rows, {});
          const auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
          const at::NoGradGuard no_grad;
          const int64_t first = nn::slice_of(net.table).local_shape()[0];
          std::vector<int64_t> all(ranks);
          const at::Tensor counts = at::empty({ranks}, at::kLong);
          comm::all_gather(world.group(), counts, at::full({1}, first, at::kLong));
          for (int rank = 0; rank < ranks; ++rank) {
            const int64_t those = counts[rank].item<int64_t>();
            const at::Tensor h = at::ones({those, 4});
            EXPECT_THAT(refusal([&] { (void)at::cdist(h, net.table); }), AllOf(HasSubstr("'table'"), HasSubstr("eval()"), HasSubstr("detach()"))) << those;
            if (those != first) EXPECT_THAT(refusal([&] { (void)(h * net.table); }), AllOf(HasSubstr("'table'"), HasSubstr("eval()"))) << those;
          }
          EXPECT_TRUE(at::equal(at::ones_like(net.table.detach()) * net.table, net.table.detach())) << "as an optimizer takes it";
        });
      }
    }
  }
}

/// A rule of the program's own that computes its update out of place.
TEST(FullyShardLoop, AnUpdateIsOfThisRanksRowsBehindAForwardWithoutGradients) {
  const Table::Use use = [](auto& p, auto& h) { return at::cdist(h, p); };
  const at::Tensor x = random_tensor({3, 3}, "x");
  const auto train = [&](Table& net) {
    for (int step = 0; step < 2; ++step) {
      net.zero_grad();
      net.forward(x).backward();
      const at::NoGradGuard no_grad;
      (void)net.forward(x);  // a line for the log
      for (const at::Tensor& p : net.parameters()) p.sub_(p.grad().mul(0.01).add(p, 0.02).sign().add(p, 0.5), 0.01);
    }
  };
  Table whole(6, use);
  train(whole);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks,
              [&](World& world) {
                Table net(6, use);
                const auto sharded = fully_shard(net, world.group(), {.wrap = "*", .average = true});
                train(net);
                EXPECT_LT(slice_difference(net, named_values(whole), /*values=*/true), 1e-4);
              },
              {.timeout = std::chrono::seconds(20)});
  }
}

TEST(FullyShardLoop, ACopyInAnEvaluationIsRefusedWithALineThatIsRight) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      const Table::Use copies = [](auto& p, auto& h) { return h.sum() * p.clone(); }, right = [](auto& p, auto& h) { return h.sum() * (p * 1); };
      Table whole(6, right), net(6, copies);
      const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
      const at::Tensor x = random_tensor({2, 3}, "x");
      const at::NoGradGuard no_grad;
      net.eval();
      EXPECT_THAT(refusal([&] { net.forward(x); }), AllOf(HasSubstr("'table'"), HasSubstr("weight * 1")));
      net.use = right;
      EXPECT_TRUE(at::allclose(net.forward(x), whole.forward(x)));
    });
  }
}

/// With one shard in 16 bits, what follows the parameters goes by those in 32, whatever forward came before.
TEST(FullyShardLoop, AnAverageBehindAnEvaluationIsOfTheParametersThatAreKept) {
  Table net(6, {});
  const at::Tensor kept = net.table.detach().clone();
  const auto sharded = fully_shard(net, comm::Group::self(), {.param_dtype = at::kBFloat16});
  const at::NoGradGuard no_grad;
  for (const bool training : {false, true}) {
    net.train(training);
    (void)net.in(random_tensor({2, 3}, "x").to(at::kBFloat16));
    at::Tensor average = at::zeros_like(kept);
    average.add_((net.table - average) / 2);
    EXPECT_TRUE(at::equal(average, kept / 2)) << training;
  }
}

/// libtorch's optimizers say how their state lies in memory. One that is made anew begins with a slice's, whatever was updated before.
TEST(FullyShardLoop, ANewOptimizersStateIsASlicesBehindAnEvaluation) {
  run_ranks(2, [&](World& world) {
    Table net(6, [](const at::Tensor& table, const at::Tensor& h) { return table.sum() * h.sum(); });
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const auto backward = [&] { net.forward(random_tensor({2, 3}, "x")).backward(); };
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      (void)net.forward(random_tensor({2, 3}, "x"));
    };
    torch::optim::SGD first(net.parameters(), 0.1);
    backward();
    first.step();
    torch::optim::Adam second(net.parameters(), 0.1);
    second.zero_grad();
    backward();
    evaluate();
    second.step();
    for (const auto& [key, state] : second.state()) {
      const auto& moments = static_cast<const torch::optim::AdamParamState&>(*state);
      EXPECT_EQ(moments.exp_avg().sizes(), static_cast<const c10::TensorImpl*>(key)->sizes());
    }
  });
}

/// Behind train() no forward without gradients is under way: what one rank prints gathers nothing.
TEST(FullyShardLoop, ALineForALogBehindAnEvaluationThatHasEndedIsRefused) {
  run_ranks(2, [&](World& world) {
    Table net(6, {});
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const at::NoGradGuard no_grad;
    net.eval();
    (void)net.in(random_tensor({2, 3}, "x"));
    net.train();
    if (world.rank() == 0) EXPECT_THAT(refusal([&] { (void)net.table.norm(); }), HasSubstr("nothing tells a forward"));
  });
}

/// Made of the slice before the first layer, where gradients are recorded.
TEST(FullyShardLoop, APenaltyThatBeginsWithASlicesZerosIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    Table net(6, {});
    const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
    const at::Tensor zeros = at::zeros_like(net.table);
    EXPECT_THAT(refusal([&] { (void)at::l1_loss(net.table, zeros); }), AllOf(HasSubstr("aten::l1_loss was given 'table'"), HasSubstr("zeros_like")));
    const at::Tensor h = net.in(random_tensor({2, 3}, "x"));
    EXPECT_EQ(at::l1_loss(net.table, at::zeros_like(net.table)).item<float>(), net.table.abs().mean().item<float>()) << "the way out";
  });
}

}  // namespace
}  // namespace tessera
