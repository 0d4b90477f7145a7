#include "tessera/zero/zero_optimizer.h"

#include <functional>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tessera/nn/gradient_guard.h"
#include "tests/zero/plain_loop.h"
#include "tests/zero/support.h"

/// zero_optimizer around optimizers of libtorch and of the program: what is refused, and what comes from files.
namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// One clears in every step, and the other in every second, whose gradients add up meanwhile.
template <class First, class Second, class Backward>
void two_rates(First& first, Second& second, const Backward& backward) {
  for (int step = 0; step < 4; ++step) {
    first.zero_grad();
    if (step % 2 == 0) second.zero_grad();
    backward(step);
    first.step();
    if (step % 2 == 1) second.step();
  }
}

TEST(ZeroPlainLoop, EachOfTwoOptimizersOfOneWrapperClearsItsOwn) {
  const auto is_last = [](const nn::NamedParameter& parameter) { return parameter.name.starts_with("last"); };
  const auto sgd_of = [is_last](bool last) {
    return [is_last, last](const std::vector<nn::NamedParameter>& parameters) {
      std::vector<at::Tensor> mine;
      for (const auto& parameter : parameters) {
        if (is_last(parameter) == last) mine.push_back(parameter.tensor);
      }
      return std::make_unique<torch::optim::SGD>(mine, 0.1);
    };
  };
  Net reference;
  nn::assign_paths(reference);
  const auto first = sgd_of(false)(nn::unique_parameters(reference)), second = sgd_of(true)(nn::unique_parameters(reference));
  two_rates(*first, *second, [&](int step) { backward(reference, whole_batch(samples, step)); });
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      const ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      auto mine = zero_optimizer(net, sgd_of(false)), others = zero_optimizer(net, sgd_of(true));
      two_rates(mine, others, [&](int step) { backward(net, part_of(whole_batch(samples, step), 2, world.rank())); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 100 * parity);
    });
  }
}

TEST(ZeroPlainLoop, AnOptimizerOrClippingOverTheParametersIsToldWhatToWrite) {
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      {
        ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
        torch::optim::Adam wrong(net.parameters());
        for (const bool set_to_none : {true, false}) {
          wrong.zero_grad(set_to_none);
          backward(net, whole_batch(samples));
          const auto expect_told = [](const std::string& text) {
            EXPECT_THAT(text, HasSubstr("sharded data parallelism: the gradient of 'scale' lies in parts"));
            EXPECT_THAT(text, HasSubstr("zero_optimizer(sharded, make)"));
            EXPECT_THAT(text, HasSubstr("torch::optim::LBFGS, which needs whole gradients, works under DistributedDataParallel alone"));
            EXPECT_THAT(text, HasSubstr("by hand on sharded.updated()"));
          };
          expect_told(refusal([&] { wrong.step(); }));
          expect_told(refusal([&] { torch::nn::utils::clip_grad_norm_(net.parameters(), 1.0); }));
          expect_told(refusal([&] { net.scale.mutable_grad().mul_(0.5); }));
        }
      }
      backward(net, whole_batch(samples));  // the module is as before
      EXPECT_LT(largest_difference(gradients_of(net), one_process(1)[0]), parity);
    });
  }
}

TEST(ZeroPlainLoop, SchedulersOfLibtorch) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 2});
    auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::SGD>(parts, 0.5); });
    torch::optim::StepLR schedule(*optimizer, 1, 0.1);
    const at::Tensor before = net.scale.detach().clone();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      backward(net, whole_batch(samples, step));
      optimizer.step();
      schedule.step();
    }
    EXPECT_LT(optimizer->param_groups().front().options().get_lr(), 0.5);
    EXPECT_FALSE(at::equal(net.scale, before));
  });
}

/// Its dot products are over all parameters, of which a rank has a part: refused where it is made, before ranks wait for each other. A rank alone has them
/// whole.
TEST(ZeroPlainLoop, AnOptimizerOfWholeVectorsIsRefusedByName) {
  const auto make = [](const std::vector<at::Tensor>& parts) {
    return std::make_unique<torch::optim::LBFGS>(parts, torch::optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe"));
  };
  const auto train = [](Net& net, auto& optimizer) {
    for (int step = 0; step < 2; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const Batch batch = whole_batch(samples, step);
        const at::Tensor loss = loss_of(net.forward(batch.x), batch.y, samples);
        loss.backward();
        return loss;
      });
    }
  };
  Net reference;
  const auto alone = make(reference.parameters());
  train(reference, *alone);
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      for (const std::string& text : {refusal([&] { (void)zero_optimizer(zero, make); }), refusal([&] { (void)zero_optimizer(net, make); })}) {
        EXPECT_THAT(text, HasSubstr("zero_optimizer: torch::optim::LBFGS takes dot products over all parameters"));
        EXPECT_THAT(text, HasSubstr("one of 2 parts"));
        EXPECT_THAT(text, HasSubstr("use an optimizer that goes element by element (Adam, AdamW, SGD, Adagrad, RMSprop), or DistributedDataParallel"));
      }
      (void)zero_optimizer(zero, make_adam);
    });
    run_ranks(1, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      auto optimizer = zero_optimizer(zero, make);
      train(net, optimizer);
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), parity) << "stage " << way.stage;
    });
  }
}

/// A program's own class, of which nobody knows what its step takes of a tensor.
class OwnDescent : public Torch {
 public:
  explicit OwnDescent(const std::vector<at::Tensor>& parts) : Torch(parts, std::make_unique<torch::optim::SGDOptions>(0.05)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    for (const auto& group : param_groups()) {
      for (at::Tensor part : group.params()) {
        if (part.grad().defined()) part.sub_(part.grad(), 0.05);
      }
    }
    return {};
  }
};

/// Nor of what is derived from a class that goes by elements.
class OwnSgd : public torch::optim::SGD {
 public:
  explicit OwnSgd(const std::vector<at::Tensor>& parts) : SGD(parts, torch::optim::SGDOptions(0.05)) {}
};

/// Layer-wise rates (LAMB, LARS) are norms of whole tensors, of which a rank has parts; parts are brought together, so replicas would agree on what is wrong.
TEST(ZeroPlainLoop, AnOptimizerOfAnUnknownClassIsRefusedUnlessTheProgramVouches) {
  const auto own = [](const std::vector<at::Tensor>& parts) { return std::make_unique<OwnDescent>(parts); };
  const auto train = [](Net& net, auto& optimizer, int ranks, int rank) {
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      backward(net, part_of(whole_batch(samples, step), ranks, rank));
      optimizer.step();
    }
  };
  Net reference;
  torch::optim::SGD alone(reference.parameters(), torch::optim::SGDOptions(0.05));
  train(reference, alone, 1, 0);
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      for (const std::string& text : {refusal([&] { (void)zero_optimizer(zero, own); }), refusal([&] { (void)zero_optimizer(net, own); })}) {
        EXPECT_THAT(text, HasSubstr("OwnDescent' is no class of which it is known that it goes element by element"));
        EXPECT_THAT(text, HasSubstr("one of 2 parts"));
        EXPECT_THAT(text, HasSubstr("ByElements::Vouched"));
      }
      EXPECT_THAT(refusal([&] { (void)zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<OwnSgd>(parts); }); }),
                  HasSubstr("OwnSgd' is no class"));
      auto optimizer = zero_optimizer(zero, own, ByElements::Vouched);
      train(net, optimizer, 2, world.rank());
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << "stage " << way.stage;
    });
  }
  run_ranks(1, [&](World& world) {  // has all of each parameter
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1));
    EXPECT_NO_THROW((void)zero_optimizer(zero, own));
  });
}

std::string saved_state(Torch& optimizer) {
  std::stringstream file;
  torch::save(optimizer, file);
  return file.str();
}

void load_state(Torch& optimizer, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::load(optimizer, file);
}

/// One weight, which two ranks cut into halves of the same size.
struct Halved {
  explicit Halved(const ShardGroups& groups, int stage = 1, MakeOptimizer make = make_adam)
      : net(torch::nn::LinearOptions(8, 8).bias(false)), zero((fill_parameters(*net), *net), groups, {.stage = stage}), optimizer(zero_optimizer(zero, make)) {}
  void backward(int step, bool alike = false) {
    optimizer.zero_grad();
    const at::Tensor y = net(at::arange(16, at::kFloat).view({2, 8}).cos() + step);
    (alike ? y.sum() : y.square().sum()).backward();
  }
  torch::nn::Linear net;
  ShardedDataParallel zero;
  ZeroOptimizer<Torch> optimizer;
};

TEST(ZeroPlainLoop, OneRanksOptimizerFileIsNotEverybodysState) {
  for (const int stage : {1, 2}) {
    std::vector<std::string> files(2);
    std::vector<at::Tensor> weights(2), expected(2);
    run_ranks(2, [&](World& world) {
      Halved model(groups_of(world, 1), stage);
      for (int step = 0; step < 3; ++step) {
        if (step == 2) files[world.rank()] = saved_state(*model.optimizer);
        if (step == 2) weights[world.rank()] = model.net->weight.detach().clone();
        model.backward(step);
        model.optimizer.step();
      }
      expected[world.rank()] = model.net->weight.detach().clone();
    });
    const auto go_on = [&](World& world, const std::string& file, const std::function<void(Halved&)>& then) {
      Halved model(groups_of(world, 1), stage);
      {
        const at::NoGradGuard no_grad;
        model.net->weight.copy_(weights[0]);
      }
      load_state(*model.optimizer, file);
      model.backward(2);
      then(model);
    };
    run_ranks(2, [&](World& world) {
      go_on(world, files[0], [&](Halved& model) {
        const auto step = [&] { model.optimizer.step(); };
        EXPECT_THAT(refusal(step), AllOf(HasSubstr("the optimizer's state is the same on all 2 ranks of "), HasSubstr("checkpoint::load")));
        EXPECT_THAT(refusal(step), HasSubstr("is the same on all 2 ranks")) << "nor at the next try";
        EXPECT_TRUE(at::equal(model.net->weight, weights[0]));
      });
      go_on(world, files[world.rank()], [&](Halved& model) {
        model.optimizer.step();
        EXPECT_TRUE(at::equal(model.net->weight, expected[0]));
      });
    });
  }
}

/// Rows of one gradient have one state; an Adagrad that begins with a constant has learned nothing yet.
TEST(ZeroPlainLoop, StateThatIsAlikeOnAllRanksByItselfIsTaken) {
  std::string file;
  run_ranks(2, [&](World& world) {
    Halved model(groups_of(world, 1));
    model.backward(0, /*alike=*/true);
    model.optimizer.step();
    if (world.rank() == 0) file = saved_state(*model.optimizer);
  });
  run_ranks(2, [&](World& world) {
    Halved model(groups_of(world, 1));
    load_state(*model.optimizer, file);
    model.backward(1, /*alike=*/true);
    model.optimizer.step();
    Halved adagrad(groups_of(world, 1), 1, [](const std::vector<at::Tensor>& parts) {
      return std::make_unique<torch::optim::Adagrad>(parts, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
    });
    adagrad.backward(0);
    adagrad.optimizer.step();
  });
}

TEST(ZeroPlainLoop, StateOfOtherSizesIsRefusedByNameOnAllRanks) {
  for (const auto& make : {MakeOptimizer(make_adam), MakeOptimizer(make_sgd)}) {
    torch::nn::Linear whole(5, 3);
    const auto optimizer = make(whole->parameters());
    whole(at::ones({1, 5})).sum().backward();
    optimizer->step();
    const std::string of_whole = saved_state(*optimizer);
    std::vector<std::string> files(2);
    const auto each = [&](const std::function<void(World&, ZeroOptimizer<Torch>&)>& body) {
      run_ranks(2, [&](World& world) {
        torch::nn::Linear net(5, 3);
        fill_parameters(*net);
        ShardedDataParallel zero(*net, groups_of(world, 1));
        auto sharded = zero_optimizer(zero, make);
        net(at::ones({1, 5})).square().sum().backward();
        body(world, sharded);
      });
    };
    each([&](World& world, ZeroOptimizer<Torch>& sharded) {
      sharded.step();
      files[world.rank()] = saved_state(*sharded);
      load_state(*sharded, of_whole);
      EXPECT_THAT(refusal([&] { sharded.step(); }), HasSubstr("and is of whole parameters; make the optimizer behind the wrapper")) << "in a later step, too";
    });
    each([&](World&, ZeroOptimizer<Torch>& sharded) {
      load_state(*sharded, of_whole);
      EXPECT_THAT(refusal([&] { sharded.step(); }),
                  AllOf(HasSubstr("the optimizer's state of '"), HasSubstr("is of whole parameters"), HasSubstr("checkpoint::load")));
    });
    each([&](World& world, ZeroOptimizer<Torch>& sharded) {
      load_state(*sharded, files[0]);
      const auto says = world.rank() == 0 ? HasSubstr("on rank 1 the optimizer's state has other sizes") : HasSubstr("the state of another rank's part");
      EXPECT_THAT(refusal([&] { sharded.step(); }), says);
    });
  }
}

TEST(ZeroPlainLoop, AnOptimizerWhoseWrapperIsGoneIsRefusedByName) {
  run_ranks(2, [](World& world) {
    for (const int stage : {1, 2}) {
      Net net;
      auto zero = std::make_unique<ShardedDataParallel>(net, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = stage});
      auto optimizer = zero_optimizer(*zero, make_adam);
      backward(net, whole_batch(samples));
      zero.reset();
      const auto is_gone = AllOf(HasSubstr("the wrapper that holds '"), HasSubstr("is gone"), HasSubstr("keep the wrapper"));
      EXPECT_THAT(refusal([&] { optimizer.step(); }), is_gone);
      EXPECT_THAT(refusal([&] { optimizer.zero_grad(); }), is_gone);
      EXPECT_THAT(refusal([&] { optimizer->zero_grad(); }), is_gone);
      EXPECT_EQ(optimizer.inner().param_groups().size(), 1u) << "a scheduler may go after it";
      const ShardedDataParallel anew(net, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = stage});  // perhaps where the first one lay
      EXPECT_THAT(refusal([&] { optimizer.step(); }), is_gone);
    }
  });
}

/// The last wrapper of a model takes its gradients: an optimizer over the parts of the one before would update nothing, and say nothing.
TEST(ZeroPlainLoop, AnOptimizerOverAWrapperThatAnotherFollowedIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](World& world) {
      for (const int stage : {1, 2}) {
        Net net;
        ShardedDataParallel first(net, {.shard = world.group()}, {.stage = stage});
        auto before = zero_optimizer(first, make_sgd);
        ShardedDataParallel last(net, {.shard = world.group()}, {.stage = stage});
        auto behind = zero_optimizer(first, make_sgd), right = zero_optimizer(last, make_sgd);
        const auto weights = weights_of(net);
        backward(net, whole_batch(samples));
        for (auto* const wrong : {&before, &behind}) {
          EXPECT_THAT(refusal([&] { wrong->step(); }), AllOf(HasSubstr("was wrapped again"), HasSubstr("'scale'"), HasSubstr("zero_optimizer(wrapper")));
        }
        right.step();
        EXPECT_FALSE(same_bits(weights, weights_of(net)));
      }
    });
  }
}

/// The step of what is inside would leave the parts apart, and an evaluation behind it would differ between ranks.
TEST(ZeroPlainLoop, AStepByTheArrowIsRefusedByNameBeforeItUpdates) {
  run_ranks(2, [](World& world) {
    for (const auto& make : {MakeOptimizer(make_sgd), MakeOptimizer(make_adam)}) {
      Net net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
      auto optimizer = zero_optimizer(zero, make);
      const auto weights = weights_of(net);
      backward(net, whole_batch(samples));
      EXPECT_THAT(refusal([&] { optimizer->step(); }), AllOf(HasSubstr("optimizer->step()"), HasSubstr("write optimizer.step()")));
      EXPECT_TRUE(same_bits(weights, weights_of(net)));
      const at::Tensor gradient = zero.updated().front().tensor.grad();
      EXPECT_TRUE(!gradient.defined() || !nn::is_gradient_guard(gradient)) << "the gradients are there again";
      const auto step_with = [&](size_t, size_t) { optimizer.step(); };
      step_with(optimizer->param_groups().size(), optimizer->state().size());  // what was asked for by the arrow lives on to the end of the line
      EXPECT_FALSE(same_bits(weights, weights_of(net)));
      backward(net, whole_batch(samples));
      optimizer->zero_grad(/*set_to_none=*/false);
      for (const auto& updated : zero.updated()) EXPECT_TRUE(at::equal(updated.tensor.grad(), at::zeros_like(updated.tensor))) << updated.name;
      optimizer->zero_grad();
      for (const auto& updated : zero.updated()) EXPECT_FALSE(updated.tensor.grad().defined()) << updated.name;
    }
  });
}

TEST(ZeroPlainLoop, TheInnerStepIsNamedWhereItsPartsWereLeftApart) {
  run_ranks(2, [](World& world) {
    Net net;
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
    auto optimizer = zero_optimizer(zero, make_adam);
    backward(net, whole_batch(samples));
    optimizer.inner().step();
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), AllOf(HasSubstr("after_update()"), HasSubstr("optimizer.inner().step()")));
    zero.after_update();
    backward(net, whole_batch(samples));
  });
}

/// One wrapper, an optimizer for each of two networks: the generator's graph is older than the discriminator's update, and saved nothing that it wrote.
TEST(ZeroPlainLoop, AnUpdateCountsForWhatItsOptimizerHolds) {
  struct Pair : torch::nn::Module {
    Pair() {
      register_module("g1", g1);
      register_module("g2", g2);
      register_module("d1", discriminator);
      fill_parameters(*this);
    }
    at::Tensor generated(const at::Tensor& z) { return g2->forward(at::tanh(g1->forward(z))); }
    torch::nn::Linear g1{4, 5}, g2{5, 4}, discriminator{4, 1};
  };
  const auto loop = [](Pair& net, torch::optim::Optimizer* of_generator, torch::optim::Optimizer* of_discriminator, const auto& step) {
    for (int i = 1; i <= 3; ++i) {
      net.discriminator->zero_grad();
      const at::Tensor fake = net.generated(at::ones({2, 4}) * i);
      net.discriminator->forward(fake.detach()).square().sum().backward();
      step(of_discriminator);
      net.g1->zero_grad();
      net.g2->zero_grad();
      net.discriminator->forward(fake).square().sum().backward();
      step(of_generator);
    }
  };
  Pair whole;
  const auto of_whole = whole.parameters();
  const auto g = make_adam({of_whole.begin(), of_whole.begin() + 4}), d = make_adam(whole.discriminator->parameters());
  loop(whole, g.get(), d.get(), [](torch::optim::Optimizer* optimizer) { optimizer->step(); });
  for (const int stage : {1, 2}) {
    run_ranks(2, [&](World& world) {
      Pair net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .average = true, .find_unused_parameters = true});
      const auto of = [&](const std::string& part) {
        return zero_optimizer(zero, [&](const std::vector<nn::NamedParameter>& updated) {
          std::vector<at::Tensor> parts;
          for (const auto& each : updated) {
            if (each.name.starts_with(part)) parts.push_back(each.tensor);
          }
          return make_adam(parts);
        });
      };
      auto generator = of("g"), discriminator = of("d");
      loop(net, &generator.inner(), &discriminator.inner(),
           [&](const torch::optim::Optimizer* optimizer) { optimizer == &generator.inner() ? generator.step() : discriminator.step(); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << "stage " << stage;
    });
  }
}

}  // namespace
}  // namespace tessera
