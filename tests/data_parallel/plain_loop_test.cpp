#include "tests/data_parallel/plain_loop.h"

#include <chrono>
#include <functional>
#include <latch>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/decorators/check.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/nn/sync_batch_norm.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, unchanged.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

TEST(DdpPlainLoop, IsTheLoopOfOneProcess) {
  for (const auto& make : {make_sgd, make_adam}) {
    for (const bool set_to_none : {true, false}) {
      expect_parity({.train =
                         [&](Net& net, GradientSynchronizer*, torch::optim::Optimizer& optimizer, const auto& mine) {
                           for (int step = 0; step < 4; ++step) {
                             optimizer.zero_grad(set_to_none);
                             backward(net, mine(step));
                             optimizer.step();
                           }
                         },
                     .make_optimizer = make});
    }
  }
}

/// Module::zero_grad(false) leaves a detached alias of the gradient, of another tensor over the bucket's memory.
TEST(DdpPlainLoop, TheModelsZeroGradToZeros) {
  expect_parity({.train = [](Net& net, GradientSynchronizer*, torch::optim::Optimizer& optimizer, const auto& mine) {
    for (int step = 0; step < 4; ++step) {
      net.zero_grad(/*set_to_none=*/false);
      backward(net, mine(step));
      optimizer.step();
    }
  }});
  expect_parity({.train = [](Net& net, GradientSynchronizer*, torch::optim::Optimizer&, const auto& mine) {
    for (int pass = 0; pass < 3; ++pass) {
      backward(net, mine(pass));
      for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad() = parameter.grad().view_as(parameter);
    }
  }});
}

TEST(DdpPlainLoop, ForwardMayComeBeforeZeroGrad) {
  expect_parity({.train = [](Net& net, GradientSynchronizer*, torch::optim::Optimizer& optimizer, const auto& mine) {
    for (int step = 0; step < 3; ++step) {
      const Batch batch = mine(step);
      const at::Tensor loss = loss_of(net.forward(batch.x), batch.y, samples);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }});
}

TEST(DdpPlainLoop, ClearingWithinAnAccumulationClearsIt) {
  for (const bool set_to_none : {true, false}) {
    for (const bool by_module : {true, false}) {
      expect_parity({.train = [&](Net& net, GradientSynchronizer* ddp, torch::optim::Optimizer& optimizer, const auto& mine) {
        backward(net, mine(0));
        {
          const Attachment local = ddp ? ddp->no_sync() : Attachment();
          backward(net, mine(1));
        }
        by_module ? net.zero_grad(set_to_none) : optimizer.zero_grad(set_to_none);
        backward(net, mine(2));
        optimizer.step();
      }});
    }
  }
}

TEST(DdpPlainLoop, ClearingAfterAFailureClearsIt) {
  for (const bool tree : {false, true}) {
    for (const bool set_to_none : {true, false}) {
      run_ranks(2, [&](World& world) {
        Net net, reference;
        std::unique_ptr<GradientSynchronizer> wrapped = make_ddp(net, world.group());
        if (tree) wrapped = std::make_unique<TreeReduction>(net, world.group(), TreeReductionOptions{.num_micro_batches = 2});
        backward(net, part_of(whole_batch(samples), 2, world.rank()));
        at::Tensor hidden = net.first(whole_batch(samples).x);
        hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
        EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
        net.zero_grad(set_to_none);
        backward(net, part_of(whole_batch(samples, 1), 2, world.rank()));
        backward(reference, whole_batch(samples, 1));
        EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
      });
    }
  }
}

/// What a pass under no_sync() added to was zeroed before one that failed: it does not come back.
TEST(DdpPlainLoop, ClearingBeforeAFailureClearsIt) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, reference;
      const auto ddp = make_ddp(net, world.group());
      backward(net, part_of(whole_batch(samples), 2, world.rank()));
      {
        const Attachment local = ddp->no_sync();
        backward(net, part_of(whole_batch(samples, 1), 2, world.rank()));
      }
      net.zero_grad(set_to_none);
      at::Tensor hidden = net.first(whole_batch(samples).x);  // before its gradients, and behind others
      hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
      EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
      for (const at::Tensor& parameter : net.parameters()) EXPECT_TRUE(!parameter.grad().defined() || !parameter.grad().any().item<bool>());
      backward(net, part_of(whole_batch(samples, 2), 2, world.rank()));
      backward(reference, whole_batch(samples, 2));
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
    });
  }
}

TEST(DdpPlainLoop, NobodysHandleOnAGradientChanges) {
  using Keep = std::function<at::Tensor(const at::Tensor&)>;
  for (const Keep& keep :
       {Keep([](const at::Tensor& gradient) { return gradient; }), Keep([](const at::Tensor& gradient) { return gradient.detach(); }),
        Keep([](const at::Tensor& gradient) { return gradient.data(); }), Keep([](const at::Tensor& gradient) { return gradient.view({-1}); })}) {
    run_ranks(2, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group());
      for (int step = 0; step < 2; ++step) {  // after the first the plan is another, in new memory
        net.zero_grad();
        backward(net, whole_batch(samples, 0));
      }
      const at::Tensor kept = keep(net.scale.grad()), copy = kept.clone();
      net.zero_grad();
      backward(net, whole_batch(samples, 1));
      EXPECT_TRUE(at::equal(kept, copy));
    });
  }
}

/// A user's own checkpoint: what it keeps back is differentiated by a pass inside of the pass.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t net) {
    context->save_for_backward({x});
    context->saved_data["net"] = net;
    return reinterpret_cast<Net*>(net)->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const at::AutoGradMode recording(true);
      reinterpret_cast<Net*>(context->saved_data["net"].toInt())->forward(x).backward(gradients[0]);
    }
    return {x.grad(), at::Tensor()};
  }
};

TEST(DdpPlainLoop, APassInsideOfAnotherThatComesFirstIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const at::Tensor x = whole_batch(samples).x.clone().requires_grad_();
    EXPECT_THAT(refusal([&] { Reentrant::apply(x, reinterpret_cast<int64_t>(&net)).sum().backward(); }), HasSubstr("a backward pass inside of another"));
    net.zero_grad();
    backward(net, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_LT(largest_difference(gradients_of(net), one_process(1)[0]), parity);
  });
}

/// Ranks that use different parameters finish their buckets in different orders, and both wrappers' collectives are one sequence.
TEST(DdpPlainLoop, TwoWrappersOfOneEngineStartTheirBucketsInOneOrder) {
  const auto loss = [](Net& d, Net& g, bool whole) {
    const at::Tensor x = at::constant_pad_nd(g.forward(whole_batch(samples, 3).x), {0, 2});
    const at::Tensor hidden = at::tanh(d.middle(at::tanh(d.first(x))) * d.scale);
    return (whole ? d.last(hidden) : at::linear(hidden, d.last->weight)).square().sum() / static_cast<double>(samples);
  };
  Net d, g;
  for (int rank = 0; rank < 2; ++rank) loss(d, g, rank == 0).backward();
  run_ranks(2, [&](World& world) {
    Net my_d, my_g;
    const DdpOptions options{.find_unused_parameters = true};
    DistributedDataParallel ddp_d(my_d, world.group(), options), ddp_g(my_g, world.group(), options);
    for (int step = 0; step < 2; ++step) {
      my_d.zero_grad(), my_g.zero_grad();
      loss(my_d, my_g, world.rank() == 0).backward();
      EXPECT_LT(largest_difference(gradients_of(my_d), gradients_of(d)), parity);
      EXPECT_LT(largest_difference(gradients_of(my_g), gradients_of(g)), parity);
    }
  });
}

/// What a graph sums in its backward pass is of the same sequence, and comes before a bucket on one rank and after it on the other.
TEST(DdpPlainLoop, CollectivesOfAGraphKeepTheirPlaceWhereRanksUseDifferentParameters) {
  struct Normed : Net {
    Normed() { norm = register_module("norm", nn::SyncBatchNorm(torch::nn::BatchNormOptions(7))), fill_parameters(*this); }
    /// Without middle's bias, which the norm takes out again: what is left of its gradient is rounding.
    at::Tensor hidden(const at::Tensor& x) { return norm(at::tanh(at::linear(at::tanh(first(x)), middle->weight))) * scale; }
    at::Tensor loss(const at::Tensor& hidden, bool whole) {
      return (whole ? last(hidden) : at::linear(hidden, last->weight)).sin().sum() + (whole ? 1 : 2) * hidden.sin().sum();
    }
    nn::SyncBatchNorm norm{nullptr};
  };
  const Batch batch = whole_batch(8);
  Normed reference;
  const at::Tensor hidden = reference.hidden(batch.x);
  (reference.loss(hidden.narrow(0, 0, 4), true) + reference.loss(hidden.narrow(0, 4, 4), false)).backward();
  run_ranks(2, [&](World& world) {
    Normed net;
    nn::synchronize_batch_norms(net, world.group());
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      net.zero_grad();
      net.loss(net.hidden(part_of(batch, 2, world.rank()).x), world.rank() == 0).backward();
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
    }
  });
}

/// While an exception unwinds, a wrapper waits for nobody, and starts nothing.
TEST(DdpPlainLoop, AWrapperThatGoesInTheMiddleOfAStepCommunicatesNothing) {
  struct Counting final : CommunicationHook {
    struct Reduction final : BucketReduction {
      explicit Reduction(int& advances) : advances(advances) {}
      bool advance() override { return ++advances > 0; }
      int& advances;
    };
    std::unique_ptr<BucketReduction> start(GradientBucket&, GradientChannel&) override { return std::make_unique<Reduction>(advances); }
    int advances = 0;
  };
  run_ranks(2, [&](World& world) {
    Net net;
    const auto hook = std::make_shared<Counting>();
    const auto fail = [&] {
      at::Tensor hidden = net.first(whole_batch(samples).x);
      hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
      EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
    };
    {
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
      fail();
      backward(net, whole_batch(samples));
      hook->advances = 0;
      fail();
    }
    EXPECT_EQ(hook->advances, 0);
  });
}

TEST(DdpPlainLoop, ReadingAGradientBeginsNothing) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    backward(net, whole_batch(samples));
    const auto before = gradients_of(net);
    const Batch batch = whole_batch(samples);
    torch::autograd::grad({loss_of(net.forward(batch.x), batch.y, samples)}, net.parameters());
    EXPECT_TRUE(same_bits(gradients_of(net), before));
    net.zero_grad();
    backward(net, whole_batch(samples));
    EXPECT_TRUE(same_bits(gradients_of(net), before));
  });
}

/// The discriminator's and the generator's steps of PyTorch's DCGAN example, whose order of calls this repeats.
struct Gan {
  explicit Gan(double lr = 0.05) : optimizer_d(d.parameters(), torch::optim::AdamOptions(lr)), optimizer_g(g.parameters(), torch::optim::AdamOptions(lr)) {}

  void step(const Batch& real, const at::Tensor& noise) {
    d.zero_grad();
    judge(real.x).backward();
    const at::Tensor fake = at::constant_pad_nd(g.forward(noise), {0, 2});
    judge(fake.detach()).neg().backward();
    optimizer_d.step();
    g.zero_grad();
    judge(fake).backward();
    optimizer_g.step();
  }
  at::Tensor judge(const at::Tensor& x) { return d.forward(x).square().sum() / static_cast<double>(samples); }

  Net d, g;
  torch::optim::Adam optimizer_d, optimizer_g;
};

TEST(DdpPlainLoop, TheGanLoopWithTwoWrappers) {
  const auto noise_of = [](int step) { return whole_batch(samples, 100 + step); };
  Gan reference;
  for (int step = 0; step < 3; ++step) reference.step(whole_batch(samples, step), noise_of(step).x);
  for (const int ranks : {1, 2, 3}) {
    for (const bool tree : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        Gan gan;
        const auto wrap = [&](Net& net) -> std::unique_ptr<GradientSynchronizer> {
          if (tree) return std::make_unique<TreeReduction>(net, world.group(), TreeReductionOptions{.num_micro_batches = ranks});
          return make_ddp(net, world.group());
        };
        auto d = wrap(gan.d), g = wrap(gan.g);
        for (int step = 0; step < 3; ++step) {
          gan.step(part_of(whole_batch(samples, step), ranks, world.rank()), part_of(noise_of(step), ranks, world.rank()).x);
        }
        EXPECT_LT(largest_difference(weights_of(gan.d), weights_of(reference.d)), 100 * parity);
        EXPECT_LT(largest_difference(weights_of(gan.g), weights_of(reference.g)), 100 * parity);
        if (world.rank() == 0) d.reset();  // in any order
        g.reset();
      });
    }
  }
}

TEST(DdpPlainLoop, AFrozenTeacherAndAStudent) {
  run_ranks(2, [&](World& world) {
    Net teacher, student, reference;
    {
      const at::NoGradGuard no_grad;
      teacher.scale.mul_(2);
    }
    const auto wrapped_teacher = make_ddp(teacher, world.group());
    for (const at::Tensor& parameter : teacher.parameters()) at::Tensor(parameter).requires_grad_(false);
    const auto wrapped_student = make_ddp(student, world.group());
    const auto distil = [&](Net& net, const at::Tensor& x) { loss_of(net.forward(x), teacher.forward(x), samples).backward(); };
    for (int step = 0; step < 2; ++step) {
      student.zero_grad(), reference.zero_grad();
      distil(student, part_of(whole_batch(samples, step), 2, world.rank()).x);
      distil(reference, whole_batch(samples, step).x);
      EXPECT_LT(largest_difference(gradients_of(student), gradients_of(reference)), parity);
      EXPECT_FALSE(teacher.scale.grad().defined());
    }
  });
}

void set_trained(Net& net, bool first, bool last) {
  for (const at::Tensor& parameter : net.first->parameters()) at::Tensor(parameter).requires_grad_(first);
  for (const at::Tensor& parameter : net.last->parameters()) at::Tensor(parameter).requires_grad_(last);
}

/// Frozen at the start, unfrozen, frozen again.
void train_in_stages(Net& net, torch::optim::Optimizer& optimizer, const std::function<Batch(int64_t)>& mine) {
  const std::vector<std::pair<bool, bool>> stages{{false, true}, {true, true}, {true, false}, {false, true}, {true, true}};
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    set_trained(net, stages[stage].first, stages[stage].second);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      backward(net, mine(static_cast<int64_t>(2 * stage) + step));
      optimizer.step();
    }
  }
}

TEST(DdpPlainLoop, FreezingAndUnfreezingAtAnyTime) {
  for (const auto& make : {make_sgd, make_adam}) {
    Net reference;
    const auto optimizer = make(reference.parameters());
    train_in_stages(reference, *optimizer, [](int64_t step) { return whole_batch(samples, step); });
    for (const int ranks : {1, 2, 3}) {
      for (const bool tree : {false, true}) {
        run_ranks(ranks, [&](World& world) {
          Net net;
          set_trained(net, false, true);  // when it is wrapped
          std::unique_ptr<GradientSynchronizer> wrapped = make_ddp(net, world.group());
          if (tree) {
            wrapped.reset();
            wrapped = std::make_unique<TreeReduction>(net, world.group(), TreeReductionOptions{.num_micro_batches = ranks});
          }
          const auto optimizer = make(net.parameters());
          train_in_stages(net, *optimizer, [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); });
          EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << ranks << " ranks";
          for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);  // and destroyed
        });
      }
    }
  }
}

TEST(DdpPlainLoop, ARankWhosePassBringsNothingIsNamedAsACause) {
  std::latch over(1);
  const auto train = [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = true});
    if (world.rank() == 1) return over.wait();
    try {
      backward(net, whole_batch(samples));
    } catch (...) {
      over.count_down();
      throw;
    }
    over.count_down();
  };
  try {
    run_ranks(2, train, {.timeout = std::chrono::seconds(1)});
    ADD_FAILURE() << "rank 0 waited for nobody";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a rank whose backward pass brings no gradient at all to the wrapped module"));
  }
}

TEST(DdpPlainLoop, RanksThatTrainOtherParametersAreToldApartByTheCheck) {
  run_ranks(2,
            [&](World& world) {
              Net net;
              DistributedDataParallel ddp(net, world.group());
              backward(net, whole_batch(samples));
              net.zero_grad();
              if (world.rank() == 1) net.scale.requires_grad_(false);
              try {
                backward(net, whole_batch(samples));
                ADD_FAILURE() << "nothing was refused";
              } catch (const CommError& error) {
                EXPECT_THAT(error.what(), HasSubstr("(ddp.bucket)"));
                EXPECT_THAT(error.what(), HasSubstr("(ddp.bucket, 6 of 7 parameters trained)"));
              }
            },
            {.decorators = {comm::checking()}});
}

TEST(DdpPlainLoop, OfTwoWrappersTheNewerSynchronizes) {
  run_ranks(2, [&](World& world) {
    Net net;
    const auto expect_one_sum = [&](const char* when) {
      net.zero_grad();
      backward(net, part_of(whole_batch(samples), 2, world.rank()));
      EXPECT_LT(largest_difference(gradients_of(net), one_process(1)[0]), parity) << when;
    };
    auto older = make_ddp(net, world.group());
    expect_one_sum("one");
    auto newer = make_ddp(net, world.group());
    expect_one_sum("both");
    newer.reset();
    expect_one_sum("the older again");
    newer = make_ddp(net, world.group());
    older.reset();
    expect_one_sum("the newer alone");
    newer = make_ddp(net, world.group());  // made before the one in its place is destroyed
    expect_one_sum("its successor");
  });
}

TEST(DdpPlainLoop, AfterItIsGoneItsGradientsStayAndTrainingGoesOn) {
  run_ranks(2, [&](World& world) {
    Net net;
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05));
    {
      DistributedDataParallel ddp(net, world.group());
      backward(net, part_of(whole_batch(samples), 2, world.rank()));
    }
    EXPECT_LT(largest_difference(gradients_of(net), one_process(1)[0]), parity);
    optimizer.step();
    for (const bool set_to_none : {false, true}) {
      optimizer.zero_grad(set_to_none);
      backward(net, whole_batch(samples, 1));
      EXPECT_LT(largest_difference(gradients_of(net), one_process(2)[1]), parity);
    }
  });
}

TEST(DdpPlainLoop, GradientsThatWaitAreNoNorm) {
  run_ranks(2, [](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    const auto ask = [&] { ddp.refuse_gradients_that_wait("clip_grad_norm"); };
    EXPECT_NO_THROW(ask());
    for (const bool clears : {true, false}) {
      const Attachment local = ddp.no_sync();
      backward(net, mine);
      EXPECT_THAT(refusal(ask), HasSubstr("clip_grad_norm: the gradient of 'scale' waits whole on this rank"));
      if (!clears) break;
      net.zero_grad();
      EXPECT_NO_THROW(ask());
    }
    backward(net, mine);
    EXPECT_NO_THROW(ask());
  });
}

}  // namespace
}  // namespace tessera
