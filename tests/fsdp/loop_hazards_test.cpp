// What programs do around a loop over sharded modules that would part ranks without a word: it is right, or it is refused by name.

#include <functional>
#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace testing_support;

void train(DeepNet& net, torch::optim::Optimizer& optimizer, const Batch& batch) {
  optimizer.zero_grad();
  backward_of(net, batch);
  optimizer.step();
}

enum class Loaded { File, Data, Slices };

void load(torch::nn::Module& net, const std::shared_ptr<torch::nn::Module>& saved, Loaded how, bool sharded) {
  std::stringstream file;
  if (how == Loaded::File) {
    torch::save(saved, file);
    auto into = std::shared_ptr<torch::nn::Module>(&net, [](auto*) {});
    torch::load(into, file);
    return;
  }
  const at::NoGradGuard no_grad;
  const auto parameters = net.parameters(), values = saved->parameters();
  if (how == Loaded::Data || !sharded) {
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].set_data(values[i].detach().clone());
  } else {  // what slices were saved from
    std::vector<at::Tensor> slices;
    for (size_t i = 0; i < parameters.size(); ++i) slices.push_back(take(values[i].detach(), nn::slice_of(parameters[i])));
    torch::nn::utils::vector_to_parameters(torch::nn::utils::parameters_to_vector(slices), parameters);
  }
}

TEST(FullyShardLoop, WeightsAreLoadedAfterWrapping) {
  DeepNet saved;
  fill_parameters(*saved, 9);
  for (const auto how : {Loaded::File, Loaded::Data, Loaded::Slices}) {
    const auto loop = [&](DeepNet& net, torch::optim::Optimizer& optimizer, const auto& batch, bool sharded) {
      train(net, optimizer, batch(0));
      load(*net, saved.ptr(), how, sharded);
      at::Tensor out;
      {
        const at::NoGradGuard no_grad;
        out = net(whole_batch(samples, 50).x);
      }
      load(*net, saved.ptr(), how, sharded);
      train(net, optimizer, batch(1));
      train(net, optimizer, batch(2));
      return out;
    };
    DeepNet whole;
    auto optimizer = momentum(*whole);
    const at::Tensor out = loop(whole, optimizer, [](int step) { return whole_batch(samples, step); }, false);
    const Gradients expected = named_values(*whole);
    for (const auto trigger : kBoth) {
      run_ranks(2, [&](World& world) {
        DeepNet net;
        auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
        auto own = momentum(*net);
        const at::Tensor mine = loop(net, own, [&](int step) { return part_of(whole_batch(samples, step), 2, world.rank()); }, true);
        EXPECT_LT((mine - out).abs().max().item<double>(), 10 * parity * out.abs().max().item<double>());
        EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity);
      });
    }
  }
}

/// Evaluates an average and puts the trained weights back: their values are in an alias of the slices alone.
TEST(FullyShardLoop, AnAliasThatIsKeptKeepsItsValues) {
  const auto swap = [](torch::nn::Module& net, bool whole, auto&& within) {
    std::vector<at::Tensor> kept, others;
    for (const at::Tensor& parameter : net.parameters()) {
      kept.push_back(parameter.data());
      others.push_back(at::full(whole ? at::IntArrayRef(nn::slice_of(parameter).shape) : parameter.sizes(), 0.25, parameter.scalar_type()));
      parameter.set_data(others.back());
    }
    within();
    for (size_t i = 0; i < kept.size(); ++i) net.parameters()[i].set_data(kept[i]);
  };
  for (const auto trigger : kBoth) {
    for (const bool whole : {true, false}) {
      for (const auto offload : {Offload::None, Offload::Host}) {
        run_ranks(3, [&](World& world) {
          DeepNet net, plain;
          auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger, .offload = offload});
          const Batch batch = whole_batch(samples);
          at::Tensor expected, within;
          swap(*plain, whole, [&] { expected = plain(batch.x).detach(); });
          swap(*net, whole, [&] { within = net(batch.x).detach(); });
          EXPECT_LT((within - expected).abs().max().item<double>(), 10 * parity * expected.abs().max().item<double>());
          const at::NoGradGuard no_grad;
          expected = plain(batch.x);
          EXPECT_LT((net(batch.x) - expected).abs().max().item<double>(), 10 * parity * expected.abs().max().item<double>());
          // Others' aliases go with their parameters all the while.
          const at::Tensor alias = net->first->weight.data();
          swap(*net->blocks[0], whole, [&] { net(batch.x); });
          alias.zero_();
          EXPECT_EQ(net->first->weight.detach().ne(0).sum().item<int64_t>(), 0);
        });
      }
    }
  }
}

TEST(FullyShardLoop, OneRanksFileIsNotEverybodysSlices) {
  run_ranks(2, [&](World& world) {
    auto net = std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(3, 4).bias(false));
    fill_parameters(*net);
    const auto sharded = fully_shard(*net, world.group());
    std::stringstream file;
    torch::save(net, file);
    const std::string own = file.str();
    at::Tensor bytes = at::empty({static_cast<int64_t>(own.size())}, at::kByte);
    std::ranges::copy(own, bytes.data_ptr<uint8_t>());
    torch::load(net, file);
    net->forward(at::ones({1, 3})).sum().backward();  // its own slices: as it was
    comm::broadcast(world.group(), bytes, 0);
    std::stringstream of_first(std::string(bytes.data_ptr<uint8_t>(), bytes.data_ptr<uint8_t>() + bytes.numel()));
    torch::load(net, of_first);
    EXPECT_THAT(refusal([&] { net->forward(at::ones({1, 3})); }), HasSubstr("was given the same rows on every rank"));
    std::stringstream again(std::string(bytes.data_ptr<uint8_t>(), bytes.data_ptr<uint8_t>() + bytes.numel()));
    torch::load(net, again);
    EXPECT_THAT(refusal([&] { unshard(*net); }), HasSubstr("was given the same rows on every rank")) << "nor an export";
  });
}

TEST(FullyShardLoop, UnshardThatIsRefusedLeavesTheWrapperAtWork) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      nn::Linear layer(nn::LinearOptions(3, 4).bias(false));
      fill_parameters(*layer);
      const at::Tensor x = at::ones({1, 3}), expected = layer(x).detach();
      auto sharded = fully_shard(layer, world.group(), {.trigger = trigger});
      const at::Tensor slice = layer->weight.detach().clone();
      layer->weight.set_data(at::ones({5, 5}));
      EXPECT_THAT(refusal([&] { unshard(layer); }), HasSubstr("was given a tensor of shape [5, 5]"));
      layer->weight.set_data(slice);
      EXPECT_TRUE(layer(x).equal(expected));
      unshard(layer);
      EXPECT_EQ(layer->weight.sizes(), at::IntArrayRef({4, 3}));
      EXPECT_TRUE(layer(x).equal(expected));
    });
  }
}

/// What the refusal says helps: until it is done, it is refused again.
TEST(FullyShardLoop, AfterOneRanksSlicesTheWholeIsTakenIn) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      nn::Linear layer(nn::LinearOptions(3, 4).bias(false));
      fill_parameters(*layer);
      auto sharded = fully_shard(layer, world.group(), {.trigger = trigger});
      const at::Tensor of_first = layer->weight.detach().clone();
      comm::broadcast(world.group(), of_first, 0);
      layer->weight.set_data(of_first.clone());
      const at::Tensor x = random_tensor({2, 3}, "x");
      for (int pass = 0; pass < 2; ++pass) EXPECT_THAT(refusal([&] { layer(x); }), HasSubstr("was given the same rows on every rank"));
      const at::Tensor whole = at::cat({of_first, of_first});  // such a whole may be meant
      layer->weight.set_data(whole.clone());
      EXPECT_LT((layer(x).detach() - at::matmul(x, whole.t())).abs().max().item<double>(), parity);
      unshard(*layer);
      EXPECT_TRUE(at::equal(layer->weight.detach(), whole));
    });
  }
}

/// Parameters are slices again behind it, for whoever steps, saves or loads what is right.
TEST(FullyShardLoop, ARefusalWhereAForwardBeginsEndsIt) {
  DeepNet whole;
  auto reference = momentum(*whole);
  train(whole, reference, whole_batch(samples));
  const Gradients expected = named_values(*whole);
  for (const bool training : {false, true}) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
      auto optimizer = momentum(*net);
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      const at::Tensor bias = net->last->bias, right = bias.detach().clone();  // of the last unit
      const auto expect_slices = [&](const std::string& but) {
        for (const auto& [name, tensor, aliases] : nn::unique_parameters(*net)) {
          if (name != but) EXPECT_EQ(tensor.sizes(), at::IntArrayRef(nn::slice_of(tensor).local_shape())) << name << (training ? ", training" : "");
        }
      };
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        net(mine.x);
      };
      bias.set_data(at::zeros({17}));
      EXPECT_THAT(refusal([&] { training ? backward_of(net, mine) : evaluate(); }), HasSubstr("'last.bias' was given"));
      expect_slices("last.bias");
      bias.set_data(right);
      evaluate();
      expect_slices("");
      train(net, optimizer, mine);
      EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity);
    });
  }
}

/// As many rows as ranks: without gradients, one row beside them is what an optimizer takes beside its slice, too.
struct Prototypes : torch::nn::Module {
  explicit Prototypes(int64_t rows) { weight = register_parameter("weight", at::arange(3 * rows, at::kFloat).view({rows, 3})); }
  at::Tensor forward(const at::Tensor& z) {
    at::Tensor out = at::matmul(z, weight.t());
    const at::NoGradGuard no_grad;
    distance = expands ? weight - z.expand(weight.sizes()) : weight - (beside.defined() ? beside : z);
    return out;
  }
  at::Tensor weight, distance, beside;
  bool expands = false;
};

TEST(FullyShardLoop, WithinAForwardOneRowIsNoSliceOfAsManyRowsAsRanks) {
  for (const int64_t rows : {2, 3}) {  // on three rows one rank sees its slice's shape, and the other does not
    run_ranks(2, [&](World& world) {
      const auto net = std::make_shared<Prototypes>(rows);
      auto sharded = fully_shard(*net, world.group(), {.replicas = ReplicaStart::Broadcast});
      const at::Tensor z = at::ones({1, 3});
      EXPECT_THAT(refusal([&] { (void)net->forward(z); }), AllOf(HasSubstr("'weight' of shape"), HasSubstr("beside a tensor of shape [1, 3]")));
      net->beside = at::ones({(rows + 1 - world.rank()) / 2, 3});  // this rank's slice: where its rows don't fit the whole the others' do
      EXPECT_THAT(refusal([&] { (void)net->forward(z); }), HasSubstr("nobody can tell"));
      net->expands = true;
      net->forward(z).sum().backward();
      EXPECT_TRUE(at::equal(net->distance, at::arange(3 * rows, at::kFloat).view({rows, 3}) - 1));
    });
  }
}

/// A parameter that grows between its naming and its wrapping: a rank's slice may have the shape that the whole had.
TEST(FullyShardLoop, ASliceOfTheShapeThatTheWholeHadIsASlice) {
  run_ranks(2, [](World& world) {
    const auto net = std::make_shared<Prototypes>(2);
    nn::assign_paths(*net);
    net->weight.set_data(at::arange(12, at::kFloat).view({4, 3}));
    auto sharded = fully_shard(*net, world.group());
    EXPECT_EQ(nn::slice_of(net->weight), Slice::along("weight", {4, 3}, 0, 2 * world.rank(), 2));
  });
}

TEST(FullyShardLoop, WhatIsNeitherTheWholeNorTheSliceIsRefusedByName) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      net->first->weight.set_data(at::zeros({17, 3}));
      EXPECT_THAT(refusal([&] { backward_of(net, mine); }), HasSubstr("'first.weight' was given"));
    });
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      net->first->bias.set_data(net->first->bias.detach().to(at::kDouble));
      EXPECT_THAT(refusal([&] { backward_of(net, mine); }), HasSubstr("of type Double"));
    });
    run_ranks(2, [&](World& world) {
      DeepNet net;
      const at::Tensor all = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      EXPECT_THAT(refusal([&] {
                    torch::nn::utils::vector_to_parameters(all, net->parameters());
                    backward_of(net, mine);
                  }),
                  HasSubstr("vector_to_parameters"));
    });
  }
}

TEST(FullyShardLoop, MemoryOfTwoNamesIsRefused) {
  run_ranks(2, [&](World& world) {
    for (const bool buffer : {false, true}) {
      DeepNet net;
      const at::Tensor alias = net->first->weight.detach().t();
      buffer ? net->register_buffer("alias", alias) : net->register_parameter("alias", alias);
      EXPECT_THAT(refusal([&] { (void)fully_shard(net, world.group(), {}); }),
                  AllOf(HasSubstr("'first.weight'"), HasSubstr("'alias'"), HasSubstr(" share memory")));
    }
  });
}

/// A head that is tied by a view which the constructor keeps.
struct KeptViewImpl : torch::nn::Module {
  KeptViewImpl() : embedding(7, 5) {
    register_module("embedding", embedding);
    fill_parameters(*this);
    head = embedding->weight.t();
  }
  at::Tensor forward(const at::Tensor& ids) { return at::matmul(embedding->forward(ids), head); }

  torch::nn::Embedding embedding;
  at::Tensor head;
};

TEST(FullyShardLoop, AViewFromBeforeTheWrapperIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      KeptViewImpl model;
      const at::Tensor ids = at::arange(6), before = model.forward(ids);  // whose graph is held
      auto sharded = fully_shard(model, world.group());
      EXPECT_THAT(refusal([&] { (void)model.forward(ids); }),
                  AllOf(HasSubstr("fully_shard: "), HasSubstr("given a view of 'embedding.weight'"), HasSubstr("in forward")));
    });
  }
}

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

/// What autograd::grad returns is whole, and of one rank's samples.
TEST(FullyShardLoop, AGradientThatTheProgramAssignsIsRefusedByName) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const std::vector<at::Tensor> some{net->first->weight, net->last->bias};
      torch::optim::SGD optimizer(some, 0.1);
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      const auto gradients = torch::autograd::grad({loss_of(net(mine.x), mine.y, samples)}, some);
      for (size_t i = 0; i < some.size(); ++i) some[i].mutable_grad() = gradients[i];
      const auto said =
          AllOf(HasSubstr("fully_shard: the gradient of '"), HasSubstr("by the program (before fully_shard, by mutable_grad(), or of torch::autograd::grad)"));
      EXPECT_THAT(refusal([&] { optimizer.step(); }), said);
      EXPECT_THAT(refusal([&] { backward_of(net, mine); }), said);
      DeepNet trained;
      backward_of(trained, mine);
      sharded = fully_shard(trained, world.group(), {.wrap = "block*", .trigger = trigger});
      EXPECT_THAT(refusal([&] { (void)sharded->norm_group(); }), said) << "gradients of an earlier step are whole";
      trained->zero_grad();
      EXPECT_NO_THROW(backward_of(trained, mine));
      EXPECT_NO_THROW((void)sharded->norm_group());
    });
  }
}

/// What is trained is reduced together, and a gradient that waits would stay behind.
TEST(FullyShardLoop, WhatIsFrozenWhileItsGradientWaitsIsRefusedByName) {
  for (const bool cleared : {false, true}) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      {
        const Attachment held = sharded->no_sync();
        backward_of(net, mine);
      }
      if (cleared) net->zero_grad();
      net->first->weight.set_requires_grad(false);
      if (cleared) {
        EXPECT_NO_THROW(backward_of(net, mine));
      } else {
        EXPECT_THAT(refusal([&] { backward_of(net, mine); }), HasSubstr("'first.weight' was frozen while its gradient waits whole on this rank"));
      }
    });
  }
}

TEST(FullyShardLoop, LibtorchsClippingIsRefused) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      auto optimizer = momentum(*net);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        backward_of(net, part_of(whole_batch(samples, step), 2, world.rank()));
        const Gradients before = named_gradients(*net);
        EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1); }), HasSubstr("tessera::clip_grad_norm"));
        EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1, std::numeric_limits<double>::infinity()); }),
                    HasSubstr("tessera::clip_grad_norm"));
        for (const auto& parameter : nn::unique_parameters(*net)) {
          if (before.at(parameter.name).defined()) EXPECT_TRUE(at::equal(parameter.tensor.grad(), before.at(parameter.name))) << parameter.name;
        }
        torch::nn::utils::clip_grad_value_(net->parameters(), 0.05);  // goes by elements
        optimizer.step();
      }
    });
  }
}

/// Ranks whose losses leave out the last unit, which all have called: in a step the collectives are the same, and all ranks refuse.
struct EarlyExitImpl : nn::Module {
  EarlyExitImpl() : first(5, 7), second(7, 7), third(7, 7) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    fill_parameters(*this);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(second(at::tanh(first(x))));
    return {h, third(h)};
  }
  nn::Linear first, second, third;
};
TESSERA_MODULE(EarlyExit);

TEST(FullyShardLoop, CollectivesDoNotFollowWhatArrives) {
  run_ranks(2,
            [&](World& world) {
              EarlyExit net;
              auto sharded = fully_shard(net, world.group(), {.wrap = "*", .prefetch = {.units = 0}});
              const auto [early, late] = net(random_tensor({4, 5}, "x"));
              const at::Tensor loss = world.rank() == 0 ? early.sum() + late.sum() : early.sum();
              const std::string said = refusal([&] { loss.backward(); });
              EXPECT_THAT(said, HasSubstr("on rank 1 of world"));
              EXPECT_THAT(said, HasSubstr("got no gradient in this step"));
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST(FullyShardLoop, LookingAtAGradientLeavesWhatIsHeld) {
  for (const auto trigger : kBoth) {
    for (const bool before : {false, true}) {  // there is a gradient already
      const auto loop = [&](DeepNet& net, const auto& batch, FullyShardedDataParallel* sharded) {
        if (before) backward_of(net, batch(5));
        for (int held = 0; held < 2; ++held) {
          const Attachment hold = sharded ? sharded->no_sync() : Attachment();
          backward_of(net, batch(held));
          const at::Tensor x = batch(3).x.clone().requires_grad_();
          torch::autograd::grad({net(x).sum()}, {x});
        }
        const at::Tensor x = batch(3).x.clone().requires_grad_();
        torch::autograd::grad({net(x).sum()}, {x});
        backward_of(net, batch(2));
      };
      DeepNet whole;
      loop(whole, [](int step) { return whole_batch(samples, step); }, nullptr);
      const Gradients expected = named_gradients(*whole);
      run_ranks(2, [&](World& world) {
        DeepNet net;
        auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false, .trigger = trigger});
        loop(net, [&](int step) { return part_of(whole_batch(samples, step), 2, world.rank()); }, sharded.get());
        EXPECT_LT(slice_difference(*net, expected), 20 * parity);
      });
    }
  }
}

TEST(FullyShardLoop, WhatIsHeldIsNotStepped) {
  for (const auto trigger : kBoth) {
    DeepNet whole;
    auto optimizer = momentum(*whole);
    optimizer.zero_grad();
    backward_of(whole, whole_batch(samples, 0));
    backward_of(whole, whole_batch(samples, 1));
    optimizer.step();
    const Gradients expected = named_values(*whole);
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false, .trigger = trigger});
      auto own = momentum(*net);
      own.zero_grad();
      {
        const Attachment hold = sharded->no_sync();
        backward_of(net, part_of(whole_batch(samples, 0), 2, world.rank()));
      }
      EXPECT_THAT(refusal([&] { own.step(); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] { sharded->norm_group(); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] {
                    const at::NoGradGuard no_grad;
                    net->first->weight.grad().div_(2);
                  }),
                  HasSubstr("no_sync()"));
      backward_of(net, part_of(whole_batch(samples, 1), 2, world.rank()));
      own.step();
      EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity);
    });
  }
}

TEST(FullyShardLoop, AWrapperOfOneRankOwnsItsParameters) {
  run_ranks(1, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    const auto* const dispatcher = nn::GradientDispatcher::find(net->first->weight);
    ASSERT_NE(dispatcher, nullptr);
    EXPECT_EQ(dispatcher->owner(), sharded.get());
    sharded.reset();
    EXPECT_EQ(dispatcher->owner(), nullptr);
  });
}

/// Each gathers where a pass first needs it: gathers of two wrappers would meet, whatever their sizes.
TEST(FullyShardLoop, TwoWrappersThatRanksComeToInDifferentOrdersAreRefusedOnAllRanks) {
  for (const int ranks : {2, 3}) {
    for (const bool other_order : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        DeepNet student, teacher;
        auto one = fully_shard(student, world.group(), {.wrap = "block*", .find_unused_parameters = true});
        auto other = fully_shard(teacher, world.group(), {.wrap = "block*", .find_unused_parameters = true});
        const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
        const auto run = [&] {
          const bool turned = other_order && world.rank() == ranks - 1;
          const at::Tensor y = turned ? teacher(mine.x) : student(mine.x), z = turned ? student(mine.x) : teacher(mine.x);
          (y * z).sum().backward();
        };
        if (!other_order) return run();
        EXPECT_THAT(run, ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("comes first to the wrapper of"), HasSubstr("in one order on all ranks"))));
      });
    }
  }
}

/// A failed pass leaves no marks: what nobody uses afterwards has no gradient.
TEST(FullyShardLoop, AFailedPassUsedNothing) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .find_unused_parameters = true});
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    const at::Tensor x = mine.x.clone().requires_grad_();
    x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
    EXPECT_THROW(loss_of(net(x), mine.y, samples).backward(), std::runtime_error);
    net->skipped = &net->blocks[1];
    net->zero_grad();
    backward_of(net, mine);
    EXPECT_FALSE(net->blocks[1]->w1->weight.grad().defined());
    EXPECT_TRUE(net->blocks[0]->w1->weight.grad().defined());
  });
}

/// What the program had before the pass is there again as soon as the exception is caught.
TEST(FullyShardLoop, AFailedSecondPassLeavesTheFirstsGradients) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      backward_of(net, mine);
      const Gradients before = named_gradients(*net);
      const at::Tensor x = mine.x.clone().requires_grad_();
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
      EXPECT_THROW(loss_of(net(x), mine.y, samples).backward(), std::runtime_error);
      for (const auto& [name, gradient] : named_gradients(*net)) {
        ASSERT_EQ(gradient.defined(), before.at(name).defined()) << name;
        EXPECT_TRUE(!gradient.defined() || at::equal(gradient, before.at(name))) << name;
      }
    });
  }
}

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

/// Layers, rows that are looked up, and parameters that one rank holds whole: `positions` and `scale`, behind the first layer or before it.
struct Patches : torch::nn::Module {
  explicit Patches(bool first) {
    const auto add = [this] {
      positions = register_parameter("positions", at::empty({1, 5, 4}));
      scale = register_parameter("scale", at::empty({1, 4}));
    };
    if (first) add();
    register_module("patch", patch);
    if (!first) add();
    register_module("inner", inner);
    bias = register_parameter("bias", at::empty({8}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::gelu(inner(patch(x) + positions)).mean(1) * scale;
    return h + bias.index_select(0, at::arange(x.size(0))).unsqueeze(1);
  }
  torch::nn::Linear patch{3, 4}, inner{4, 4};
  at::Tensor positions, scale, bias;
};

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

/// A gate for each channel, of a unit of its own: what libtorch makes like a parameter before it looks at the parameter.
struct Gate : torch::nn::Module {
  using Use = std::function<at::Tensor(const at::Tensor& h, const at::Tensor& x, const at::Tensor& g)>;
  Gate(int64_t size, Use use) : in(size, size), use(std::move(use)) {
    register_module("in", in);
    g = register_parameter("g", at::empty({size}));
    fill_parameters(*this);
    const at::NoGradGuard no_grad;
    g.abs_().add_(0.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor before = begin ? begin(x, x, g) : x;
    return use(at::tanh(in(before)), x, g);
  }

  torch::nn::Linear in;
  at::Tensor g;
  Use begin = {};  ///< before the first layer
  Use use;
};

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

/// libtorch's sentence would be about two sizes, and of one rank alone.
TEST(FullyShardLoop, WhatWasMadeByASlicesSizesIsRefusedByName) {
  const std::vector<Gate::Use> begins{[](auto&, auto& x, auto& g) { return x * at::zeros_like(g).sub_(g); },
                                      [](auto&, auto& x, auto& g) { return x * at::zeros_like(g).add_(g); }};
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      for (const Gate::Use& begin : begins) {
        Gate net(2, begin);
        auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
        const at::Tensor x = random_tensor({3, 2}, "x");
        EXPECT_THAT(refusal([&] { (void)begin(x, x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
      }
      for (const Gate::Use& use : std::vector<Gate::Use>{[](auto& h, auto& x, auto& g) { return h + x * (at::ones(g.sizes()) - g); },
                                                         [](auto&, auto& x, auto& g) { return x * (at::ones(g.sizes()) * g); }}) {
        Gate net(6, use);
        auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
        net.eval();
        const at::NoGradGuard no_grad;
        const at::Tensor x = random_tensor({3, 6}, "x");
        EXPECT_THAT(refusal([&] { (void)use(at::tanh(net.in(x)), x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
      }
      Gate net(6, [](auto&, auto& x, auto& g) { return x * (at::ones_like(g) - g); });
      auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
      net.eval();
      const at::NoGradGuard no_grad;
      const at::Tensor x = random_tensor({3, 6}, "x");  // and before any layer
      EXPECT_THAT(refusal([&] { (void)net.use(x, x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
    });
  }
}

/// Two encoders of one shape, one of which follows the other, and a layer more on one side.
struct Following : torch::nn::Module {
  explicit Following(bool more) {
    register_module("online", online);
    if (more) register_module("predictor", predictor);
    register_module("target", target);
    fill_parameters(*this);
    for (const at::Tensor& parameter : target->parameters()) at::Tensor(parameter).requires_grad_(false);
  }
  void follow(bool handles) {
    const at::NoGradGuard no_grad;
    const auto from = online->parameters(), to = target->parameters();
    for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).mul_(0.5).add_(handles ? from[i].detach() : from[i], 0.5);
  }
  torch::nn::Linear online{5, 7}, target{5, 7}, predictor{7, 4};
};

TEST(FullyShardLoop, WhatFollowsAnotherParameterHasItsRowsOrIsRefused) {
  for (const int ranks : {2, 3}) {
    for (const bool more : {false, true}) {
      for (const std::string wrap : {"", "*"}) {
        Following whole(more);
        whole.follow(false);
        const Gradients expected = named_values(whole);
        run_ranks(ranks, [&](World& world) {
          for (const bool handles : {false, true}) {
            Following net(more);
            auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
            if (more && wrap.empty()) {
              // By data(), with gradients on, it looks like a forward; on a rank whose rows are as many it is not seen.
              const bool alike = net.target->weight.sizes() == net.online->weight.sizes();
              const auto by_data = refusal([&] { net.target->weight.data().mul_(0.5).add_(net.online->weight.data(), 0.5); });
              if (!alike) EXPECT_THAT(by_data, HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own"));
              EXPECT_THAT(refusal([&] { net.follow(false); }), AllOf(HasSubstr("'target.weight'"), HasSubstr("'online.weight'")));
            } else {
              net.follow(handles);
              EXPECT_LT(slice_difference(net, expected, /*values=*/true), parity);
            }
          }
        });
      }
    }
  }
}

/// A wrapper for each, cut alike. By lists (foreach) as by single tensors: what stands side by side in two lists belongs together, and nothing else does.
TEST(FullyShardLoop, AnAverageFollowsByListsAsByTensors) {
  using List = std::vector<at::Tensor>;
  const std::vector<std::function<void(const List& to, const List& from)>> follows{[](const List& to, const List& from) {
                                                                                     at::_foreach_mul_(to, 0.5);
                                                                                     at::_foreach_add_(to, from, 0.25);
                                                                                   },
                                                                                   [](const List& to, const List& from) { at::_foreach_lerp_(to, from, 0.5); },
                                                                                   [](const List& to, const List& from) { at::_foreach_copy_(to, from); },
                                                                                   [](const List& to, const List& from) {
                                                                                     for (size_t i = 0; i < to.size(); ++i)
                                                                                       at::Tensor(to[i]).lerp_(from[i], 0.5);
                                                                                   }};
  struct Pair {
    explicit Pair(int64_t seed) : net(true) { fill_parameters(net, seed); }
    Patches net;
    at::Tensor scale = net.register_parameter("zero_dim", at::full({}, 0.5));
  };
  for (const auto& follow : follows) {
    Pair whole(1), average(2);
    {
      const at::NoGradGuard no_grad;
      follow(average.net.parameters(), whole.net.parameters());
    }
    const Gradients expected = named_values(average.net);
    for (const int ranks : {1, 2, 3}) {
      for (const std::string wrap : {"", "*"}) {
        for (const bool training : {true, false}) {
          run_ranks(ranks,
                    [&](World& world) {
                      Pair from(1), to(2);
                      const auto sharded = fully_shard(from.net, world.group(), {.wrap = wrap}), followed = fully_shard(to.net, world.group(), {.wrap = wrap});
                      from.net.train(training);
                      const at::NoGradGuard no_grad;
                      follow(to.net.parameters(), from.net.parameters());
                      EXPECT_LT(slice_difference(to.net, expected, /*values=*/true), parity);
                    },
                    {.timeout = std::chrono::seconds(20)});
        }
      }
    }
  }
}

/// One rank has all rows of each of them, and takes a list of whole tensors for slices.
TEST(FullyShardLoop, AListOfWholesBesideParametersOfOneRankIsRefusedOnTheOthers) {
  run_ranks(2,
            [](World& world) {
              Patches net(true);
              const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
              const at::NoGradGuard no_grad;
              const std::vector<at::Tensor> average{at::zeros({1, 5, 4})}, followed{net.positions};
              EXPECT_THAT(refusal([&] { (void)(net.patch->weight * 0.5); }), HasSubstr("average.mul_(decay).add_(parameter, 1 - decay)"));
              EXPECT_THAT(refusal([&] { torch::nn::utils::parameters_to_vector(net.parameters()); }), HasSubstr("fully_shard: aten::view was given"));
              const bool here = nn::slice_of(net.positions).numel() > 0;
              if (here) return at::_foreach_add_(average, followed);
              EXPECT_THAT(refusal([&] { at::_foreach_add_(average, followed); }), HasSubstr("'positions'"));
            },
            {.timeout = std::chrono::seconds(20)});
}

/// Handles that were made while a line for the log had parameters whole: the list that ends that forward gets slices in their place.
TEST(FullyShardLoop, AListOfHandlesThatWereWholeEndsAForwardWithSlices) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks,
              [](World& world) {
                ScaledLayer net;
                const auto sharded = fully_shard(net, world.group(), {.average = true});
                std::vector<at::Tensor> averages, expected, handles;
                for (const at::Tensor& parameter : net.parameters()) {
                  expected.push_back(parameter.detach() * 0.5);
                  averages.push_back(at::zeros_like(parameter.detach()));
                }
                net.forward(random_tensor({4, 5}, "x")).square().sum().backward();
                (void)net.scale.exp().item<double>();
                const at::NoGradGuard no_grad;
                for (const at::Tensor& parameter : net.parameters()) handles.push_back(parameter.data());
                EXPECT_EQ(handles[1].sizes(), at::IntArrayRef({3, 5})) << "whole";
                at::_foreach_add_(averages, handles, 0.5);
                EXPECT_TRUE(same_bits(averages, expected));
              },
              {.timeout = std::chrono::seconds(20)});
  }
}

/// Each wrapped by itself, but the one as a part of more: the rows of like parameters differ.
TEST(FullyShardLoop, WhatFollowsAModuleThatIsCutOtherwiseIsToldHowToCutIt) {
  run_ranks(2, [&](World& world) {
    struct Both : torch::nn::Module {
      Both() {
        register_module("before", before);
        register_module("online", online);
      }
      torch::nn::Linear before{5, 7}, online{5, 4};
    } both;
    torch::nn::Linear target(5, 4);
    fill_parameters(both);
    fill_parameters(*target);
    const auto sharded = fully_shard(both, world.group()), followed = fully_shard(target, world.group());
    ASSERT_NE(both.online->weight.sizes(), target->weight.sizes());
    const at::NoGradGuard no_grad;
    EXPECT_THAT(refusal([&] { target->weight.mul_(0.5).add_(both.online->weight, 0.5); }),
                AllOf(HasSubstr("aten::add_ writes 'weight'"), HasSubstr("from 'online.weight'"),
                      HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own")));
    EXPECT_THAT(
        refusal([&] { target->weight.copy_(at::ones({4, 5})); }),
        AllOf(HasSubstr("aten::copy_ writes 'weight' of shape [4, 5]"), HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own")));
  });
}

/// What was frozen when it was wrapped lies apart from the rest, so the cuts differ, and on some ranks slices have one shape by chance: all ranks refuse, and
/// none begins a gather that the others do not.
TEST(FullyShardLoop, WhatFollowsAModuleThatWasFrozenOtherwiseIsRefusedOnEveryRank) {
  struct Two : torch::nn::Module {
    Two() {
      a = register_parameter("a", at::empty({3, 3}));
      b = register_parameter("b", at::empty({3, 3}));
      fill_parameters(*this);
    }
    at::Tensor a, b;
  };
  for (const int ranks : {2, 3}) {
    for (const bool frozen : {false, true}) {
      for (const bool lists : {false, true}) {
        run_ranks(ranks,
                  [&](World& world) {
                    Two model, copy;
                    (frozen ? model : copy).a.requires_grad_(false);
                    const auto sharded = fully_shard(model, world.group()), followed = fully_shard(copy, world.group());
                    const at::NoGradGuard no_grad;
                    const auto from = model.parameters(), to = copy.parameters();
                    const auto follow = [&] {
                      if (lists) return at::_foreach_add_(to, from);
                      for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).mul_(0).add_(from[i], 1);
                    };
                    EXPECT_THAT(refusal(follow), AllOf(AnyOf(HasSubstr("writes 'a' of one wrapper from 'a' of another"),
                                                             HasSubstr("writes 'b' of one wrapper from 'b' of another")),
                                                       HasSubstr("the same parameters frozen")));
                  },
                  {.timeout = std::chrono::seconds(20)});
      }
    }
  }
}

/// State that is made with the optimizer, or by a step, of what was whole then.
TEST(FullyShardLoop, AnOptimizerFromBeforeTheWrapperIsRefusedByItsState) {
  using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
  using Parameters = std::vector<at::Tensor>;
  const std::vector<std::function<Optimizer(Parameters)>> makes{
      [](Parameters p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).weight_decay(0.1)); },
      [](Parameters p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); },
      [](Parameters p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.01).momentum(0.9)); },
      [](Parameters p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01)); },
      [](Parameters p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.01)); }};
  for (const auto& make : makes) {
    for (const auto trigger : kBoth) {
      for (const int ranks : {2, 7}) {  // of seven each has one row, which fits any state
        run_ranks(ranks, [&](World& world) {
          nn::Linear net(nn::LinearOptions(5, 7).bias(false));
          fill_parameters(*net);
          const auto early = make(net->parameters());
          const auto pass = [&] {
            early->zero_grad();
            net(whole_batch(samples).x).square().sum().backward();
          };
          pass();
          early->step();
          const auto sharded = fully_shard(net, world.group(), {.trigger = trigger});
          pass();
          EXPECT_THAT(refusal([&] { early->step(); }), AllOf(HasSubstr("slice"), HasSubstr("'weight'"),
                                                             HasSubstr("was made, or has stepped, before fully_shard"), HasSubstr("checkpoint::load")));
          const auto late = make(net->parameters());
          late->step();
        });
      }
    }
  }
}

/// Where rank 0 has all rows, its state has the sizes of a whole one, too.
TEST(FullyShardLoop, AnOptimizersFileOfAnotherRankIsRefusedAsThat) {
  for (const auto trigger : kBoth) {
    for (const double decay : {0.0, 0.1}) {
      for (const int64_t rows : {7, 1}) {
        std::string file;
        run_ranks(2, [&](World& world) {
          nn::Linear net(nn::LinearOptions(5, rows).bias(false));
          fill_parameters(*net);
          const auto sharded = fully_shard(net, world.group(), {.trigger = trigger});
          torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01).weight_decay(decay));
          const auto pass = [&] {
            optimizer.zero_grad();
            net(whole_batch(samples).x).square().sum().backward();
          };
          pass();
          optimizer.step();
          if (world.rank() == 0) {
            std::stringstream out;
            torch::save(optimizer, out);
            file = out.str();
          }
          pass();  // behind the file, for each rank waits for the other
          std::stringstream in(file);
          torch::load(optimizer, in);
          if (world.rank() == 0) {
            optimizer.step();
            return;
          }
          EXPECT_THAT(refusal([&] { optimizer.step(); }),
                      AllOf(HasSubstr("'weight'"), HasSubstr("the state of another rank's part"), HasSubstr("checkpoint::load")));
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera
