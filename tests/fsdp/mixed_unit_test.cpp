#include <functional>

#include <gtest/gtest.h>

#include "support.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/head.h"
#include "tessera/nn/norm.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// Parameters of two dtypes, a frozen one and one without elements in one unit.
struct MixedImpl : nn::Module {
  MixedImpl() {
    narrow = register_parameter("narrow", at::empty({5, 7}));
    wide = register_parameter("wide", at::empty({7, 3}, at::kDouble));
    gain = register_parameter("gain", at::empty({7}, at::kDouble));
    still = register_parameter("still", at::empty({3}, at::kDouble), /*requires_grad=*/false);
    none = register_parameter("none", at::empty({0, 4}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(at::tanh(at::matmul(x, narrow)).to(at::kDouble) * gain, wide) + still + none.sum(); }
  at::Tensor narrow, wide, gain, still, none;
};
TESSERA_MODULE(Mixed);

TEST(FullyShard, SeveralDtypesInOneUnit) {
  Mixed whole;
  backward_of(whole, whole_batch(samples));
  const Gradients expected = named_gradients(*whole);
  for (const int ranks : {2, 3, 8}) {
    run_ranks(ranks, [&](World& world) {
      Mixed net;
      auto sharded = fully_shard(net, world.group());
      ASSERT_EQ(sharded->units().size(), 1u);
      for (int step = 0; step < 2; ++step) {
        sharded->begin_step();
        backward_of(net, part_of(whole_batch(samples), ranks, world.rank()));
        sharded->finish();
        EXPECT_LT(slice_difference(*net, expected), parity);
      }
      EXPECT_EQ(net->wide.grad().scalar_type(), at::kDouble);
    });
  }
}

/// A plain module whose first operators are those of a layer of ours.
template <class Layer>
struct Leading : torch::nn::Module {
  explicit Leading(Layer first) : layer(std::move(first)) {
    register_module("layer", layer);
    scale = register_parameter("scale", at::ones({3}));
    fill_parameters(*this);
  }
  template <class... Inputs>
  at::Tensor forward(const Inputs&... inputs) {
    given = layer(inputs...);
    return given * scale;
  }
  Layer layer;
  at::Tensor scale, given;
};

/// What a layer computes in follows from what is gathered, also where its first operator is what gathers.
template <class Layer, class... Inputs>
void expect_gathered_type(World& world, const std::function<Layer()>& make, const Inputs&... inputs) {
  Leading<Layer> whole(make()), net(make());
  whole.to(at::kBFloat16);
  const at::Tensor expected = whole.forward(inputs...);
  const auto sharded = fully_shard(net, world.group(), {.param_dtype = at::kBFloat16, .trigger = ShardTrigger::Operators});
  for (int step = 0; step < 2; ++step) {
    net.zero_grad();
    const at::Tensor y = net.forward(inputs...);
    EXPECT_EQ(net.given.scalar_type(), whole.given.scalar_type()) << net.layer->name();
    EXPECT_TRUE(at::equal(y.cpu(), expected.cpu())) << net.layer->name();
    y.sum().backward();
    const at::NoGradGuard no_grad;
    net.eval();
    EXPECT_TRUE(at::equal(net.forward(inputs...).cpu(), expected.cpu())) << net.layer->name() << " evaluated";
    net.train();
  }
}

TEST(FullyShard, OurLayersComputeInTheTypeThatIsGathered) {
  run_ranks(2, [&](World& world) {
    const at::Tensor x = random_tensor({4, 5}, "x"), ids = at::tensor({1, 6, 2, 2}, at::dtype(at::kLong).device(x.device()));
    const at::Tensor counts = at::tensor({3, 1}, at::dtype(at::kLong).device(x.device()));
    expect_gathered_type<nn::Embedding>(world, [] { return nn::Embedding(7, 3); }, ids);
    expect_gathered_type<nn::Linear>(world, [] { return nn::Linear(5, 3); }, x);
    expect_gathered_type<nn::LanguageModelHead>(world, [] { return nn::LanguageModelHead(5, 3); }, x);
    expect_gathered_type<nn::LayerNorm>(world, [] { return nn::LayerNorm(nn::LayerNormOptions({3})); }, random_tensor({4, 3}, "x"));
    expect_gathered_type<nn::RMSNorm>(world, [] { return nn::RMSNorm(3); }, random_tensor({4, 3}, "x"));
    expect_gathered_type<nn::GroupedExperts>(world, [] { return nn::GroupedExperts(2, 3, 4, 0.5, 0.5); }, random_tensor({4, 3}, "x"), counts);
  });
}

}  // namespace
}  // namespace tessera
