#include <functional>

#include <gmock/gmock.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "support.h"

/// Writes to what is gathered, and by rows of the whole.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

struct TwoLayersImpl : nn::Module {
  TwoLayersImpl() : first(6, 6), last(6, 2) {
    register_module("first", first);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))); }

  nn::Linear first, last;
};

struct TwoPlainLayersImpl : torch::nn::Module {
  TwoPlainLayersImpl() : first(6, 6), last(6, 2) {
    register_module("first", first);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))); }

  torch::nn::Linear first, last;
};

template <class Model>
void refuse_writes_by_rows(int ranks) {
  const at::Tensor first_row = at::zeros({1}, at::kLong), x = random_tensor({4, 6}, "x");
  using Write = std::function<void(at::Tensor)>;
  const std::vector<std::pair<std::string, Write>> by_rows{
      {"triu_", [](at::Tensor t) { t.triu_(); }},
      {"fill_diagonal_", [](at::Tensor t) { t.fill_diagonal_(0); }},
      {"index_fill_", [&](at::Tensor t) { t.index_fill_(0, first_row, 0.); }},
      {"index_fill_", [&](at::Tensor t) { t.index_fill_(-2, first_row, 0.); }},
      {"index_put_", [&](at::Tensor t) { t.index_put_({first_row}, 0.); }},
      {"index_add_", [&](at::Tensor t) { t.index_add_(0, first_row, at::ones({1, 6})); }},
      {"scatter_", [&](at::Tensor t) { t.scatter_(0, at::zeros({1, 6}, at::kLong), 0.); }},
      {"renorm_", [](at::Tensor t) { t.renorm_(2, 1, 0.5); }},
      {"cumsum_", [](at::Tensor t) { t.cumsum_(0); }},
      {"eye", [](const at::Tensor& t) { torch::nn::init::eye_(t); }},
  };
  const std::vector<Write> by_elements{
      [](at::Tensor t) { t.renorm_(2, 0, 0.5); },
      [&](at::Tensor t) { t.index_fill_(1, first_row, 0.); },
      [](at::Tensor t) { t.index_put_({t.detach().abs() < 0.1}, 0.); },
      [](at::Tensor t) { t.clamp_(-1, 1); },
      [](at::Tensor t) { t.detach().narrow(0, 0, t.size(0) / 2).zero_(); },
  };
  run_ranks(ranks, [&](World& world) {
    Model model;
    auto sharded = fully_shard(model, world.group());
    const at::Tensor weight = model.first->weight, last = model.last->bias;
    const auto writes = [&](const at::Tensor& written, const std::string& whose) {
      const at::NoGradGuard no_grad;
      const at::Tensor before = written.detach().clone();
      for (const auto& [name, write] : by_rows) {
        EXPECT_THAT(refusal([&] { write(written); }), AllOf(HasSubstr("aten::" + name + " "), HasSubstr(whose + "'first.weight'"), HasSubstr("slice_of")));
      }
      EXPECT_TRUE(at::equal(written.detach(), before));
      for (const Write& write : by_elements) EXPECT_NO_THROW(write(written));
    };
    writes(weight, "given ");
    const at::Tensor loss = model.forward(x).pow(2).sum();
    {
      const at::NoGradGuard no_grad;
      EXPECT_THAT(refusal([&] { at::Tensor(weight).triu_(); }), HasSubstr("'first.weight'")) << "between forward and backward";
    }
    loss.backward();
    writes(weight.grad(), "the gradient of ");
    const at::Tensor gradient = weight.grad();
    EXPECT_NO_THROW((void)gradient.mean(0, true)) << "a line for a log, of this rank's rows";
    EXPECT_NO_THROW(gradient.sub_(gradient.mean(1, true)));
    EXPECT_THAT(refusal([&] { last.grad().index_fill_(0, first_row, 0.); }), HasSubstr("the gradient of 'last.bias'"))
        << "on the ranks that have none of it, too";
    EXPECT_NO_THROW(gradient.detach().narrow(0, 0, gradient.size(0) / 2).zero_());
    unshard(model);
    const at::NoGradGuard no_grad;
    at::Tensor(weight).triu_();
  });
}

TEST(FullyShardLoop, WhatGoesByRowsOfTheWholeIsRefusedOnEveryRank) {
  for (const int ranks : {2, 3}) {
    refuse_writes_by_rows<TwoLayersImpl>(ranks);
    refuse_writes_by_rows<TwoPlainLayersImpl>(ranks);
  }
}

/// Writes its weight within its forward.
struct WritingImpl : torch::nn::Module {
  explicit WritingImpl(std::function<void(at::Tensor)> write) : first(6, 6), last(6, 2), write(std::move(write)) {
    register_module("first", first);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(first(x));
    if (write) write(last->weight);
    return last(h);
  }

  torch::nn::Linear first, last;
  std::function<void(at::Tensor)> write;
};

/// What is gathered is thrown away, and a handle made in a forward is one on that: what is written there is this rank's rows, or nothing.
TEST(FullyShardLoop, AWriteToWhatIsGatheredIsThatOfOneProcessOrRefusedByName) {
  struct Write {
    std::string name;
    bool records;  ///< gradients
    bool refused;
    std::function<void(at::Tensor)> write;
  };
  const std::vector<Write> writes{
      {"clamp_", true, true, [](const at::Tensor& w) { w.data().clamp_(-0.1, 0.1); }},
      {"clamp_", true, true, [](const at::Tensor& w) { w.detach().clamp_(-0.1, 0.1); }},
      {"div_", true, true, [](const at::Tensor& w) { w.data().div_(w.data().norm()); }},
      {"fill_diagonal_", true, true, [](const at::Tensor& w) { w.data().fill_diagonal_(0); }},
      {"tril_", false, true, [](const at::Tensor& w) { w.data().tril_(); }},
      {"fill_diagonal_", false, true, [](const at::Tensor& w) { w.detach().fill_diagonal_(0); }},
      {"index_fill_", false, true, [](const at::Tensor& w) { w.detach().index_fill_(0, at::zeros({1}, at::kLong), 0.); }},
      {"zero_", false, true, [](const at::Tensor& w) { w.select(0, 0).zero_(); }},
      {"zero_", false, true, [](const at::Tensor& w) { w.data().narrow(1, 0, 2).zero_(); }},
      {"clamp_", false, false, [](at::Tensor w) { w.clamp_(-0.1, 0.1); }},
      {"clamp_", false, false, [](const at::Tensor& w) { w.data().clamp_(-0.1, 0.1); }},
      {"div_", false, false, [](at::Tensor w) { w.div_(w.norm()); }},
      {"unsqueeze_", true, false, [](const at::Tensor& w) { w.detach().unsqueeze_(0); }},
  };
  const auto train = [](WritingImpl& net, const at::Tensor& x) {
    torch::optim::SGD optimizer(net.parameters(), 0.02);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net.forward(x).square().sum().backward();
      optimizer.step();
    }
  };
  const at::Tensor x = random_tensor({6, 6}, "x");
  for (const Write& one : writes) {
    const auto write = [&](const at::Tensor& w) {
      const at::AutoGradMode mode(one.records);
      one.write(w);
    };
    WritingImpl whole(write);
    train(whole, x);
    for (const int ranks : {2, 3}) {
      for (const std::string wrap : {"", "*"}) {
        SCOPED_TRACE(one.name + (one.records ? ", gradients recorded, " : ", ") + std::to_string(ranks) + " ranks, wrap '" + wrap + "'");
        run_ranks(ranks, [&](World& world) {
          WritingImpl net(write);
          const auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
          const at::Tensor mine = x.chunk(ranks)[world.rank()];
          if (one.refused) {
            EXPECT_THAT(refusal([&] { train(net, mine); }),
                        AllOf(HasSubstr("aten::" + one.name + " "), HasSubstr("'last.weight'"), HasSubstr("between steps")));
            return;
          }
          train(net, mine);
          unshard(net);
          for (size_t i = 0; i < net.parameters().size(); ++i) EXPECT_TRUE(at::allclose(net.parameters()[i], whole.parameters()[i], 1e-4, 1e-5)) << i;
        });
      }
    }
  }
}

/// With one shard there is nothing to gather, and all the same what is written is not the slice.
TEST(FullyShardLoop, AWriteToWhatIsGatheredIsRefusedWithOneShardToo) {
  run_ranks(2, [](World& world) {
    WritingImpl net([](const at::Tensor& w) { w.data().clamp_(-0.1, 0.1); });
    const auto sharded = fully_shard(net, comm::Group::self(), {.replicate = world.group()});
    EXPECT_THAT(refusal([&] { net.forward(random_tensor({2, 6}, "x")); }), HasSubstr("aten::clamp_ writes 'last.weight'"));
  });
}

}  // namespace
}  // namespace tessera
