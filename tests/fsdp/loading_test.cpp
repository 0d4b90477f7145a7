#include <sstream>

#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/serialize.h>

#include "support.h"
#include "tessera/comm/collectives.h"

/// Weights that come from elsewhere, wholes or slices, and what is neither: taken in, or refused by name.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
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

/// As many rows as ranks: without gradients, one row beside them is what an optimizer takes beside its slice, too, where there is a gradient.
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
      net->forward(z).sum().backward();
      EXPECT_TRUE(at::equal(net->distance, at::arange(3 * rows, at::kFloat).view({rows, 3}) - 1)) << "no gradient, no optimizer";
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

}  // namespace
}  // namespace tessera
