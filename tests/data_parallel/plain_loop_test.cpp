#include <algorithm>
#include <chrono>
#include <functional>
#include <latch>
#include <thread>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/check.h"
#include "tessera/core/events.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/nn/sync_batch_norm.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, unchanged.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

std::unique_ptr<torch::optim::Optimizer> make_sgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::unique_ptr<torch::optim::Optimizer> make_adam(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(1e-2));
}

std::unique_ptr<GradientSynchronizer> make_ddp(torch::nn::Module& module, const comm::Group& group) {
  return std::make_unique<DistributedDataParallel>(module, group, DdpOptions{.sizes = small_buckets});
}

std::vector<at::Tensor> weights_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : module.parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

/// A program that trains with whatever wraps its model: `mine` is this rank's part of a batch.
struct Program {
  std::function<void(Net&, GradientSynchronizer*, torch::optim::Optimizer&, const std::function<Batch(int64_t)>& mine)> train;
  MakeOptimizer make_optimizer = make_sgd;
};

/// Runs it on one process without a wrapper, and on ranks with one; holds the weights and the gradients it leaves against each other.
void expect_parity(const Program& program, std::initializer_list<int> sizes = {1, 2, 3}) {
  Net reference;
  const auto optimizer = program.make_optimizer(reference.parameters());
  program.train(reference, nullptr, *optimizer, [](int64_t step) { return whole_batch(samples, step); });
  for (const int ranks : sizes) {
    std::vector<std::vector<at::Tensor>> weights(ranks);
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto ddp = make_ddp(net, world.group());
      const auto optimizer = program.make_optimizer(net.parameters());
      program.train(net, ddp.get(), *optimizer, [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); });
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), 10 * parity) << ranks << " ranks";  // after steps that differ by rounding
      weights[world.rank()] = weights_of(net);
    });
    for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank << " of " << ranks;
    EXPECT_LT(largest_difference(weights[0], weights_of(reference)), 10 * parity) << ranks << " ranks";
  }
}

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

/// It is of one rank's samples, as far as anybody knows.
TEST(DdpPlainLoop, AGradientFromBeforeTheWrapperIsRefusedUntilItIsCleared) {
  run_ranks(2, [](World& world) {
    Net net;
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    backward(net, mine);
    const DistributedDataParallel ddp(net, world.group());
    for (int pass = 0; pass < 2; ++pass) {  // a loop that goes on after a refusal has cleared nothing
      EXPECT_THAT(refusal([&] { backward(net, mine); }),
                  HasSubstr("has a gradient from before it was wrapped, which has met no other rank's; call zero_grad()"));
    }
    net.zero_grad();
    EXPECT_NO_THROW(backward(net, mine));
  });
  for (const bool to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, reference;
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      backward(net, mine);
      const DistributedDataParallel ddp(net, world.group());
      const at::Tensor loss = loss_of(net.forward(mine.x), mine.y, samples);
      net.zero_grad(to_none);  // behind the forward pass, as some loops have it
      loss.backward();
      backward(reference, whole_batch(samples));
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
    });
  }
}

TEST(DdpPlainLoop, AnEmbeddingThatWritesItsRowsInForwardIsRefused) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).max_norm(1.0)));
    EXPECT_THAT(refusal([&] { const DistributedDataParallel ddp(*net, world.group()); }), HasSubstr("'0' is an embedding with max_norm"));
    EXPECT_NO_THROW(const DistributedDataParallel ddp(*net, comm::Group::self()));
  });
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

/// What was carried over the pass would not be scaled with what it left.
TEST(DdpPlainLoop, AGradientWrittenWithinAnAccumulationIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    backward(net, whole_batch(samples, 0));
    {
      const Attachment local = ddp.no_sync();
      backward(net, whole_batch(samples, 1));
    }
    net.scale.mutable_grad().mul_(0.5);
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples, 2)); }), HasSubstr("the gradient of 'scale' was changed within an accumulation"));
  });
}

TEST(DdpPlainLoop, AnOptimizersStepOnGradientsOfThisRankAloneIsRefused) {
  for (const auto& make : {make_sgd, make_adam}) {
    for (const int ranks : {2, 3}) {
      for (const bool find_unused : {false, true}) {
        run_ranks(ranks, [&](World& world) {
          Net net;
          DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = find_unused});
          const auto optimizer = make(net.parameters());
          const auto local = [&](int64_t step) {
            const Attachment held = ddp.no_sync();
            backward(net, part_of(whole_batch(samples, step), ranks, world.rank()));
          };
          backward(net, whole_batch(samples));
          local(0);
          optimizer->step();
          optimizer->zero_grad();
          local(1);                      // it may be some passes until ranks meet
          for (int i = 0; i < 2; ++i) {  // a loop that goes on after a refusal has mended nothing
            const std::string said = refusal([&] { backward(net, whole_batch(samples)); });
            EXPECT_THAT(said, HasSubstr("the replicas differ: parameter '"));
            EXPECT_THAT(said, HasSubstr("was written after a backward pass under no_sync()"));
          }
        });
      }
    }
    run_ranks(2, [&](World& world) {
      Net net;
      {
        TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
        const auto optimizer = make(net.parameters());
        const Attachment local = tree.no_sync();
        backward(net, whole_batch(samples));
        EXPECT_THAT(refusal([&] { optimizer->step(); }), HasSubstr("TreeReduction: the gradient of"));
      }
      EXPECT_FALSE(net.scale.grad().defined());
    });
  }
}

/// A step at rate 0 (the first of a warmup) parts the moments and leaves the weights: what shows that is the next update, however many passes come before it.
TEST(DdpPlainLoop, MomentsThatHavePartedAreFoundByTheNextUpdate) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const auto optimizer = make_adam(net.parameters());
    const auto rate = [&](double lr) { static_cast<torch::optim::AdamOptions&>(optimizer->param_groups()[0].options()).lr(lr); };
    backward(net, whole_batch(samples));
    rate(0);
    for (int tail = 0; tail < 2; ++tail) {
      {
        const Attachment held = ddp.no_sync();
        backward(net, part_of(whole_batch(samples), 2, world.rank()));
      }
      optimizer->step();
      optimizer->zero_grad();
      for (int64_t pass = 0; pass < 3; ++pass) EXPECT_NO_THROW(backward(net, whole_batch(samples, pass))) << "equal as yet";
    }
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_NO_THROW(backward(net, whole_batch(samples))) << "the rate is 0 as ever";
    rate(0.01);
    optimizer->step();
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("was written after a backward pass under no_sync()"));
  });
}

/// Equal replicas are compared twice, and no more.
TEST(DdpPlainLoop, WritesThatLeftReplicasEqualAreComparedOnceMore) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) {
    return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : std::move(inner);
  };
  const auto comparisons = [&](const World& world) {
    comm::barrier(world.group());
    const auto records = recorder->records();
    if (world.rank() == 0) recorder->clear();
    return std::ranges::count_if(records, [](const auto& record) { return record.op == "all_gather" && record.site == "ddp.start"; });
  };
  run_ranks(2,
            [&](World& world) {
              Net net;
              DistributedDataParallel ddp(net, world.group());
              const auto optimizer = make_sgd(net.parameters());
              const auto step = [&] {
                backward(net, whole_batch(samples));
                optimizer->step();
                optimizer->zero_grad();
                return comparisons(world);
              };
              step();
              EXPECT_EQ(step(), 0);
              {
                const Attachment held = ddp.no_sync();
                backward(net, whole_batch(samples));
              }
              optimizer->step();  // on the same on every rank
              optimizer->zero_grad();
              const std::vector<std::ptrdiff_t> seen{step(), step(), step(), step()};
              if (world.rank() == 0) EXPECT_THAT(seen, ::testing::ElementsAre(1, 1, 0, 0));
            },
            {.decorators = {decorator}});
}

/// What a device holds the host looks at where it waits anyway, once a step, and only in loops that accumulate.
TEST(DdpPlainLoop, OnlyAnAccumulationReadsElementsOfADevice) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const auto optimizer = make_sgd(net.parameters());
    const auto reads_of = [&](int passes) {
      EventStream events;
      const ListenToEvents listening(events);
      for (int pass = 1; pass <= passes; ++pass) {
        const Attachment held = pass < passes ? ddp.no_sync() : Attachment();
        backward(net, whole_batch(samples, pass));
      }
      optimizer->step();
      optimizer->zero_grad();
      return only<HostReadEvent>(events.take()).size();
    };
    reads_of(1);
    EXPECT_EQ(reads_of(1), 0u);
    for (int step = 0; step < 3; ++step) EXPECT_EQ(reads_of(4), test_device().is_cpu() ? 0u : 1u);
    EXPECT_EQ(reads_of(1), 0u);
  });
}

/// Its part of what a normaliser counts each rank would keep for itself.
TEST(DdpPlainLoop, AFrozenParameterThatForwardWritesIsToldByItsCause) {
  for (const bool tree : {false, true}) {
    for (const ReplicaStart start : {ReplicaStart::Check, ReplicaStart::Trust}) {
      run_ranks(2, [&](World& world) {
        Net net;
        const at::Tensor mean = net.register_parameter("mean", at::zeros({5}), /*requires_grad=*/false);
        std::unique_ptr<GradientSynchronizer> wrapped;
        if (tree) {
          wrapped = std::make_unique<TreeReduction>(net, world.group(), TreeReductionOptions{.num_micro_batches = 2, .replicas = start});
        } else {
          wrapped = std::make_unique<DistributedDataParallel>(net, world.group(), DdpOptions{.replicas = start});
        }
        const Batch mine = part_of(whole_batch(samples), 2, world.rank());
        const auto go_on = [&] {
          mean.copy_(mine.x.mean(0));
          backward(net, {mine.x - mean, mine.y});
        };
        if (start == ReplicaStart::Trust) return go_on();
        const std::string said = refusal(go_on);
        EXPECT_THAT(said, HasSubstr("parameter 'mean' of rank 0 of world is another one on rank 1; it takes no gradient: if forward writes it"));
        EXPECT_THAT(said, ::testing::AllOf(HasSubstr("BufferBroadcast::EachStep"), HasSubstr("ReplicaStart::Trust"), HasSubstr("load the same file")));
      });
    }
  }
}

/// Behind passes whose gradients were given up a program may write what it likes, the same on every rank: load the best weights, say.
TEST(DdpPlainLoop, WeightsThatAreLoadedInPlaceOfAnAccumulationAreTrained) {
  const std::vector<std::function<void(const at::Tensor&)>> loads{[](at::Tensor parameter) { parameter.mul_(0.5); },
                                                                  [](const at::Tensor& parameter) { parameter.set_data(parameter.detach() * 0.5); }};
  for (const auto& load : loads) {
    for (const bool set_to_none : {true, false}) {
      expect_parity({.train = [&](Net& net, GradientSynchronizer* ddp, torch::optim::Optimizer& optimizer, const auto& mine) {
        const auto local = [&](int64_t step) {
          const Attachment held = ddp ? ddp->no_sync() : Attachment();
          backward(net, mine(step));
        };
        for (int64_t step = 0; step < 9; step += 3) {
          local(step);
          optimizer.zero_grad(set_to_none);
          {
            const at::NoGradGuard no_grad;
            for (const at::Tensor& parameter : net.parameters()) load(parameter);
          }
          local(step + 1);
          backward(net, mine(step + 2));
          optimizer.step();
          optimizer.zero_grad(set_to_none);
        }
      }});
    }
  }
}

/// Whether to compare is for all ranks to know, though one alone has written: it waits for nobody, and nobody for it.
TEST(DdpPlainLoop, OneRankThatWritesBehindAnAccumulationIsToldOnAll) {
  for (const int ranks : {2, 3}) {
    for (const bool another : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
        {
          const Attachment held = ddp.no_sync();
          backward(net, whole_batch(samples));
        }
        net.zero_grad();
        if (world.rank() == ranks - 1) {
          const at::NoGradGuard no_grad;
          net.scale.mul_(another ? 2 : 1);
        }
        const auto go_on = [&] { backward(net, part_of(whole_batch(samples), ranks, world.rank())); };
        if (!another) return go_on();
        EXPECT_THAT(refusal(go_on), HasSubstr("parameter 'scale' of rank 0 of world is another one on rank " + std::to_string(ranks - 1) + "; on some rank"));
      });
    }
  }
}

/// Ranks are compared when they are wrapped, and once more when the first step is complete.
TEST(DdpPlainLoop, WeightsThatOneRankLoadsBehindTheWrappingAreRefused) {
  for (const bool tree : {false, true}) {
    for (const ReplicaStart start : {ReplicaStart::Check, ReplicaStart::Broadcast, ReplicaStart::Trust}) {
      std::vector<std::shared_ptr<comm::Recorder>> recorders{std::make_shared<comm::Recorder>(), std::make_shared<comm::Recorder>()};
      const auto decorator = [&](auto inner, const comm::GroupInfo& group) { return comm::make_record_engine(recorders[group.rank], group, inner); };
      const auto comparisons = [&](const World& world) {
        const auto records = recorders[world.rank()]->records();
        return std::ranges::count_if(records, [](const auto& record) { return record.op == "all_gather" && record.site.ends_with(".start"); });
      };
      run_ranks(2,
                [&](World& world) {
                  const auto wrap = [&](Net& net) -> std::unique_ptr<GradientSynchronizer> {
                    if (tree) return std::make_unique<TreeReduction>(net, world.group(), TreeReductionOptions{.num_micro_batches = 2, .replicas = start});
                    return std::make_unique<DistributedDataParallel>(net, world.group(), DdpOptions{.replicas = start});
                  };
                  const Batch mine = part_of(whole_batch(samples), 2, world.rank());
                  Net net, other;
                  const auto wrapped = wrap(net);
                  fill_parameters(net, 2);  // the same file on every rank
                  recorders[world.rank()]->clear();
                  backward(net, mine);
                  EXPECT_EQ(comparisons(world), start == ReplicaStart::Trust ? 0 : 1);
                  recorders[world.rank()]->clear();
                  for (int step = 0; step < 3; ++step) {
                    if (!tree) {
                      const Attachment held = wrapped->no_sync();
                      backward(net, mine);
                    }
                    backward(net, mine);
                    sgd(net, 0.05);
                    net.zero_grad();
                  }
                  EXPECT_EQ(comparisons(world), 0);
                  const auto wrapped_other = wrap(other);
                  if (world.rank() == 0) fill_parameters(other, 2);
                  if (start == ReplicaStart::Trust) return backward(other, mine);
                  for (int i = 0; i < 2; ++i) {
                    EXPECT_THAT(refusal([&] { backward(other, mine); }),
                                HasSubstr("they were equal when the model was wrapped: load the same file on every rank"));
                  }
                },
                {.decorators = {decorator}});
    }
  }
}

/// What a newer wrapper has taken over is its own to compare: rows, under fully_shard.
TEST(DdpPlainLoop, ComparesWhatIsStillItsOwn) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const auto is_scale = [](const nn::NamedParameter& parameter) { return parameter.name == "scale"; };
    const DistributedDataParallel newer(net, world.group(), {.only = is_scale, .replicas = ReplicaStart::Trust});
    {
      const at::NoGradGuard no_grad;
      net.scale.fill_(world.rank());
    }
    EXPECT_NO_THROW(backward(net, whole_batch(samples)));
  });
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

TEST(DdpPlainLoop, BuffersAreRankZerosWhenAStepIsComplete) {
  struct Normed : torch::nn::Module {
    Normed() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      net = register_module("net", std::make_shared<Net>());
    }
    at::Tensor forward(const at::Tensor& x) { return net->forward(norm(x)); }
    torch::nn::BatchNorm1d norm{nullptr};
    std::shared_ptr<Net> net;
  };
  std::vector<at::Tensor> means(3);
  run_ranks(3, [&](World& world) {
    Normed model;
    DistributedDataParallel ddp(model, world.group());
    const auto loss = [&](int64_t step) {
      const Batch mine = part_of(whole_batch(samples, step), 3, world.rank());
      return loss_of(model.forward(mine.x), mine.y, samples);
    };
    const at::Tensor first = loss(0), second = loss(1);  // the second graph lives while the first step ends
    first.backward();
    second.backward();
    means[world.rank()] = model.norm->running_mean.clone();
  });
  EXPECT_GT(means[0].abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(means[0], means[1]) && at::equal(means[0], means[2]));
}

/// A mask that grows with the longest sequence that a rank has seen.
struct Masked : torch::nn::Module {
  Masked() {
    net = register_module("net", std::make_shared<Net>());
    register_buffer("table", at::ones({4}));
    register_buffer("mask", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return net->forward(x) * named_buffers()["mask"].sum(); }
  void grow(int64_t size) { named_buffers()["mask"].set_data(at::ones({size})); }
  std::shared_ptr<Net> net;
};

TEST(DdpPlainLoop, BuffersOfAnotherSizeOnARankAreRefusedByName) {
  for (const int ranks : {2, 3}) {
    for (const bool find_unused : {false, true}) {
      for (const bool tree : {false, true}) {
        for (const bool by_calls : {false, true}) {
          run_ranks(ranks, [&](World& world) {
            Masked model;
            std::unique_ptr<GradientSynchronizer> wrapped =
                std::make_unique<DistributedDataParallel>(model, world.group(), DdpOptions{.find_unused_parameters = find_unused});
            const TreeReductionOptions options{.num_micro_batches = ranks, .find_unused_parameters = find_unused};
            if (tree) wrapped = std::make_unique<TreeReduction>(model, world.group(), options);
            const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
            const auto step = [&] {
              if (!by_calls) return loss_of(model.forward(mine.x), mine.y, samples).backward();
              wrapped->begin_step();
              wrapped->before_micro_batch({.index = world.rank(), .last = true});
              loss_of(model.forward(mine.x), mine.y, samples).backward();
              wrapped->after_micro_batch({.index = world.rank(), .last = true});
              wrapped->finish();
            };
            for (const int64_t size : {2, 5}) {  // alike on all ranks
              model.grow(size);
              EXPECT_NO_THROW(step());
            }
            if (world.rank() == ranks - 1) model.grow(6);
            const std::string said = refusal(step);
            EXPECT_THAT(said, HasSubstr(std::string("'mask', here [") + (world.rank() == ranks - 1 ? '6' : '5') + "], Float, has another shape"));
            EXPECT_THAT(said, HasSubstr("BufferBroadcast::AtStart or Never"));
          });
        }
      }
    }
  }
}

TEST(DdpPlainLoop, ABufferThatOneRankHasNotIsRefused) {
  run_ranks(2, [&](World& world) {
    Masked model;
    DistributedDataParallel ddp(model, world.group());
    if (world.rank() == 1) model.register_buffer("hidden", at::ones({3}));
    EXPECT_THAT(refusal([&] { model.forward(whole_batch(samples).x).sum().backward(); }),
                HasSubstr(std::string("are ") + (world.rank() == 1 ? '3' : '2') + " on this rank, and not as many on every rank of world"));
  });
}

/// In evaluation a norm's gradient is of its statistics, which a graph holds; those that become rank 0's meanwhile are others to it.
TEST(DdpPlainLoop, StatisticsThatAnEvaluationsGraphHoldsDoNotChangeUnderIt) {
  struct Normed : torch::nn::Module {
    Normed() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      net = register_module("net", std::make_shared<Net>());
    }
    at::Tensor forward(const at::Tensor& x) { return net->forward(norm(x)); }
    torch::nn::BatchNorm1d norm{nullptr};
    std::shared_ptr<Net> net;
  };
  run_ranks(2, [&](World& world) {
    Normed model;
    DistributedDataParallel ddp(model, world.group());
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    const at::Tensor training = loss_of(model.forward(mine.x), mine.y, samples);  // from here on statistics are each rank's own
    model.eval();
    const at::Tensor evaluation = loss_of(model.forward(mine.x), mine.y, samples);
    const int64_t before = model.norm->running_mean._version();
    training.backward();
    EXPECT_EQ(model.norm->running_mean._version(), before + world.rank());
    if (world.rank() == 1) {
      const Attachment held = ddp.no_sync();
      EXPECT_THROW(evaluation.backward(), c10::Error);
    }
  });
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

TEST(TreePlainLoop, ClearingWithinARunStartsItAnew) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, reference;
      TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
      const auto run = [&](int64_t first) {
        for (int64_t i = 0; i < 2; ++i) {
          const Attachment local = i < 1 ? tree.no_sync() : Attachment();
          backward(net, part_of(whole_batch(samples, first + i), 2, world.rank()));
        }
      };
      run(0);
      {
        const Attachment local = tree.no_sync();
        backward(net, whole_batch(samples, 7));
      }
      net.zero_grad(set_to_none);
      run(2);
      for (const int step : {2, 3}) backward(reference, whole_batch(samples, step));
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
      {
        const Attachment local = tree.no_sync();
        backward(net, whole_batch(samples, 7));
      }
      net.scale.mutable_grad() = at::Tensor();
      EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("the gradient of 'scale' was cleared within a run of micro-batches"));
    });
  }
}

TEST(TreePlainLoop, AParameterThatGetsAnotherFormWithinARunIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    {
      const Attachment local = tree.no_sync();
      backward(net, whole_batch(samples));
    }
    net.scale.set_data(at::ones({70}));
    EXPECT_THAT(refusal([&] { net.scale.sum().backward(); }), HasSubstr("TreeReduction: 'scale' was given values of shape [70], Float on cpu"));
  });
}

TEST(TreePlainLoop, HasTheBitsOfTheExplicitCalls) {
  constexpr int64_t micro_batches = 6;
  const auto run = [&](bool plain, int ranks) {
    std::vector<at::Tensor> gradients;
    run_ranks(ranks, [&](World& world) {
      Net net;
      TreeReduction tree(net, world.group(), {.num_micro_batches = micro_batches});
      const int64_t mine = micro_batches / ranks, first = world.rank() * mine;
      if (!plain) tree.begin_step();
      for (int64_t i = 0; i < mine; ++i) {
        const MicroBatchPosition position{.index = first + i, .last = i + 1 == mine};
        const Attachment local = plain && !position.last ? tree.no_sync() : Attachment();
        if (!plain) tree.before_micro_batch(position);
        backward(net, whole_batch(samples, position.index));
        if (!plain) tree.after_micro_batch(position);
      }
      if (!plain) tree.finish();
      if (world.rank() == 0) gradients = gradients_of(net);
      if (!plain) return;
      EXPECT_THAT(refusal([&] {
                    for (int64_t i = 0; i < mine + 1; ++i) {
                      const Attachment local = i < mine ? tree.no_sync() : Attachment();
                      backward(net, whole_batch(samples));
                    }
                  }),
                  HasSubstr("micro-batches (num_micro_batches)"));
    });
    return gradients;
  };
  const auto expected = run(false, 1);
  for (const int ranks : {1, 2, 3}) EXPECT_TRUE(same_bits(run(true, ranks), expected)) << ranks;
}

TEST(TreePlainLoop, AGradientFromBeforeTheWrapperIsRefusedUntilItIsCleared) {
  run_ranks(2, [](World& world) {
    Net net;
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    backward(net, mine);
    const TreeReduction tree(net, world.group(), {.num_micro_batches = 2});
    for (int pass = 0; pass < 2; ++pass) EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("has a gradient from before it was wrapped"));
  });
}

TEST(TreePlainLoop, AnEmbeddingThatWritesItsRowsInForwardIsRefused) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).max_norm(1.0)));
    EXPECT_THAT(refusal([&] { const TreeReduction tree(*net, world.group(), {.num_micro_batches = 2}); }), HasSubstr("'0' is an embedding with max_norm"));
  });
}

TEST(TreePlainLoop, WhatIsUnfrozenWithinARunIsRefused) {
  run_ranks(2, [](World& world) {
    Net net;
    net.scale.set_requires_grad(false);
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    {
      const Attachment local = tree.no_sync();
      backward(net, mine);
    }
    net.scale.set_requires_grad(true);
    EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("'scale' was unfrozen within a step"));
  });
}

/// Gradients of torch::autograd::grad that are put on parameters meet no other rank's.
TEST(DdpPlainLoop, AGradientOfThisRankAloneIsNotAddedTo) {
  for (const int ranks : {2, 3}) {
    for (const bool find_unused : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .find_unused_parameters = find_unused});
        const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
        const auto put = [&](bool summed) {
          const auto gradients = torch::autograd::grad({loss_of(net.forward(mine.x), mine.y, samples)}, net.parameters());
          for (size_t i = 0; i < gradients.size(); ++i) {
            net.parameters()[i].mutable_grad() = gradients[i].clone();
            if (summed) comm::all_reduce(world.group(), net.parameters()[i].mutable_grad());
          }
        };
        put(/*summed=*/false);
        for (int pass = 0; pass < 2; ++pass) {  // a loop that goes on after a refusal has cleared nothing
          EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("the program has put a gradient on 'scale'"));
        }
        net.zero_grad();
        backward(net, mine);
        std::vector<at::Tensor> twice;
        for (const at::Tensor& gradient : gradients_of(net)) twice.push_back(gradient * 2);
        net.zero_grad(/*set_to_none=*/false);
        backward(net, mine);
        backward(net, mine);
        EXPECT_LT(largest_difference(gradients_of(net), twice), parity);
        put(/*summed=*/true);
        backward(net, mine);
        EXPECT_LT(largest_difference(gradients_of(net), twice), parity);
        if (world.rank() == 0) net.parameters()[0].mutable_grad().mul_(3);  // by what this rank alone has seen
        EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("the program has put a gradient on 'scale'"));
      });
    }
  }
}

/// A sum that the wrapper left for the next pass is no program's: it is compared with nobody's, of which one collective a step would tell.
TEST(DdpPlainLoop, SumsOfAnEarlierPassAreNotCompared) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) {
    return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : std::move(inner);
  };
  run_ranks(2,
            [&](World& world) {
              Net net;
              const DistributedDataParallel ddp(net, world.group());
              for (int pass = 0; pass < 3; ++pass) backward(net, part_of(whole_batch(samples), 2, world.rank()));
            },
            {.decorators = {decorator}});
  EXPECT_TRUE(std::ranges::none_of(recorder->records(), [](const auto& record) { return record.site == "ddp.given"; }));
}

/// As a layer does that makes its weights of the first batch it sees (ActNorm), or a program that loads them late.
TEST(DdpPlainLoop, WritesOfOneRankAreRefusedAtItsNextStep) {
  enum class Place : char { BehindTheStep, BeforeTheForward, BehindTheForward };
  for (const Place place : {Place::BehindTheStep, Place::BeforeTheForward, Place::BehindTheForward}) {
    for (const bool find_unused : {false, true}) {
      for (const bool exchanges : {false, true}) {
        if (place == Place::BehindTheForward && !exchanges) continue;  // autograd refuses it
        run_ranks(3, [&](World& world) {
          Net net;
          DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = find_unused});
          const auto optimizer = make_sgd(net.parameters());
          const Batch mine = part_of(whole_batch(samples), 3, world.rank());
          const auto write = [&] {
            const at::NoGradGuard no_grad;
            const at::Tensor values = net.parameters()[0].detach() + 1;
            if (world.rank() != 1) return;
            if (exchanges) net.parameters()[0].set_data(values);
            if (!exchanges) at::Tensor(net.parameters()[0]).copy_(values);
          };
          const auto step = [&](bool writes) {
            optimizer->zero_grad();
            if (writes && place == Place::BeforeTheForward) write();
            const at::Tensor loss = loss_of(net.forward(mine.x), mine.y, samples);
            if (writes && place == Place::BehindTheForward) write();
            loss.backward();
            optimizer->step();
            if (writes && place == Place::BehindTheStep) write();
          };
          step(false);
          step(false);
          const bool refused_later = place == Place::BehindTheStep;
          if (refused_later) step(true);
          EXPECT_THAT(refusal([&] { step(!refused_later); }), HasSubstr("some ranks wrote parameters more often than others since the last step"));
        });
      }
    }
  }
}

/// One rank's evaluation by averaged weights, which it puts back.
TEST(DdpPlainLoop, WritesOfOneRankThatLeaveItsWeightsAsTheyWereAreFine) {
  run_ranks(2, [](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group());
    const auto optimizer = make_sgd(net.parameters());
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      EXPECT_NO_THROW(backward(net, part_of(whole_batch(samples), 2, world.rank())));
      optimizer->step();
      if (world.rank() != 0) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor kept = net.parameters()[0].clone();
      at::Tensor(net.parameters()[0]).zero_();
      at::Tensor(net.parameters()[0]).copy_(kept);
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
