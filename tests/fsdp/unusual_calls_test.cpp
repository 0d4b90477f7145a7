// What calls do not show, what was called wrongly, and what comes after a wrapper: it works, or it is refused by name.

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/nn/flat_gradients.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

/// Units whose outputs are hard to hook: a view that is written later, tensors in a dictionary, in lists, in a tuple.
struct ViewImpl : nn::Module {
  ViewImpl() : layer(6, 6) { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x).view({-1, 6}); }
  nn::Linear layer;
};
TESSERA_MODULE(View);
struct DictImpl : nn::Module {
  DictImpl() : layer(6, 6) { register_module("layer", layer); }
  c10::Dict<std::string, at::Tensor> forward(const at::Tensor& x) {
    c10::Dict<std::string, at::Tensor> out;
    out.insert("hidden", at::tanh(layer->forward(x)));
    return out;
  }
  nn::Linear layer;
};
TESSERA_MODULE(Dict);
struct ListImpl : nn::Module {
  ListImpl() : layer(6, 6) { register_module("layer", layer); }
  std::vector<std::vector<at::Tensor>> forward(const at::Tensor& x) { return {{at::tanh(layer->forward(x))}}; }
  nn::Linear layer;
};
TESSERA_MODULE(List);
struct OddImpl : nn::Module {
  OddImpl() : first(6, 6), view(), dict(), list(), last(6, 6) {
    register_module("first", first);
    register_module("view", view);
    register_module("dict", dict);
    register_module("list", list);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = view(first(x));
    h.mul_(2);
    h.select(1, 0).tanh_();
    h = dict(h).at("hidden");
    h = list(h).at(0).at(0);
    return last(h);
  }
  nn::Linear first;
  View view;
  Dict dict;
  List list;
  nn::Linear last;
};
TESSERA_MODULE(Odd);

Gradients odd_reference(const at::Tensor& x) {
  Odd whole;
  whole(x).square().sum().backward();
  return named_gradients(*whole);
}

TEST(FullyShard, OutputsThatAreWrittenOrNested) {
  const at::Tensor x = random_tensor({6, 6}, "x");
  const Gradients expected = odd_reference(x);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      for (const std::string wrap : {"*", "**", "view"}) {
        Odd net;
        auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .trigger = ShardTrigger::Automatic});
        const at::Tensor mine = x.narrow(0, 6 / ranks * world.rank(), 6 / ranks);
        for (const bool driven : {false, true}) {
          for (int step = 0; step < 2; ++step) {
            net->zero_grad();
            if (driven && wrap == "*") sharded->begin_step();
            net(mine).square().sum().backward();
            if (driven && wrap == "*") sharded->finish();
            EXPECT_LT(slice_difference(*net, expected), parity) << wrap << (driven ? " driven" : "");
          }
        }
      }
    });
  }
}

/// The root is used by a method of its own: its parameters, and penalties on a layer's weight, are seen by no call.
struct MethodImpl : nn::Module {
  MethodImpl() : layer(4, 4) {
    temperature = register_parameter("temperature", at::empty({}));
    gain = register_parameter("gain", at::empty({4}));
    floor = register_parameter("floor", at::empty({}));
    register_module("layer", layer);
    fill_parameters(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor factor = temperature.exp();  // before any call
    at::Tensor h = layer(x) * factor;
    const at::Tensor penalty = layer->weight.square().sum();
    h = h + layer(x);
    const at::Tensor row = gain.view({1, 4});
    const at::Tensor rest = (h * row).square().mean() + 0.1 * penalty;
    const at::Tensor outer = layer(h).mean();
    return outer * floor + rest;
  }
  nn::Linear layer;
  at::Tensor temperature, gain, floor;
};
TESSERA_MODULE(Method);

TEST(FullyShard, AMethodOfTheRootsOwnUsesItsParameters) {
  const at::Tensor x = random_tensor({6, 4}, "x");
  const auto train = [](Method& net, const at::Tensor& mine) {
    torch::optim::SGD optimizer(net->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net->loss(mine).backward();
      optimizer.step();
    }
  };
  Method whole;
  train(whole, x);
  const Gradients expected = named_values(*whole);
  const double loss = whole->loss(x).item<double>();
  for (const int ranks : {1, 2, 3}) {
    for (const std::string wrap : {"", "layer"}) {
      run_ranks(ranks,
                [&](World& world) {
                  Method net;
                  auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .average = true});
                  train(net, x.narrow(0, 6 / ranks * world.rank(), 6 / ranks));
                  EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity) << ranks << wrap;
                  const at::NoGradGuard no_grad;
                  net->eval();
                  EXPECT_NEAR(net->loss(x).item<double>(), loss, 1e-5);
                },
                {.timeout = std::chrono::seconds(20)});
    }
  }
}

/// A parameter of the root by views, before any layer.
struct ViewedImpl : nn::Module {
  explicit ViewedImpl(std::function<at::Tensor(const at::Tensor&)> of) : of(std::move(of)), layer(5, 5) {
    register_module("layer", layer);
    positions = register_parameter("positions", at::zeros({2, 5}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x * of(positions)); }
  std::function<at::Tensor(const at::Tensor&)> of;
  nn::Linear layer;
  at::Tensor positions;
};
TESSERA_MODULE(Viewed);

TEST(FullyShard, AnEvaluationPastTheHolderOfViewsOfAParameter) {
  using Of = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Of> all{
      [](const at::Tensor& w) { return w.narrow(1, 0, 5).mean(); },
      [](const at::Tensor& w) { return w.narrow(0, 1, 1); },
      [](const at::Tensor& w) { return w.select(0, 1); },
      [](const at::Tensor& w) { return w.t().norm(); },
      [](const at::Tensor& w) { return w.unsqueeze(0).sum(1); },
      [](const at::Tensor& w) { return w.expand({2, 2, 5}).amax(); },
      [](const at::Tensor& w) { return w.view({-1}).slice(0, 5).sum(); },
  };
  for (size_t i = 0; i < all.size(); ++i) {
    Viewed whole(all[i]);
    const at::Tensor x = whole_batch(samples).x;
    const at::NoGradGuard no_grad;
    const at::Tensor expected = whole->forward(x);
    for (const int ranks : {1, 2, 3}) {
      run_ranks(ranks, [&](World& world) {
        Viewed net(all[i]);
        const auto sharded = fully_shard(net, world.group(), {.wrap = "layer"});
        net->eval();
        EXPECT_LT((net->forward(x) - expected).abs().max().item<double>(), 1e-5) << i << " on " << ranks;
        EXPECT_EQ(net->positions.size(0), nn::slice_of(net->positions).local_shape()[0]) << "whole behind the forward";
      });
    }
  }
}

/// Parameters of the root, a block that is called by ->forward, a weight that another module reads.
struct BypassedImpl : nn::Module {
  BypassedImpl() : inner(6, 6), last(6, 6) {
    bias = register_parameter("bias", at::empty({6}));
    register_module("inner", inner);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(inner->forward(x + bias))) + at::matmul(x, last->weight.t()); }
  at::Tensor bias;
  nn::Linear inner, last;
};
TESSERA_MODULE(Bypassed);

TEST(FullyShard, ForwardPastTheHolder) {
  const at::Tensor x = random_tensor({6, 6}, "x");
  Bypassed whole;
  whole(x).square().sum().backward();
  const Gradients expected = named_gradients(*whole);
  const at::Tensor out = whole(x).detach();
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Bypassed net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "inner"});
      const at::Tensor mine = x.narrow(0, 6 / ranks * world.rank(), 6 / ranks);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        (step == 1 ? net(mine) : net->forward(mine)).square().sum().backward();
        EXPECT_LT(slice_difference(*net, expected), parity);
        const at::NoGradGuard no_grad;
        EXPECT_LT((net->forward(x) - out).abs().max().item<double>(), 1e-5);
        EXPECT_LT((net(x) - out).abs().max().item<double>(), 1e-5);
      }
      if (ranks == 1) return;
      // An engine's steps watch no operators: what reads the unit says what has to be called how.
      sharded->begin_step();
      std::string said;
      try {
        net->forward(mine);
      } catch (const std::exception& error) {
        said = error.what();
      }
      EXPECT_THAT(said, HasSubstr("were read while the unit is not gathered"));
      EXPECT_THAT(said, HasSubstr("as model(x), not by ->forward(x)"));
    });
  }
}

/// Two towers of one size, in the one order or in the other.
template <class Base, class Layer>
struct TowersOf : Base {
  TowersOf() {
    for (Layer* layer : {&text, &image}) this->register_module(layer == &text ? "text" : "image", *layer);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor first = at::tanh((image_first ? image : text)(x)), second = at::tanh((image_first ? text : image)(x));
    return (first * second).sum();
  }
  Layer text{6, 6}, image{6, 6};
  bool image_first = false;
};
using PlainTowers = TowersOf<torch::nn::Module, torch::nn::Linear>;
struct MadePlainTowers : std::shared_ptr<PlainTowers> {
  MadePlainTowers() : std::shared_ptr<PlainTowers>(std::make_shared<PlainTowers>()) {}
};
struct TowersImpl : TowersOf<nn::Module, nn::Linear> {};
TESSERA_MODULE(Towers);

/// How often the ranks told each other which unit comes.
class CountTold : public comm::DecoratedEngine {
 public:
  CountTold(const comm::GroupInfo& group, std::shared_ptr<comm::Engine> inner, std::atomic<int>& told)
      : comm::DecoratedEngine(group, std::move(inner)), told_(told) {}
  comm::Work start(const comm::Call& call) override {
    if (comm::CallSite::current() == "fsdp.order") ++told_;
    return inner()->start(call);
  }

 private:
  std::atomic<int>& told_;
};

template <class Net, class Call>
void expect_one_order(const Call& call) {
  const at::Tensor x = random_tensor({4, 6}, "x");
  std::atomic<int> told{0};
  const comm::Decorator count = [&](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
    return std::make_shared<CountTold>(group, std::move(inner), told);
  };
  const auto refused = [&](const std::function<void(Net&, World&)>& body) {
    std::string said;
    try {
      run_ranks(2,
                [&](World& world) {
                  Net net;
                  auto sharded = fully_shard(*net, world.group(), {.wrap = "*"});
                  body(net, world);
                },
                {.timeout = std::chrono::seconds(60), .decorators = {count}, .backend = "shm"});
    } catch (const std::exception& error) {
      said = error.what();
    }
    return said;
  };
  const auto train = [&](Net& net) { call(net, x).backward(); };
  const auto evaluate = [&](Net& net) {
    const at::NoGradGuard no_grad;
    call(net, x);
  };
  // What every rank does alike is told in the first pass of its kind, and when it changes.
  EXPECT_EQ(refused([&](Net& net, World& world) {
              for (int step = 0; step < 4; ++step) {
                const int before = told;
                train(net);
                evaluate(net);
                comm::barrier(world.group());
                EXPECT_TRUE(step == 0 ? told > 0 : told == before || step == 2) << step;
                if (step == 1) net->image_first = true;
                comm::barrier(world.group());
              }
            }),
            "");
  const auto names = ::testing::AllOf(HasSubstr("comes to unit 'image'"), HasSubstr("comes to 'text'"), HasSubstr("find_unused_parameters"));
  EXPECT_THAT(refused([&](Net& net, World& world) {
                net->image_first = world.rank() == 1;
                train(net);
              }),
              names);
  EXPECT_THAT(refused([&](Net& net, World& world) {
                net->image_first = world.rank() == 1;
                evaluate(net);
              }),
              names);
  // A rank that alone leaves what was agreed meets others in another collective.
  for (const bool evaluating : {false, true}) {
    EXPECT_THAT(refused([&](Net& net, World& world) {
                  for (int step = 0; step < 2; ++step) {
                    train(net);
                    evaluate(net);
                  }
                  net->image_first = world.rank() == 1;
                  evaluating ? evaluate(net) : train(net);
                  comm::barrier(world.group());  // a rank that has still gathered what the other asks about makes no call of its own
                }),
                HasSubstr("all_gather"))
        << "evaluating " << evaluating;
  }
}

/// As large as what ranks tell of units, so that its data would pass for a name.
TEST(FullyShard, AnotherCollectiveIsNotTakenForAUnitsName) {
  std::string said;
  try {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      const auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
      if (world.rank() == 0) return net(whole_batch(samples).x).sum().backward();
      const auto bytes = at::TensorOptions(at::kCPU).dtype(at::kByte);  // as names lie
      comm::all_gather(world.group(), at::zeros({2 * 128}, bytes), at::zeros({128}, bytes));
    });
  } catch (const std::exception& error) {
    said = error.what();
  }
  EXPECT_THAT(said, ::testing::AllOf(HasSubstr("rank 1 comes to another collective where rank 0 comes to '"), HasSubstr("find_unused_parameters")));
}

TEST(FullyShard, RanksThatComeToUnitsInOtherOrdersAreToldApart) {
  expect_one_order<Towers>([](Towers& net, const at::Tensor& x) { return net(x); });
  expect_one_order<MadePlainTowers>([](MadePlainTowers& net, const at::Tensor& x) { return net->forward(x); });
}

TEST(FullyShard, WhatIsRegisteredAfterWrappingIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    const at::Tensor late = net->register_parameter("late", at::ones({3}));
    const auto train = [&] { (net(whole_batch(samples).x) * late).sum().backward(); };
    EXPECT_THAT(refusal(train), HasSubstr("fully_shard: 'late' of module "));
    sharded->begin_step();
    train();
    EXPECT_THAT(refusal([&] { sharded->finish(); }), HasSubstr("fully_shard: 'late' of module "));
    late.set_requires_grad(false);
    net->zero_grad();
    train();
  });
}

TEST(FullyShard, ALoopOfLibtorchsIsToldOnceOfTensorsThatItsOptimizersUpdateTwice) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    for (int step = 0; step < 2; ++step) backward_of(net, whole_batch(samples));
  });
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("fully_shard: registered under two names or more: 'first.weight' ('out.weight')"));
  EXPECT_EQ(said.find("registered under"), said.rfind("registered under"));
}

TEST(FullyShard, ReductionsThatComeInOtherOrdersAreRefused) {
  run_ranks(3, [&](World& world) {
    Odd net;
    const auto parameters = nn::unique_parameters(*net);
    UsedParameters used("fully_shard", parameters);
    for (size_t i = 0; i < parameters.size(); ++i) used.mark(i);
    used.refuse_unused_anywhere({world.group()}, {.order = 7});
    EXPECT_THAT(refusal([&] { used.refuse_unused_anywhere({world.group()}, {.order = world.rank() == 2 ? 8U : 7U}); }),
                HasSubstr("on rank 2 of world a step comes to the parameters, or to the wrappers over the same ranks, in another order"));
  });
}

/// Tables of one size: where a rank has a term that others lack, backward leaves them in another order there, and the reduction of the one meets the other's.
TEST(FullyShard, OrdersThatDifferByRankAreRefusedOverPassesAndWrappers) {
  struct Factors : torch::nn::Module {
    Factors() : user(8, 4), item(8, 4) {
      register_module("user", user);
      register_module("item", item);
      for (const auto& each : named_parameters()) each.value().data().copy_(random_tensor({8, 4}, each.key()));
    }
    at::Tensor loss(bool more) {
      const at::Tensor ids = at::arange(4), a = user(ids), b = item(ids + 2), c = user(ids + 3);
      const at::Tensor sum = (b * c).sum() + 0.1 * b.square().sum();
      return more ? sum + at::relu(1 - a).sum() : sum;
    }
    torch::nn::Embedding user, item;
  };
  const auto refused = HasSubstr("on rank 1 of world a step comes to the parameters, or to the wrappers over the same ranks, in another order");
  run_ranks(2, [&](World& world) {
    Factors net;
    const auto wrapper = fully_shard(net, world.group(), {.wrap = "*"});
    const auto step = [&](bool first, bool last) {
      {
        const auto held = wrapper->no_sync();
        net.loss(first).backward();
      }
      net.loss(last).backward();
    };
    step(true, true);
    EXPECT_THAT(refusal([&] { step(world.rank() == 0, true); }), refused);
  });
  run_ranks(2, [&](World& world) {
    Factors net;
    const auto user = fully_shard(*net.user, world.group(), {}), item = fully_shard(*net.item, world.group(), {});
    net.loss(true).backward();
    net.zero_grad();
    EXPECT_THAT(refusal([&] { net.loss(world.rank() == 0).backward(); }), refused);
  });
}

/// Steps of an engine's over two modules at once, which end in the order in which they began and in the other.
TEST(FullyShard, StepsOfTwoWrappersEndInAnyOrder) {
  const at::Tensor x = random_tensor({6, 6}, "x");
  const Gradients expected = odd_reference(x);
  run_ranks(2, [&](World& world) {
    const at::Tensor mine = x.narrow(0, 3 * world.rank(), 3);
    Odd one, two;
    auto first = fully_shard(one, world.group(), {.wrap = "*"}), second = fully_shard(two, world.group(), {.wrap = "*"});
    for (const bool reversed : {false, true, false}) {
      for (auto* sharded : {&first, &second}) (*sharded)->begin_step();
      for (Odd* net : {&one, &two}) {
        (*net)->zero_grad();
        (*net)(mine).square().sum().backward();
      }
      for (auto* sharded : {reversed ? &second : &first, reversed ? &first : &second}) (*sharded)->finish();
      for (Odd* net : {&one, &two}) EXPECT_LT(slice_difference(**net, expected), parity) << "reversed " << reversed;
    }
  });
}

TEST(FullyShard, ExplicitCallsOutOfOrderAreRefusedByName) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    const auto says = [&](const std::function<void()>& action, const std::string& what) { EXPECT_THAT(refusal(action), HasSubstr(what)); };
    says([&] { sharded->finish(); }, "finish() was called without begin_step()");
    says([&] { sharded->before_micro_batch({}); }, "before_micro_batch(), or before() of a forward, was called outside a step; call begin_step()");
    says([&] { sharded->after_micro_batch({}); }, "after_micro_batch(), or after() of a backward, was called without before_micro_batch()");
    sharded->begin_step();
    sharded->before_micro_batch({.last = false});
    says([&] { sharded->before_micro_batch({}); }, "before after_micro_batch(), or after() of a backward, of the one before");
    says([&] { sharded->finish(); }, "finish() was called before after_micro_batch()");
    backward_of(net, whole_batch(samples));
    sharded->after_micro_batch({});
    says([&] { sharded->finish(); }, "before the step's last micro-batch");
    sharded->before_micro_batch({.last = true});
    backward_of(net, whole_batch(samples));
    sharded->after_micro_batch({});
    says([&] { sharded->before_micro_batch({}); }, "after the step's last micro-batch");
    says([&] { sharded->begin_step(); }, "begin_step() was called again before finish() of the step before");
    sharded->finish();
  });
}

TEST(FullyShard, UnshardGivesTheWholeBackAndItCanBeCutAnew) {
  const auto train = [](DeepNet& net, const Batch& batch) {
    net->zero_grad();
    backward_of(net, batch);
    sgd(*net, 0.05);
  };
  DeepNet whole;
  for (int step = 0; step < 4; ++step) train(whole, whole_batch(samples, step));
  const Gradients expected = named_values(*whole);
  for (const int ranks : {1, 2, 3}) {
    for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
      run_ranks(ranks, [&](World& world) {
        const auto mine = [&](int step) { return part_of(whole_batch(samples, step), ranks, world.rank()); };
        DeepNet net;
        {
          auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .param_dtype = at::kFloat, .trigger = trigger});
          for (int step = 0; step < 2; ++step) train(net, mine(step));
          if (ranks > 1) EXPECT_THAT(refusal([&] { (void)fully_shard(net, world.group()); }), HasSubstr("is a slice already"));
          unshard(net);
          if (ranks > 1) EXPECT_THAT(refusal([&] { sharded->begin_step(); }), HasSubstr("after unshard()"));
        }
        EXPECT_EQ(net->first->weight.sizes(), at::IntArrayRef({7, 5}));
        EXPECT_TRUE(net(whole_batch(samples).x).defined());  // the module is as it was, without anybody's help
        auto again = fully_shard(net, world.group(), {.wrap = "**", .trigger = trigger});
        for (int step = 2; step < 4; ++step) train(net, mine(step));
        EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity);
        unshard(*again);
        for (const auto& [name, value] : named_values(*net)) {
          EXPECT_LT((value - expected.at(name)).abs().max().item<double>(), 10 * parity * std::max(1.0, expected.at(name).abs().max().item<double>())) << name;
        }
      });
    }
  }
  DeepNet other;
  EXPECT_THAT(refusal([&] { unshard(other); }), HasSubstr("is not what fully_shard was given, or was moved since"));
}

TEST(FullyShard, UnshardAfterAPassThatEndedByAnException) {
  for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
    run_ranks(2, [&](World& world) {
      DeepNet net, whole;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch batch = whole_batch(samples);
      const at::Tensor x = batch.x.clone().requires_grad_();
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
      EXPECT_THROW(loss_of(net(x), batch.y, samples).backward(), std::runtime_error);
      unshard(net);
      for (const auto& [name, value] : named_values(*net)) EXPECT_TRUE(at::equal(value, named_values(*whole).at(name))) << name;
      backward_of(net, batch);
      backward_of(whole, batch);
      EXPECT_LT(slice_difference(*net, named_gradients(*whole)), parity);
    });
  }
}

TEST(FullyShard, WhatWasUnshardedTrainsWhileItsWrapperIsThere) {
  for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
    run_ranks(2, [&](World& world) {
      DeepNet net, whole;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      backward_of(net, whole_batch(samples));
      unshard(net);
      for (int step = 0; step < 2; ++step) {
        for (auto* const model : {&net, &whole}) {
          (*model)->zero_grad();
          backward_of(*model, whole_batch(samples, step));
          sgd(**model, 0.05);
        }
      }
      EXPECT_LT(slice_difference(*net, named_values(*whole), /*values=*/true), parity);
    });
  }
}

TEST(FullyShard, AWrapperThatGoesLeavesSlicesThatAreRefusedByName) {
  run_ranks(2, [&](World& world) {
    for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const at::Tensor pending = net(whole_batch(samples).x);
      for (const at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);  // and frozen by now
      sharded.reset();
      EXPECT_THAT(refusal([&] { net(whole_batch(samples).x); }), HasSubstr("what gathered it is gone"));
      EXPECT_THAT(refusal([&] {
                    const at::NoGradGuard no_grad;
                    net->forward(whole_batch(samples).x);
                  }),
                  HasSubstr("call unshard(model) before it goes"));
      EXPECT_FALSE(named_values(*net).empty());  // slices can be looked at
      EXPECT_THROW(pending.sum().backward(), std::exception);
    }
  });
}

/// Whether it reads what was gathered or needs no parameter at all, as that of one layer over the batch.
TEST(FullyShard, ABackwardPassBehindTheWrappersEndIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    const auto keep_it = HasSubstr("keep what fully_shard returned until backward() has returned");
    for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const at::Tensor pending = net(whole_batch(samples).x);
      sharded.reset();
      try {
        pending.sum().backward();
        ADD_FAILURE() << "whole gradients of one rank alone";
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), keep_it);
      }
    }
    torch::nn::Linear layer(5, 3);
    fill_parameters(*layer);
    auto sharded = fully_shard(layer, world.group());
    const at::Tensor pending = layer(whole_batch(samples).x);
    sharded.reset();
    EXPECT_THAT(refusal([&] { pending.sum().backward(); }), ::testing::AllOf(keep_it, HasSubstr("' got a gradient, and what sums it over the ranks is gone")));
  });
}

/// As spectral norms turn their weight before a forward's first operator with the input.
TEST(FullyShard, ALayerOverATurnedHandleOnASliceIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      torch::nn::Linear layer(5, 7);
      fill_parameters(*layer);
      const auto sharded = fully_shard(layer, world.group());
      const at::NoGradGuard no_grad;
      EXPECT_THAT(refusal([&] { at::mv(layer->weight.detach().t(), at::ones({7})); }),
                  ::testing::AllOf(HasSubstr("aten::mv was given a handle (detach(), data()) on 'weight'"), HasSubstr("make it in forward")));
    });
  }
}

/// Only the thread that called fully_shard is watched.
TEST(FullyShard, APassInAnotherThreadIsToldSo) {
  run_ranks(2, [&](World& world) {
    torch::nn::Linear layer(torch::nn::LinearOptions(5, 2).bias(false));  // of one row on each rank, which fits by itself
    fill_parameters(*layer);
    const auto sharded = fully_shard(layer, world.group());
    const at::Tensor x = whole_batch(samples).x;
    std::string said;
    std::thread loop([&] {
      const c10::DeviceGuard device(x.device());
      try {
        layer(x).sum().backward();
      } catch (const std::exception& error) {
        said = error.what();
      }
    });
    loop.join();
    EXPECT_THAT(said, HasSubstr("another thread than the one that called fully_shard"));
  });
}

TEST(FullyShard, AnExceptionInForwardOrBackwardLeavesTheNextStepRight) {
  const Batch batch = whole_batch(samples);
  DeepNet whole;
  backward_of(whole, batch);
  const Gradients expected = named_gradients(*whole);
  run_ranks(3, [&](World& world) {
    for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(batch, 3, world.rank());
      for (const bool in_backward : {true, false}) {
        EXPECT_THROW(
            {
              at::Tensor h = net->first(mine.x);
              h = net->blocks[0](h);
              if (!in_backward) throw std::runtime_error("mine");
              h.register_hook([](const at::Tensor&) { throw std::runtime_error("mine"); });
              h = net->last(net->out(net->norm(net->blocks[2](net->blocks[1](h)))));
              h.sum().backward();
            },
            std::runtime_error);
        net->zero_grad();
        backward_of(net, mine);
        EXPECT_LT(slice_difference(*net, expected), parity);
        net->zero_grad();
      }
    }
  });
}

/// Sums over replicas are on their way when the next step begins, or the wrapper goes; what they use is given to others behind them.
TEST(FullyShard, AStepThatDidNotEndLeavesItsSumsInOrder) {
  for (const bool goes : {false, true}) {
    run_ranks(4, [&](World& world) {
      const int first = world.rank() / 2 * 2;
      const comm::Group shard = world.subgroup({first, first + 1}, "dp_shard" + std::to_string(first));
      const comm::Group replicate = world.subgroup({world.rank() % 2, world.rank() % 2 + 2}, "dp_replicate" + std::to_string(world.rank() % 2));
      DeepNet net;
      auto sharded = fully_shard(net, shard, {.wrap = "block*", .replicate = replicate});
      sharded->begin_step();
      sharded->before_micro_batch({.last = true});
      at::Tensor h = net->blocks[0](net->first(part_of(whole_batch(samples), 4, world.rank()).x));
      h.register_hook([](const at::Tensor&) { throw std::runtime_error("mine"); });
      h = net->last(net->out(net->norm(net->blocks[2](net->blocks[1](h)))));
      EXPECT_THROW(h.sum().backward(), std::runtime_error);
      goes ? sharded.reset() : sharded->begin_step();
      at::ones({1000});
    });
  }
}

/// Branches of equal size, of which ranks take different ones.
struct BranchesImpl : nn::Module {
  BranchesImpl() : first(5, 7), last(7, 3) {
    register_module("first", first);
    for (int i = 0; i < 3; ++i) register_module("branch" + std::to_string(i), branches.emplace_back(7, 7));
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first(x);
    for (const int branch : taken) h = at::tanh(branches[branch](h));
    return last(h);
  }
  nn::Linear first, last;
  std::vector<nn::Linear> branches;
  std::vector<int> taken;
};
TESSERA_MODULE(Branches);

/// The same under a root whose calls nobody sees.
struct PlainBranches : torch::nn::Module {
  PlainBranches() { register_module("inner", inner); }
  Branches inner;
};

/// Each layer's call comes from outside then: nothing of one rank's number of them may show on another.
TEST(FullyShard, RanksCallLayersFromOutsideOtherNumbersOfTimes) {
  const at::Tensor x = whole_batch(samples).x;
  const auto loss_on = [&](BranchesImpl& net, int rank) {
    at::Tensor h = net.first(x);
    for (int time = 0; time <= rank; ++time) h = at::tanh(net.branches[static_cast<size_t>(rank)](h));
    return net.last(h).square().sum();
  };
  for (const int ranks : {2, 3}) {
    PlainBranches whole;
    for (int rank = 0; rank < ranks; ++rank) loss_on(*whole.inner, rank).backward();
    run_ranks(ranks, [&](World& world) {
      const auto train = [&](torch::nn::Module& root, BranchesImpl& net, const Gradients& expected, const std::string& wrap) {
        const auto sharded = fully_shard(root, world.group(), {.wrap = wrap, .find_unused_parameters = true, .trigger = ShardTrigger::Calls});
        for (int step = 0; step < 3; ++step) {
          net.zero_grad();
          const at::Tensor loss = loss_on(net, world.rank());
          if (world.rank() == 0) EXPECT_TRUE(net.first->weight.detach().clone().defined());  // for a line of its log
          loss.backward();
          EXPECT_LT(slice_difference(root, expected), parity) << ranks << " step " << step;
          EXPECT_EQ(sharded->statistics().num_collectives, std::ssize(sharded->units())) << "reductions alone: what forward has gathered waits for backward";
        }
      };
      for (const bool each : {false, true}) {
        PlainBranches plain;
        train(plain, *plain.inner, named_gradients(whole), each ? "inner.*" : "");
        Branches ours;
        train(*ours, *ours, named_gradients(*whole.inner), each ? "*" : "");
      }
    });
  }
}

std::vector<int> taken_by(int rank) { return rank == 0 ? std::vector<int>{0} : rank == 1 ? std::vector<int>{2, 1} : std::vector<int>{1}; }

TEST(FullyShard, RanksTakeDifferentBranchesOfEqualSize) {
  const Batch batch = whole_batch(samples);
  for (const int ranks : {2, 3, 4}) {  // four: two replicas of two
    Branches whole;
    for (int rank = 0; rank < ranks; ++rank) {
      const Batch mine = part_of(batch, ranks, rank);
      whole->taken = taken_by(rank % 3);
      loss_of(whole(mine.x), mine.y, samples).backward();
    }
    const Gradients expected = named_gradients(*whole);
    run_ranks(ranks, [&](World& world) {
      comm::Group shard = world.group(), replicate;
      if (ranks == 4) {
        const int first = world.rank() / 2 * 2;
        shard = world.subgroup({first, first + 1}, "shard" + std::to_string(first));
        replicate = world.subgroup({world.rank() % 2, world.rank() % 2 + 2}, "replicate" + std::to_string(world.rank() % 2));
      }
      for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
        for (const bool driven : {false, true}) {
          Branches net;
          auto sharded = fully_shard(net, shard, {.wrap = "branch*", .find_unused_parameters = true, .replicate = replicate, .trigger = trigger});
          net->taken = taken_by(world.rank() % 3);
          const Batch mine = part_of(batch, ranks, world.rank());
          for (int step = 0; step < 3; ++step) {
            net->zero_grad();
            if (driven) sharded->begin_step();
            loss_of(net(mine.x), mine.y, samples).backward();
            if (driven) sharded->finish();
            EXPECT_LT(slice_difference(*net, expected), parity) << ranks << (driven ? " driven" : "") << " step " << step;
            const at::NoGradGuard no_grad;
            net(mine.x);
          }
        }
      }
    });
  }
}

TEST(FullyShard, InputsAreCastWithTheParametersOrNamed) {
  const Batch batch = whole_batch(samples);
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .param_dtype = at::kBFloat16});
    EXPECT_EQ(net(batch.x).scalar_type(), at::kBFloat16);
    backward_of(net, batch);
    EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
    {
      const at::NoGradGuard no_grad;
      EXPECT_EQ(net(batch.x).scalar_type(), at::kBFloat16);
    }
    Net plain;
    auto watched = fully_shard(plain, world.group(), {.wrap = "middle", .param_dtype = at::kBFloat16});
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto said = refusal([&] { plain.forward(batch.x); });
      EXPECT_THAT(said, HasSubstr("got an input of Float beside a parameter of unit '(root)'"));
      EXPECT_THAT(said, HasSubstr("model->forward(x.to(at::kBFloat16))"));
      plain.forward(batch.x.to(at::kBFloat16)).sum().backward();
    }
  });
}

TEST(FullyShard, MicroBatchesAreAddedUpInTheTypeThatIsKept) {
  // Sums that 8 bits of mantissa cannot hold: 1 + 63 times 1/64, each of which 16 bits would round away.
  run_ranks(2, [&](World& world) {
    for (const bool driven : {false, true}) {
      nn::Linear layer(nn::LinearOptions(1, 4).bias(false));
      fill_parameters(*layer);
      auto sharded = fully_shard(layer, world.group(), {.reduce_each_micro_batch = false, .reduce_dtype = at::kBFloat16});
      if (driven) sharded->begin_step();
      for (int pass = 0; pass < 64; ++pass) {
        const Attachment held = pass < 63 ? sharded->no_sync() : Attachment();
        layer(at::full({1, 1}, pass == 0 ? 8.0 : 1.0 / 64)).sum().backward();
      }
      if (driven) sharded->finish();
      const double expected = 2 * (8 + 63.0 / 64);
      const at::Tensor grad = layer->weight.grad();
      if (grad.numel() > 0) EXPECT_NEAR(grad.min().item<double>(), expected, 0.004 * expected);
      EXPECT_EQ(grad.scalar_type(), at::kFloat);
    }
  });
}

TEST(FullyShard, AProgramsOwnHooksOnParametersGoOn) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    int before = 0, after = 0;
    net->first->weight.register_hook([&](const at::Tensor& gradient) { before += gradient.size(0) == 7 ? 1 : 0; });
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    net->last->weight.register_hook([&](const at::Tensor&) { ++after; });
    net->first->weight.register_hook([&](const at::Tensor&) { ++after; });
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      backward_of(net, whole_batch(samples));
    }
    EXPECT_EQ(before, 2);
    EXPECT_EQ(after, 4);
  });
}

TEST(FullyShard, MissingGradientsAreNamedOnEveryRankOfAPlainLoop) {
  run_ranks(3, [&](World& world) {
    DeepNet net;
    if (world.rank() == 1) net->skipped = &net->blocks[1];
    auto sharded = fully_shard(net, world.group(), {.wrap = "", .trigger = ShardTrigger::Operators});
    EXPECT_THAT(refusal([&] { backward_of(net, whole_batch(samples)); }), HasSubstr("on rank 1 of world, 5 of 20 parameters got no gradient in this step"));
  });
}

}  // namespace
}  // namespace tessera
