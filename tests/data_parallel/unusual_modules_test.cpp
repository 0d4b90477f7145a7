#include <functional>

#include <gmock/gmock.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

TEST(Ddp, APlanOfAnotherModelIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    const std::vector<GradientSpec> other{{"weight", 3}};
    EXPECT_THAT(refusal([&] { (void)DistributedDataParallel(net, world.group(), {.plan = make_bucket_layout(other)}); }),
                HasSubstr("'weight' is no trainable parameter"));
  });
}

/// Uses its two halves in an order that is the rank's own, so that their gradients come in another order too.
struct Branches : torch::nn::Module {
  explicit Branches(bool swapped) : swapped(swapped) {
    a = register_parameter("a", at::full({4}, 0.5));
    b = register_parameter("b", at::full({4}, 0.25));
  }
  at::Tensor forward(const at::Tensor& x) { return swapped ? (x * b) * a : (x * a) * b; }
  bool swapped;
  at::Tensor a, b;
};

TEST(Ddp, BucketsLeaveInOneOrderThoughGradientsComeInAnother) {
  run_ranks(2, [&](World& world) {
    Branches net(world.rank() == 1);
    DistributedDataParallel ddp(net, world.group(), {.sizes = {.bucket_bytes = 16, .first_bucket_bytes = 16}});
    const at::Tensor x = at::arange(4, at::kFloat);
    for (int step = 0; step < 3; ++step) {
      ddp.begin_step();
      net.forward(x).sum().backward();
      ddp.finish();
      EXPECT_TRUE(at::equal(net.a.grad(), 2 * 0.25 * x));
      EXPECT_TRUE(at::equal(net.b.grad(), 2 * 0.5 * x));
    }
  });
}

/// `optional` is used where asked; `never` nowhere; `frozen` wants no gradient; `tied` is registered twice and used twice.
struct Odd : torch::nn::Module {
  Odd() {
    used = register_parameter("used", at::ones({3}));
    optional = register_parameter("optional", at::ones({3}));
    never = register_parameter("never", at::ones({2}));
    frozen = register_parameter("frozen", at::ones({2}), /*requires_grad=*/false);
    empty = register_parameter("empty", at::empty({0, 3}));
    tied = register_parameter("tied", at::full({3}, 2.0));
    register_parameter("tied_again", tied);
  }
  at::Tensor forward(bool with_optional) {
    at::Tensor y = used * tied * tied;
    if (with_optional) y = y + optional;
    return y.sum() + empty.sum();
  }
  at::Tensor used, optional, never, frozen, empty, tied;
};

TEST(Ddp, UnusedParametersAreRefusedByNameAndRankAndNobodyHangs) {
  std::vector<std::string> texts(3);
  run_ranks(3,
            [&](World& world) {
              Odd odd;
              odd.never.requires_grad_(false);
              DistributedDataParallel ddp(odd, world.group(), {.sizes = {.bucket_bytes = 12, .first_bucket_bytes = 12}});
              ddp.begin_step();
              odd.forward(world.rank() != 1).backward();
              if (world.rank() == 1) {
                texts[1] = refusal([&] { ddp.finish(); });
              } else {
                ddp.finish();
              }
              comm::barrier(world.group());
            },
            {.timeout = std::chrono::seconds(10)});
  EXPECT_THAT(texts[1], HasSubstr("on rank 1 of world, 1 of 4 parameters got no gradient in this step: 'optional'; "));
  EXPECT_THAT(texts[1], HasSubstr("find_unused_parameters"));
  EXPECT_THAT(texts[1], HasSubstr("A tie by assignment (decoder->weight = word->weight) leaves the registered 'decoder.weight' behind"));
}

TEST(Ddp, FindUnusedGivesZerosFromRanksWithoutAGradient) {
  run_ranks(3, [&](World& world) {
    Odd odd;
    DistributedDataParallel ddp(odd, world.group(), {.sizes = {.bucket_bytes = 12, .first_bucket_bytes = 12}, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp.begin_step();
      odd.forward(world.rank() == 1).backward();
      ddp.finish();
      EXPECT_TRUE(at::equal(odd.used.grad(), at::full({3}, 12.0)));
      EXPECT_TRUE(at::equal(odd.optional.grad(), at::ones({3})));
      EXPECT_TRUE(at::equal(odd.tied.grad(), at::full({3}, 12.0)));
      EXPECT_TRUE(odd.empty.grad().defined());
      EXPECT_FALSE(odd.never.grad().defined());  // as on one process: no optimizer touches it
      EXPECT_FALSE(odd.frozen.grad().defined());
    }
  });
}

/// A graph's adjacency, as convolutions over graphs keep it. On the CPU, which knows its layout.
struct WithGraph : torch::nn::Module {
  WithGraph() {
    net = register_module("net", std::make_shared<Net>());
    graph = register_module("graph", std::make_shared<torch::nn::Module>("graph"));
    graph->register_buffer("adjacency", at::eye(4, at::TensorOptions(at::kCPU)).to_sparse());
  }
  std::shared_ptr<Net> net;
  std::shared_ptr<torch::nn::Module> graph;
};

TEST(Ddp, ASparseBufferIsRefusedByNameWhereItWouldBeBroadcast) {
  Net reference;
  backward(reference, whole_batch(samples));
  run_ranks(2, [&](World& world) {
    WithGraph model;
    EXPECT_THAT(refusal([&] { (void)DistributedDataParallel(model, world.group()); }),
                AllOf(HasSubstr("buffer 'graph.adjacency' is of layout Sparse"), HasSubstr("buffers = BufferBroadcast::Never")));
    DistributedDataParallel ddp(model, world.group(), {.buffers = BufferBroadcast::Never});
    backward(*model.net, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_LT(largest_difference(gradients_of(*model.net), gradients_of(reference)), parity);
  });
}

TEST(Ddp, ALoopOfLibtorchsIsToldOnceOfTensorsThatItsOptimizersUpdateTwice) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](World& world) {
    Odd odd;
    DistributedDataParallel ddp(odd, world.group(), {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) odd.forward(true).backward();
    Net net;  // has none
    DistributedDataParallel other(net, world.group());
    backward(net, whole_batch(samples));
  });
  const std::string said = ::testing::internal::GetCapturedStderr(), tied = "data parallelism: registered under two names or more: 'tied' ('tied_again'). ";
  EXPECT_THAT(said, AllOf(HasSubstr(tied), HasSubstr("tessera::nn::unique_parameters(model)")));
  EXPECT_EQ(said.find("registered under"), said.rfind("registered under"));
}

TEST(Ddp, AParameterUsedInAnEarlierMicroBatchOnlyIsReduced) {
  run_ranks(2, [&](World& world) {
    Odd odd;
    odd.never.requires_grad_(false);
    DistributedDataParallel ddp(odd, world.group(), {});
    ddp.begin_step();
    Attachment local = ddp.no_sync();
    odd.forward(true).backward();
    local.detach();
    odd.forward(false).backward();
    ddp.finish();
    EXPECT_TRUE(at::equal(odd.optional.grad(), at::full({3}, 2.0)));
    EXPECT_TRUE(at::equal(odd.used.grad(), at::full({3}, 16.0)));
  });
}

TEST(Ddp, ReplicasThatDifferAreRefusedByParameterAndRank) {
  run_ranks(3, [&](World& world) {
    Net net;
    if (world.rank() == 2) net.middle->weight.data()[0][0] += 1e-6;
    EXPECT_THAT(refusal([&] { DistributedDataParallel ddp(net, world.group()); }),
                HasSubstr("parameter 'middle.weight' of rank 0 of world is another one on rank 2;"));
    DistributedDataParallel ddp(net, world.group(), {.replicas = ReplicaStart::Broadcast});
    Net reference;
    EXPECT_TRUE(same_bits(net.parameters(), reference.parameters()));
  });
}

TEST(Ddp, ModelsOfOtherStructureAreRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    if (world.rank() == 1) net.register_parameter("extra", at::ones({1}));
    EXPECT_THAT(refusal([&] { DistributedDataParallel ddp(net, world.group()); }),
                HasSubstr("module of rank 0 of world (7 parameters) differs in names, shapes, dtypes or requires_grad on rank 1;"));
  });
}

TEST(Ddp, AModuleWithoutTrainableParametersIsRefused) {
  torch::nn::Module module("Nothing");
  EXPECT_THAT(refusal([&] { DistributedDataParallel ddp(module, comm::Group::self()); }),
              HasSubstr("module 'Nothing' has no parameter that requires a gradient"));
}

TEST(Ddp, WhatIsRegisteredAfterWrappingIsRefusedByName) {
  const auto add = [](Net& net) { return net.register_parameter("gain", at::ones({3})); };
  const auto train = [](const at::Tensor& gain, Net& net) { (net.forward(whole_batch(samples).x) * gain).sum().backward(); };
  const auto refused = HasSubstr("data parallelism: 'gain' of module ");
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const at::Tensor late = add(net);
    EXPECT_THAT(refusal([&] { train(late, net); }), refused);
    late.set_requires_grad(false);
    train(late, net);
    late.set_requires_grad(true);
    ddp.begin_step();
    train(late, net);
    EXPECT_THAT(refusal([&] { ddp.finish(); }), refused);

    torch::nn::Module layer;  // whoever wraps it by itself takes care of it
    layer.register_parameter("gain", late);
    const DistributedDataParallel beside(layer, world.group());
    net.zero_grad();
    train(late, net);
  });
  run_ranks(2, [&](World& world) {  // in the place of another
    Net net;
    const DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = true});
    net.middle = net.replace_module("middle", torch::nn::Linear(net.middle->options));
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("'middle.weight', 'middle.bias' of module "));
  });
  run_ranks(2, [&](World& world) {  // what a wrapper was told to leave out
    Net net;
    const DistributedDataParallel ddp(net, world.group(), {.only = [](const nn::NamedParameter& parameter) { return parameter.name != "gain"; }});
    train(add(net), net);
  });
}

TEST(Ddp, BuffersFollowRankZero) {
  for (const BufferBroadcast when : {BufferBroadcast::Never, BufferBroadcast::AtStart, BufferBroadcast::EachStep}) {
    run_ranks(3, [&](World& world) {
      Net net;
      const at::Tensor real = net.register_buffer("real", at::full({2}, world.rank() + 1.0));
      const at::Tensor count = net.register_buffer("count", at::full({}, 10 + world.rank(), at::kLong));
      DistributedDataParallel ddp(net, world.group(), {.buffers = when});
      EXPECT_EQ(real[1].item<double>(), when == BufferBroadcast::Never ? world.rank() + 1.0 : 1.0);
      run_step(net, ddp, whole_batch(samples));
      {
        const at::NoGradGuard no_grad;
        real.fill_(world.rank() + 5.0), count.fill_(world.rank());
      }
      run_step(net, ddp, whole_batch(samples));
      EXPECT_EQ(real[0].item<double>(), when == BufferBroadcast::EachStep ? 5.0 : world.rank() + 5.0);
      EXPECT_EQ(count.item<int64_t>(), when == BufferBroadcast::EachStep ? 0 : world.rank());
    });
  }
}

struct Mixed : torch::nn::Module {
  Mixed() {
    full = register_parameter("full", at::ones({4}));
    half = register_parameter("half", at::ones({4}, at::kBFloat16));
  }
  at::Tensor forward(const at::Tensor& x) { return (full * x).sum() + (half * x.to(at::kBFloat16)).sum().to(at::kFloat); }
  at::Tensor full, half;
};

TEST(Ddp, ABufferThatIsExpandedFollowsRankZeroToo) {
  run_ranks(3, [&](World& world) {
    Net net;
    const at::Tensor mask = net.register_buffer("mask", at::full({2, 1}, world.rank()).expand({2, 5}));
    DistributedDataParallel ddp(net, world.group());
    EXPECT_TRUE(at::equal(mask, at::zeros({2, 5}, mask.options())));
    EXPECT_EQ(mask.strides(), at::IntArrayRef({1, 0}));
  });
}

TEST(Ddp, SeveralDtypes) {
  run_ranks(3, [&](World& world) {
    Mixed mixed;
    const at::Tensor x = at::full({4}, world.rank() + 1.0);
    DistributedDataParallel ddp(mixed, world.group());
    for (int step = 0; step < 2; ++step) {
      ddp.begin_step();
      mixed.forward(x).backward();
      ddp.finish();
      EXPECT_TRUE(at::equal(mixed.full.grad(), at::full({4}, 6.0)));
      EXPECT_TRUE(at::equal(mixed.half.grad(), at::full({4}, 6.0, at::kBFloat16)));
    }
    EXPECT_EQ(ddp.plan().buckets.size(), 2u);
  });
}

TEST(Ddp, ComplexParametersKeepTheirDtypeWhateverOptionsSay) {
  const std::vector<std::function<DdpOptions()>> options{
      // a hook serves one rank
      [] { return DdpOptions{.reduce_dtype = at::kFloat}; },
      [] { return DdpOptions{.reduce_dtype = at::kDouble}; },
      [] { return DdpOptions{.hook = std::make_shared<Bf16Hook>()}; },
      [] { return DdpOptions{.hook = std::make_shared<Fp16Hook>()}; },
      [] { return DdpOptions{.hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0, .min_compression = 0})}; },
  };
  for (const auto& make : options) {
    run_ranks(2, [&](World& world) {
      torch::nn::Module module;
      const at::Tensor weight = module.register_parameter("weight", at::ones({4, 4}, at::kComplexFloat));
      DistributedDataParallel ddp(module, world.group(), make());
      at::real(weight * at::complex(at::ones({4, 4}), at::full({4, 4}, world.rank() + 1.0f))).sum().backward();
      EXPECT_TRUE(at::equal(weight.grad(), at::complex(at::full({4, 4}, 2.0f), at::full({4, 4}, -3.0f))));
    });
  }
}

TEST(Ddp, AParameterThatGotAnotherFormIsRefusedByName) {
  const std::vector<std::function<void(Net&)>> changes{
      [](Net& net) { net.middle->weight.set_data(at::ones({40, 7})); },
      [](Net& net) { net.middle->weight.set_data(at::ones({49})); },  // as many elements
      [](Net& net) { net.middle->weight.set_data(at::ones({7, 7}, at::kDouble)); },
  };
  for (const auto& change : changes) {
    run_ranks(2, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .replicas = ReplicaStart::Trust});
      backward(net, whole_batch(samples));
      const at::Tensor before = net.middle->weight.data();
      change(net);
      const auto refused = HasSubstr("data parallelism: 'middle.weight' was given values of shape ");
      EXPECT_THAT(refusal([&] { (net.last->weight.sum() + net.middle->weight.sum()).backward(); }), refused);
      EXPECT_THAT(refusal([&] { ddp.begin_step(); }), refused);
      net.middle->weight.set_data(before);
      net.zero_grad();
      {
        const Attachment local = ddp.no_sync();
        backward(net, whole_batch(samples));
      }
      change(net);
      EXPECT_THAT(refusal([&] { (net.last->weight.sum() + net.middle->weight.sum()).backward(); }), refused);
    });
  }
}

TEST(Ddp, ReduceDtypeHoldsGradientsOfHalfPrecisionInFull) {
  run_ranks(2, [&](World& world) {
    Mixed mixed;
    DistributedDataParallel ddp(mixed, world.group(), {.reduce_dtype = at::kFloat});
    ddp.begin_step();
    mixed.forward(at::full({4}, world.rank() == 0 ? 256.0 : 1.0)).backward();
    ddp.finish();
    EXPECT_EQ(mixed.half.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(mixed.half.grad(), at::full({4}, 257.0)));  // no bf16
    EXPECT_THAT(refusal([&] { (void)DistributedDataParallel(mixed, world.group(), {.reduce_dtype = at::kBFloat16}); }), HasSubstr("reduce_dtype = BFloat16"));
  });
}

TEST(Ddp, ReduceDtypeHoldsAlsoWhereOneRankIsTheGroup) {
  Mixed mixed;
  const auto backward_of = [&](double x) { mixed.forward(at::full({4}, x)).backward(); };
  run_ranks(1, [&](World& world) {
    DistributedDataParallel ddp(mixed, world.group(), {.reduce_dtype = at::kFloat});
    {
      const Attachment accumulating = ddp.no_sync();
      backward_of(256);
    }
    backward_of(1);
    EXPECT_EQ(mixed.half.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(mixed.half.grad(), at::full({4}, 257.0)));  // no bf16
  });
  mixed.zero_grad();
  backward_of(1);
  EXPECT_EQ(mixed.half.grad().scalar_type(), at::kBFloat16);
}

/// As `ddp = std::make_unique<...>(..)` does it: the new one is there before the old one goes.
TEST(Ddp, ReduceDtypeOutlivesTheWrapperBefore) {
  Mixed mixed;
  const auto backward_of = [&](double x) { mixed.forward(at::full({4}, x)).backward(); };
  run_ranks(1, [&](World& world) {
    auto ddp = std::make_unique<DistributedDataParallel>(mixed, world.group(), DdpOptions{.reduce_dtype = at::kFloat});
    ddp = std::make_unique<DistributedDataParallel>(mixed, world.group(), DdpOptions{.reduce_dtype = at::kFloat});
    {
      const Attachment accumulating = ddp->no_sync();
      backward_of(256);
    }
    backward_of(1);
    EXPECT_TRUE(at::equal(mixed.half.grad().to(at::kFloat), at::full({4}, 257.0)));
  });
  mixed.zero_grad();
  backward_of(1);
  EXPECT_EQ(mixed.half.grad().scalar_type(), at::kBFloat16);
}

/// Whoever of two goes first: it is the wrapper that holds the model which says in what type gradients are added up.
TEST(Ddp, ReduceDtypeIsThatOfTheWrapperThatHolds) {
  Mixed mixed;
  const auto type_of_gradient = [&] {
    mixed.zero_grad();
    mixed.forward(at::ones({4})).backward();
    return mixed.half.grad().scalar_type();
  };
  run_ranks(1, [&](World& world) {
    const auto wrap = [&](std::optional<at::ScalarType> dtype) {
      return std::make_unique<DistributedDataParallel>(mixed, world.group(), DdpOptions{.reduce_dtype = dtype});
    };
    auto older = wrap(at::kFloat);
    {
      const auto newer = wrap(at::kFloat);
      EXPECT_EQ(type_of_gradient(), at::kFloat);
    }
    EXPECT_EQ(type_of_gradient(), at::kFloat) << "the older one holds again";
    {
      const auto newer = wrap(std::nullopt);
      EXPECT_EQ(type_of_gradient(), at::kBFloat16) << "which has no type of its own";
    }
    EXPECT_EQ(type_of_gradient(), at::kFloat);
    older = wrap(std::nullopt);
    EXPECT_EQ(type_of_gradient(), at::kBFloat16) << "which has no type of its own";
  });
  EXPECT_EQ(type_of_gradient(), at::kBFloat16);
}

TEST(Ddp, KeepsTheStridesOfItsParameters) {
  run_ranks(2, [&](World& world) {
    torch::nn::Module module;
    const at::Tensor weight = module.register_parameter("weight", at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel ddp(module, world.group());
    const at::Tensor x = at::arange(24, at::kFloat).view({2, 3, 2, 2});
    ddp.begin_step();
    (weight * x).sum().backward();
    ddp.finish();
    EXPECT_EQ(weight.grad().strides(), weight.strides());
    EXPECT_TRUE(at::equal(weight.grad(), 2 * x));
  });
}

struct OneWeight : torch::nn::Module {
  explicit OneWeight(bool channels_last) {
    const at::Tensor values = at::arange(24, at::kFloat).view({2, 3, 2, 2}) / 24;
    weight = register_parameter("weight", channels_last ? values.contiguous(at::MemoryFormat::ChannelsLast) : values);
  }
  at::Tensor weight;
};

at::Tensor numbers_of(int rank) { return at::arange(24, at::kFloat).view({2, 3, 2, 2}) * (rank + 1); }

/// As where rank 0 alone has loaded a file with strides of its own.
TEST(Ddp, SumsElementsOfParametersThatLieOtherwiseOnEachRank) {
  for (const auto start : {ReplicaStart::Check, ReplicaStart::Broadcast}) {
    run_ranks(2, [&](World& world) {
      const int rank = world.rank();
      OneWeight net(/*channels_last=*/rank == 0);
      DistributedDataParallel ddp(net, world.group(), {.replicas = start});
      for (int step = 0; step < 2; ++step) {
        net.zero_grad();
        (net.weight * numbers_of(rank)).sum().backward();
        EXPECT_TRUE(at::equal(net.weight.grad(), numbers_of(0) + numbers_of(1))) << step;
      }
    });
    run_ranks(2, [&](World& world) {
      const int rank = world.rank();
      OneWeight net(/*channels_last=*/rank == 0);
      TreeReduction tree(net, world.group(), {.num_micro_batches = 2, .replicas = start});
      (net.weight * numbers_of(rank)).sum().backward();
      EXPECT_TRUE(at::equal(net.weight.grad(), numbers_of(0) + numbers_of(1)));
    });
    run_ranks(2, [&](World& world) {  // its matrices go by how gradients lie
      const int rank = world.rank();
      OneWeight net(/*channels_last=*/rank == 0);
      const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start = 0, .min_compression = 0});
      DistributedDataParallel ddp(net, world.group(), {.replicas = start, .hook = hook});
      (net.weight * numbers_of(rank)).sum().backward();
      EXPECT_TRUE(at::allclose(net.weight.grad(), numbers_of(0) + numbers_of(1), 1e-4, 1e-4)) << "rank 2 holds all of two rows";
    });
  }
}

/// Within a run one rank keeps an old gradient, so that its bucket is laid anew there alone.
TEST(Ddp, SumsElementsOfParametersThatWereGivenOtherStrides) {
  run_ranks(2, [&](World& world) {
    const int rank = world.rank();
    OneWeight net(/*channels_last=*/false);
    DistributedDataParallel ddp(net, world.group());
    at::Tensor kept;
    for (int step = 0; step < 3; ++step) {
      if (rank == 1) kept = net.weight.grad();
      net.zero_grad();
      (net.weight * numbers_of(rank)).sum().backward();
      EXPECT_TRUE(at::equal(net.weight.grad(), numbers_of(0) + numbers_of(1))) << step;
      net.weight.set_data(net.weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
  });
}

TEST(Ddp, AGradientThatSomeoneReplacedIsBroughtBack) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const auto expected = one_process(1);
    ddp.begin_step();
    net.zero_grad(/*set_to_none=*/true);
    backward(net, part_of(whole_batch(samples), 2, world.rank()));
    ddp.finish();
    EXPECT_LT(largest_difference(gradients_of(net), expected[0]), parity);
    EXPECT_EQ(ddp.plan().buckets.size(), 1u);
    EXPECT_EQ(net.scale.grad().storage().data(), net.last->weight.grad().storage().data());
  });
}

TEST(Ddp, ExplicitCallsThatAreMissingOrOutOfOrderAreRefusedByName) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group());
      EXPECT_THAT(refusal([&] { ddp.finish(); }), HasSubstr("finish() was called without begin_step()"));
      EXPECT_THAT(refusal([&] { ddp.before_micro_batch({}); }), HasSubstr("before_micro_batch(), or before() of a forward, was called outside a step"));
      EXPECT_THAT(refusal([&] { ddp.after_micro_batch({}); }),
                  HasSubstr("after_micro_batch(), or after() of a backward, was called without before_micro_batch()"));
      run_step(net, ddp, whole_batch(samples));
      EXPECT_THAT(refusal([&] { ddp.finish(); }), HasSubstr("finish() was called without begin_step()"));
      ddp.begin_step();
      EXPECT_THAT(refusal([&] { ddp.begin_step(); }), HasSubstr("begin_step() was called again before finish()"));
      ddp.begin_step();
      ddp.before_micro_batch({.index = 0, .last = false});
      EXPECT_THAT(refusal([&] { ddp.before_micro_batch({}); }),
                  HasSubstr("was called before after_micro_batch(), or after() of a backward, of the one before"));
      EXPECT_THAT(refusal([&] { ddp.finish(); }), HasSubstr("finish() was called before after_micro_batch()"));
      backward(net, whole_batch(samples));
      ddp.after_micro_batch({});
      EXPECT_THAT(refusal([&] { ddp.after_update(); }), HasSubstr("after_update() was called before finish()"));
      ddp.before_micro_batch({.index = 1, .last = true});
      backward(net, whole_batch(samples));
      ddp.after_micro_batch({});
      ddp.finish();
      ddp.after_update();
      ddp.begin_step();
      EXPECT_THAT(refusal([&] { ddp.before(ActionKind::Backward, {}); }), HasSubstr("before() of a backward was called before the forward of its micro-batch"));
      for (int i = 0; i < 2; ++i) {
        ddp.before(ActionKind::Forward, {});
        ddp.after(ActionKind::Forward, {});
      }
      ddp.before(ActionKind::Backward, {.weights_later = true});
      EXPECT_THAT(refusal([&] { ddp.after(ActionKind::Forward, {}); }), HasSubstr("after() was called without before()"));
      ddp.after(ActionKind::Backward, {});
      EXPECT_THAT(refusal([&] { ddp.finish(); }), HasSubstr("before the backward of 1 micro-batches whose forward has run"));
      ddp.before(ActionKind::Backward, {.last = true, .weights_later = true});
      backward(net, whole_batch(samples));
      ddp.after(ActionKind::Backward, {});
      EXPECT_THAT(refusal([&] { ddp.finish(); }), HasSubstr("before the weight gradients of 2 micro-batches"));
      for (const bool last : {false, true}) {
        ddp.before(ActionKind::Weights, {.last = last});
        ddp.after(ActionKind::Weights, {});
      }
      EXPECT_THAT(refusal([&] { ddp.before(ActionKind::Weights, {}); }), HasSubstr("for what no backward has left for later"));
      ddp.finish();
    });
  }
}

TEST(Ddp, ASecondLastPassOfAnExplicitStepIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    ddp.begin_step();
    backward(net, whole_batch(samples));
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("run each backward pass of a step but the last under no_sync()"));
    ddp.finish();
  });
}

TEST(Ddp, AfterItIsGoneTheModuleIsAsBefore) {
  run_ranks(2, [&](World& world) {
    Net net;
    {
      DistributedDataParallel ddp(net, world.group());
      run_step(net, ddp, whole_batch(samples));
    }
    net.zero_grad();
    backward(net, whole_batch(samples));
    EXPECT_TRUE(same_bits(gradients_of(net), one_process(1)[0]));
  });
}

TEST(Ddp, TheEnginesPhaseSaysWhatIsFinal) {
  run_ranks(2, [&](World& world) {
    Net net;
    const auto phase = std::make_shared<nn::StepPhase>();
    DistributedDataParallel ddp(net, world.group(), {.phase = phase});
    for (int step = 0; step < 2; ++step) {
      ++phase->step;
      ddp.begin_step();
      phase->last_micro_batch = false;
      backward(net, whole_batch(samples));
      phase->last_micro_batch = true;
      backward(net, whole_batch(samples));
      ddp.finish();
      EXPECT_EQ(ddp.statistics().num_early, static_cast<int64_t>(ddp.statistics().num_collectives));
    }
  });
}

}  // namespace
}  // namespace tessera
