#include <algorithm>
#include <functional>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adam.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/events.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tests/data_parallel/plain_loop.h"

/// What a program writes, or assigns, on one rank alone: replicas that would part by it are refused by name.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

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

/// Until they are equal: by what a program that catches the refusal does then, ranks may come to have written equally often.
TEST(DdpPlainLoop, ALoopThatGoesOnWithReplicasThatPartedIsRefusedAgain) {
  for (const bool find_unused : {false, true}) {
    run_ranks(2, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = find_unused});
      const auto optimizer = make_sgd(net.parameters());
      const auto write_on = [&](int rank) {
        const at::NoGradGuard no_grad;
        if (world.rank() == rank) net.scale.add_(1 + rank);
      };
      const auto step = [&] {
        optimizer->zero_grad();
        backward(net, part_of(whole_batch(samples), 2, world.rank()));
      };
      step();
      write_on(1);
      for (int i = 0; i < 3; ++i) {
        EXPECT_THAT(refusal(step), HasSubstr("some ranks wrote parameters more often than others since the last step")) << i;
        optimizer->step();
        if (i == 0) write_on(0);
      }
      for (const at::Tensor& parameter : net.parameters()) comm::broadcast(world.group(), parameter.detach(), 0);
      for (int i = 0; i < 3; ++i) {
        EXPECT_NO_THROW(step());
        optimizer->step();
      }
    });
  }
}

/// Whose error comes first, they are told of that.
TEST(DdpPlainLoop, WritesOfOneRankInAStepThatIsRefusedOtherwiseAreRefusedInTheNext) {
  enum class Fault : char { PassThrows, GradientMissing, GradientGiven };
  for (const Fault fault : {Fault::PassThrows, Fault::GradientMissing, Fault::GradientGiven}) {
    for (const int ranks : {2, 3}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = fault == Fault::PassThrows});
        const auto step = [&](bool fails) {
          net.zero_grad();
          const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
          const bool here = fails && world.rank() == 1;
          const at::NoGradGuard no_grad;
          if (here) net.scale.add_(1);
          if (fails && fault == Fault::GradientGiven) net.scale.mutable_grad() = at::full_like(net.scale, world.rank() + 1);
          const at::AutoGradMode recorded(true);
          at::Tensor h = at::tanh(net.first(mine.x));
          if (here && fault == Fault::PassThrows) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
          h = at::tanh(net.middle(h));
          if (!here || fault != Fault::GradientMissing) h = h * net.scale;
          loss_of(net.last(h), mine.y, samples).backward();
        };
        for (int i = 0; i < 2; ++i) step(false);
        EXPECT_ANY_THROW(step(true));
        for (int i = 0; i < 2; ++i) EXPECT_THAT(refusal([&] { step(false); }), HasSubstr("some ranks wrote parameters more often than others"));
      });
    }
  }
}

/// What a newer wrapper has is not compared, so that no such comparison could ever find anything.
TEST(DdpPlainLoop, WritesToWhatANewerWrapperHasAreNotCounted) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) {
    return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : std::move(inner);
  };
  run_ranks(2,
            [&](World& world) {
              Net net;
              DistributedDataParallel ddp(net, world.group());
              const auto is_scale = [](const nn::NamedParameter& parameter) { return parameter.name == "scale"; };
              const DistributedDataParallel newer(net, world.group(), {.only = is_scale, .replicas = ReplicaStart::Trust});
              for (int step = 0; step < 4; ++step) {
                backward(net, whole_batch(samples));
                sgd(net, 0.05);
                comm::barrier(world.group());
                if (step == 0 && world.rank() == 0) recorder->clear();
                const at::NoGradGuard no_grad;
                if (world.rank() == 1) net.scale.mul_(1);
              }
            },
            {.decorators = {decorator}});
  EXPECT_TRUE(std::ranges::none_of(recorder->records(), [](const auto& record) { return record.site == "ddp.start"; }));
}

/// Where each rank updates its share of the parameters and broadcasts it, every step costs a comparison.
TEST(DdpPlainLoop, UnlikeWritesInEachStepOfASoundProgramAreToldOnce) {
  const auto lines_of = [](const std::vector<bool>& unlike) {
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group());
      backward(net, whole_batch(samples));
      for (const bool dealt : unlike) {
        {
          const at::NoGradGuard no_grad;
          int owner = 0;
          for (const at::Tensor& parameter : net.parameters()) {
            owner = 1 - owner;
            if (!dealt || world.rank() == owner) at::Tensor(parameter).sub_(parameter.grad(), 0.05);
            if (dealt) comm::broadcast(world.group(), parameter.detach(), owner);
          }
        }
        net.zero_grad();
        backward(net, whole_batch(samples));
      }
    });
    const std::string said = ::testing::internal::GetCapturedStderr();
    int lines = 0;
    for (size_t at = said.find("ReplicaStart::Trust"); at != std::string::npos; at = said.find("ReplicaStart::Trust", at + 1)) ++lines;
    return lines;
  };
  std::vector<bool> some(9, true);
  some.push_back(false);
  some.insert(some.end(), 9, true);
  EXPECT_EQ(lines_of(some), 0);
  EXPECT_EQ(lines_of(std::vector<bool>(24, true)), 1);
}

}  // namespace
}  // namespace tessera
