// Two wrappers that share a module by `only`: whichever techniques meet, over the same ranks or not, a plain loop trains as one process does.

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/models/mixture.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/collect.h"
#include "tests/train/wrapped.h"

namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;

/// Net, and a buffer that each forward changes.
struct SharedNet : Net {
  SharedNet() { seen = register_buffer("seen", at::zeros({2})); }
  at::Tensor forward(const at::Tensor& x) {
    seen.add_(1);
    return Net::forward(x);
  }
  /// Leaves out the bias of one of two layers.
  at::Tensor without_bias(const at::Tensor& x, bool of_last) {
    const at::Tensor h = at::tanh(first(x));
    const at::Tensor inner = at::tanh((of_last ? middle(h) : at::linear(h, middle->weight)) * scale);
    return of_last ? at::linear(inner, last->weight) : last(inner);
  }
  at::Tensor seen;
};

bool in_first_set(const nn::NamedParameter& parameter) { return parameter.name.starts_with("middle") || parameter.name == "last.bias"; }
bool in_second_set(const nn::NamedParameter& parameter) { return !in_first_set(parameter); }

/// What a program is written against, of one process or of many.
struct TwoSets {
  SharedNet& net;
  std::function<Batch(int64_t step)> mine;
  std::function<void()> zero_first, zero_second, step_first, step_second;
  std::function<Attachment()> hold = [] { return Attachment(); };

  at::Tensor loss(int64_t step) const {
    const Batch batch = mine(step);
    return loss_of(net.forward(batch.x), batch.y, samples);
  }
  void zero() const {
    zero_first();
    zero_second();
  }
  void step() const {
    step_first();
    step_second();
  }
};

std::unique_ptr<torch::optim::Optimizer> sgd_of_set(const std::vector<at::Tensor>& parts) {
  return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::vector<at::Tensor> of_set(SharedNet& net, const nn::ParameterFilter& only) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : nn::unique_parameters(net, only)) tensors.push_back(parameter.tensor);
  return tensors;
}

using Training = std::function<void(const TwoSets&)>;

std::vector<at::Tensor> on_one_process(const Training& train) {
  SharedNet net;
  const auto first = sgd_of_set(of_set(net, in_first_set)), second = sgd_of_set(of_set(net, in_second_set));
  train({.net = net,
         .mine = [](int64_t step) { return whole_batch(samples, step); },
         .zero_first = [&] { first->zero_grad(); },
         .zero_second = [&] { second->zero_grad(); },
         .step_first = [&] { first->step(); },
         .step_second = [&] { second->step(); }});
  return values_of(net);
}

struct Pair {
  std::string first, second;
  int ranks = 2;
  bool halves = false;  ///< the second over two copies
};

/// Techniques beside each other, in either order somewhere; numbers of ranks take turns.
const std::vector<Pair> pairs{{"zero1", "zero1", 4}, {"zero1", "zero2", 3}, {"ddp", "zero2", 2}, {"zero1", "ddp", 3},      {"fsdp", "ddp", 2},
                              {"zero2", "fsdp", 3},  {"fsdp", "fsdp", 2},   {"ddp", "ddp", 2},   {"ddp", "fsdp", 4, true}, {"zero2", "zero1", 4, true}};

void expect_one_processs(const Training& train) {
  const auto expected = on_one_process(train);
  for (const Pair& pair : pairs) {
    SCOPED_TRACE(pair.first + " beside " + pair.second + " on " + std::to_string(pair.ranks) + (pair.halves ? " in halves" : ""));
    std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(pair.ranks));
    run_ranks(pair.ranks, [&](World& world) {
      SharedNet net;
      const auto one = wrap_by(pair.first, net, {.shard = world.group()}, {.only = in_first_set});
      const auto two = wrap_by(pair.second, net, pair.halves ? halves_of(pair.second, world) : ShardGroups{.shard = world.group()}, {.only = in_second_set});
      auto first = zero_optimizer(*one, sgd_of_set), second = zero_optimizer(*two, sgd_of_set);
      train({.net = net,
             .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), world.size(), world.rank()); },
             .zero_first = [&] { first.zero_grad(); },
             .zero_second = [&] { second.zero_grad(); },
             .step_first = [&] { first.step(); },
             .step_second = [&] { second.step(); },
             .hold =
                 [&] {
                   Attachment held;
                   held.add(one->no_sync());
                   held.add(two->no_sync());
                   return held;
                 }});
      unshard_all({one.get(), two.get()});
      values[static_cast<size_t>(world.rank())] = values_of(net);
    });
    for (const auto& of_rank : values) EXPECT_TRUE(same_bits(of_rank, values.front()));
    EXPECT_LT(largest_difference(values.front(), expected), 10 * parity);
  }
}

TEST(DisjointWrappers, TrainAsOneProcess) {
  expect_one_processs([](const TwoSets& sets) {
    for (int step = 0; step < 2; ++step) {
      sets.zero();
      sets.loss(step).backward();
      sets.step();
    }
  });
}

TEST(DisjointWrappers, AccumulateWithNoSyncAndWithout) {
  expect_one_processs([](const TwoSets& sets) {
    for (int step = 0; step < 2; ++step) {
      sets.zero();
      {
        const Attachment held = sets.hold();
        sets.loss(2 * step).backward();
      }
      sets.loss(2 * step + 1).backward();
      sets.loss(2 * step).backward();
      sets.step();
    }
  });
}

/// As actors and critics, or generators and discriminators, are trained: a pass brings gradients to both, and one of them steps.
TEST(DisjointWrappers, StepInTurns) {
  expect_one_processs([](const TwoSets& sets) {
    for (int step = 0; step < 2; ++step) {
      sets.zero_first();
      sets.loss(step).backward();
      sets.step_first();
      sets.zero_second();
      sets.loss(step).backward();
      sets.step_second();
    }
  });
}

TEST(DisjointWrappers, OneSetMayBeFrozenForAWhile) {
  expect_one_processs([](const TwoSets& sets) {
    for (int step = 0; step < 5; ++step) {
      const auto frozen = of_set(sets.net, step < 3 ? in_first_set : in_second_set);
      for (const at::Tensor& parameter : frozen) at::Tensor(parameter).requires_grad_(step % 4 == 0);
      sets.zero();
      sets.loss(step).backward();
      sets.step();
      for (const at::Tensor& parameter : frozen) at::Tensor(parameter).requires_grad_(true);
    }
  });
}

/// An optimizer over all that any wrapper of the model updates brings the parts of all of them together, however it was made.
TEST(DisjointWrappers, OneOptimizerMayUpdateBoth) {
  const auto train = [](const TwoSets& sets) {
    for (int step = 0; step < 2; ++step) {
      sets.zero();
      sets.loss(step).backward();
      sets.step();
    }
  };
  const auto expected = on_one_process(train);
  const auto joined = [](const std::vector<nn::NamedParameter>& parts, const GradientSynchronizer& others) {
    std::vector<at::Tensor> tensors;
    for (const auto& part : parts) tensors.push_back(part.tensor);
    for (const auto& part : others.updated()) tensors.push_back(part.tensor);
    return tensors;
  };
  for (const Pair& pair : pairs) {
    for (const bool by_model : {false, true}) {
      SCOPED_TRACE(pair.first + " beside " + pair.second + " on " + std::to_string(pair.ranks) + (by_model ? " by the model" : ""));
      run_ranks(pair.ranks, [&](World& world) {
        SharedNet net;
        const auto one = wrap_by(pair.first, net, {.shard = world.group()}, {.only = in_first_set});
        const auto two = wrap_by(pair.second, net, pair.halves ? halves_of(pair.second, world) : ShardGroups{.shard = world.group()}, {.only = in_second_set});
        auto optimizer = by_model ? zero_optimizer(net, sgd_of_set)
                                  : zero_optimizer(*one, [&](const std::vector<nn::NamedParameter>& parts) { return sgd_of_set(joined(parts, *two)); });
        train({.net = net,
               .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), world.size(), world.rank()); },
               .zero_first = [&] { optimizer.zero_grad(); },
               .zero_second = [] {},
               .step_first = [&] { optimizer.step(); },
               .step_second = [] {}});
        unshard_all({one.get(), two.get()});
        EXPECT_LT(largest_difference(values_of(net), expected), 10 * parity);
      });
    }
  }
}

/// Gradients come in another order on each rank, and so do the wrappers' turns, unless somebody sees to it.
TEST(DisjointWrappers, MeetInOneOrderWhateverEachRankUsesFirst) {
  for (const Pair& pair : pairs) {
    SCOPED_TRACE(pair.first + " beside " + pair.second + " on " + std::to_string(pair.ranks));
    // Two that gather need one order in which a pass comes to them; their gradients may still be complete in another.
    const bool both_gather = pair.first == "fsdp" && pair.second == "fsdp";
    const auto loss = [&](SharedNet& net, const Batch& batch, int rank) {
      return loss_of(rank % 2 == 0 ? net.forward(batch.x) : net.without_bias(batch.x, /*of_last=*/!both_gather), batch.y, samples);
    };
    SharedNet whole;
    const auto optimizer = sgd_of_set(whole.parameters());
    for (int step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      for (int rank = 0; rank < pair.ranks; ++rank) loss(whole, part_of(whole_batch(samples, step), pair.ranks, rank), rank).backward();
      optimizer->step();
    }
    run_ranks(pair.ranks, [&](World& world) {
      SharedNet net;
      const ShardGroups groups{.shard = world.group()};
      const auto one = wrap_by(pair.first, net, groups, {.only = in_first_set, .unused = true});
      const auto two = wrap_by(pair.second, net, groups, {.only = in_second_set, .unused = true});
      auto both = zero_optimizer(net, sgd_of_set);
      for (int step = 0; step < 2; ++step) {
        both.zero_grad();
        loss(net, part_of(whole_batch(samples, step), world.size(), world.rank()), world.rank()).backward();
        both.step();
      }
      unshard_all({one.get(), two.get()});
      EXPECT_LT(largest_difference(values_of(net), values_of(whole)), 10 * parity);
    });
  }
}

/// Neither wrapper meets the other ranks before its first step is complete, so nothing depends on which was made first.
TEST(DisjointWrappers, ZeroMayBeMadeInAnotherOrderOnEachRank) {
  const auto train = [](const TwoSets& sets) {
    for (int step = 0; step < 2; ++step) {
      sets.zero();
      sets.loss(step).backward();
      sets.step();
    }
  };
  const auto expected = on_one_process(train);
  run_ranks(3, [&](World& world) {
    SharedNet net;
    std::unique_ptr<GradientSynchronizer> one, two;
    for (const bool first : {world.rank() % 2 == 0, world.rank() % 2 != 0}) {
      auto& made = first ? one : two;
      made = wrap_by(first ? "zero1" : "zero2", net, {.shard = world.group()}, {.only = first ? in_first_set : in_second_set});
    }
    auto optimizer = zero_optimizer(net, sgd_of_set);
    train({.net = net,
           .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), world.size(), world.rank()); },
           .zero_first = [&] { optimizer.zero_grad(); },
           .zero_second = [] {},
           .step_first = [&] { optimizer.step(); },
           .step_second = [] {}});
    EXPECT_LT(largest_difference(values_of(net), expected), 10 * parity);
  });
}

/// Experts are dealt over two of four ranks, so fewer ranks hold each of them than hold the router.
TEST(DisjointWrappers, ExpertsAndTheRestAreTwoSets) {
  constexpr double max_norm = 0.01;
  const ModelConfig config{.family = "mixtral", .dim = 12, .layers = 1, .heads = 2, .ffn_dim = 7, .experts = 6, .experts_per_token = 2};
  const auto make = [&] {
    auto mixture = on_meta([&] { return MixtureFeedForward(config); });
    nn::assign_paths(*mixture);
    return mixture;
  };
  const auto draw = [](MixtureFeedForward& mixture) {
    materialize(*mixture, 5);
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : mixture->parameters()) parameter.mul_(20);
  };
  const auto loss = [](MixtureFeedForward& mixture, int ranks, int rank) {
    const auto [begin, size] = chunk(29, ranks, rank);
    return mixture(random_tensor({1, 29, 12}, "tokens").narrow(1, begin, size)).square().sum() * 1e-3;
  };
  MixtureFeedForward whole = make();
  draw(whole);
  const auto reference = sgd_of_set(whole->parameters());
  std::vector<double> norms;
  for (int step = 0; step < 3; ++step) {
    reference->zero_grad();
    loss(whole, 1, 0).backward();
    norms.push_back(clip_grad_norm(whole, max_norm).item<double>());
    EXPECT_GT(norms.back(), 1.2 * max_norm) << "nothing is clipped";
    reference->step();
  }
  for (const auto& [technique, average] : std::vector<std::pair<std::string, bool>>{
           {"ddp", false}, {"zero1", false}, {"zero2", false}, {"fsdp", false}, {"ddp", true}, {"zero2", true}, {"fsdp", true}}) {
    SCOPED_TRACE(technique + (average ? " of means" : ""));
    SliceCollector trained;
    run_ranks(4, [&, &technique = technique, &average = average](World& world) {
      const Mesh mesh(world, {{"dp_shard", 4}}), experts = mesh.regrouped({"dp_shard"}, {{"edp", 2}, {"ep", 2}});
      MixtureFeedForward mixture = make();
      const auto dealt = expert_parallel(*mixture, experts["ep"]);
      if (technique != "fsdp") draw(mixture);
      const auto dense = wrap_by(technique, *mixture, {.shard = mesh["dp_shard"]}, {.only = experts_of(*mixture, false), .average = average});
      const auto sparse = wrap_by(technique, *mixture, {.shard = experts["edp"]}, {.only = experts_of(*mixture, true), .average = average});
      if (technique == "fsdp") draw(mixture);
      auto optimizer = zero_optimizer(*mixture, sgd_of_set);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        (loss(mixture, 4, world.rank()) * (average ? 4 : 1)).backward();
        EXPECT_NEAR(clip_grad_norm(mixture, max_norm).item<double>(), norms[static_cast<size_t>(step)], 1e-5 * norms[static_cast<size_t>(step)]);
        optimizer.step();
      }
      for (const auto& wrapper : {dense.get(), sparse.get()}) trained.add_values(wrapper->updated());
    });
    const auto values = trained.whole();
    for (const auto& parameter : nn::unique_parameters(*whole)) {
      EXPECT_LT(largest_difference({values.at(parameter.name)}, {parameter.tensor.detach()}), 10 * parity) << parameter.name;
    }
  }
}

/// Experts that lie on every rank once have gradients of all ranks' losses, and no wrapper that would divide them.
TEST(DisjointWrappers, MeansOfExpertsThatNobodyDividesAreRefused) {
  const ModelConfig config{.family = "mixtral", .dim = 12, .layers = 1, .heads = 2, .ffn_dim = 7, .experts = 6, .experts_per_token = 2};
  for (const std::string technique : {"ddp", "zero2", "fsdp"}) {
    run_ranks(2, [&](World& world) {
      auto mixture = on_meta([&] { return MixtureFeedForward(config); });
      nn::assign_paths(*mixture);
      const auto dealt = expert_parallel(*mixture, world.group());
      materialize(*mixture, 5);
      for (const bool experts : {false, true}) {
        const auto group = experts ? comm::Group::self() : world.group();
        EXPECT_THAT(refusal([&] { (void)wrap_by(technique, *mixture, {.shard = group}, {.only = experts_of(*mixture, experts), .average = true}); }),
                    ::testing::HasSubstr("leave average false, and divide the loss"))
            << technique;
      }
      for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, true))) parameter.tensor.set_requires_grad(false);
      EXPECT_NO_THROW((void)wrap_by(technique, *mixture, {.shard = world.group()}, {.only = experts_of(*mixture, false), .average = true}))
          << technique << ": what is frozen has no gradient";
    });
  }
}

/// Experts that a wrapper holds, by slices or whole, are still one rank's where all ranks were given them: in a first evaluation already.
TEST(DisjointWrappers, OneRanksExpertsOnAllRanksAreRefused) {
  const ModelConfig config{.family = "mixtral", .dim = 12, .layers = 1, .heads = 2, .ffn_dim = 6, .experts = 4, .experts_per_token = 2};
  for (const std::string technique : {"ddp", "zero2", "fsdp"}) {
    for (const bool slices : {false, true}) {
      if (slices && technique != "fsdp") continue;
      SCOPED_TRACE(technique + (slices ? " of slices" : ""));
      run_ranks(4, [&](World& world) {
        const Mesh mesh(world, {{"dp_shard", 4}}), experts = mesh.regrouped({"dp_shard"}, {{"edp", 2}, {"ep", 2}});
        auto mixture = on_meta([&] { return MixtureFeedForward(config); });
        nn::assign_paths(*mixture);
        const auto dealt = expert_parallel(*mixture, experts["ep"]);
        materialize(*mixture, 5);
        std::vector<at::Tensor> weights, wholes, own, first;
        for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, true))) {
          weights.push_back(parameter.tensor);
          wholes.push_back(parameter.tensor.detach().clone());
        }
        const auto dense = wrap_by(technique, *mixture, {.shard = mesh["dp_shard"]}, {.only = experts_of(*mixture, false)});
        const auto sparse = wrap_by(technique, *mixture, {.shard = experts["edp"]}, {.only = experts_of(*mixture, true)});
        for (size_t i = 0; i < weights.size(); ++i) {
          const at::Tensor part = (slices ? weights[i] : wholes[i]).detach().contiguous(), both = at::empty({2 * part.numel()}, part.options());
          comm::all_gather(experts["ep"], both, part.reshape({-1}));
          own.push_back(part.clone());
          first.push_back(both.narrow(0, 0, part.numel()).view(part.sizes()).clone());
        }
        const auto give = [&](const std::vector<at::Tensor>& values) {
          for (size_t i = 0; i < weights.size(); ++i) weights[i].set_data(values[i].clone());
        };
        const at::Tensor tokens = random_tensor({1, 7, 12}, "tokens");
        const auto evaluate = [&] {
          const at::NoGradGuard no_grad;
          (void)mixture(tokens);
        };
        const auto train = [&] { mixture(tokens).sum().backward(); };
        const auto refused = ::testing::HasSubstr("has the same weights on every rank of");
        give(first);
        EXPECT_THAT(refusal(evaluate), refused);
        EXPECT_THAT(refusal(train), refused);
        give(own);
        evaluate();
        train();
      });
    }
  }
}

struct MixturePairImpl : nn::Module {
  explicit MixturePairImpl(const ModelConfig& config) : first(config), second(config) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  MixtureFeedForward first, second;
};
TESSERA_MODULE(MixturePair);

/// Nothing is read, and nothing forgotten, by the pass that pipeline::split records.
TEST(DisjointWrappers, OneRanksExpertsAreRefusedBehindASplitToo) {
  const ModelConfig config{.family = "mixtral", .dim = 12, .layers = 1, .heads = 2, .ffn_dim = 6, .experts = 4, .experts_per_token = 2};
  run_ranks(2, [&](World& world) {
    auto pair = on_meta([&] { return MixturePair(config); });
    nn::assign_paths(*pair);
    const auto dealt = expert_parallel(*pair, world.group());
    materialize(*pair, 5);
    for (const auto& parameter : nn::unique_parameters(*pair, experts_of(*pair, true))) {
      const at::Tensor part = parameter.tensor.detach().contiguous(), both = at::empty({2 * part.numel()}, part.options());
      comm::all_gather(world.group(), both, part.reshape({-1}));
      at::Tensor(parameter.tensor).set_data(both.narrow(0, 0, part.numel()).view(part.sizes()).clone());
    }
    const at::Tensor tokens = random_tensor({1, 7, 12}, "tokens");
    const auto split = pipeline::split(pair, {tokens}, {{"second", pipeline::SplitPoint::Beginning}});
    EXPECT_THAT(refusal([&] { (void)pair(tokens); }), ::testing::HasSubstr("has the same weights on every rank of"));
  });
}

struct EvenPairImpl : nn::Module {
  EvenPairImpl() {
    register_module("up", up);
    register_module("down", down);
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor, aliases] : nn::unique_parameters(*this)) tensor.copy_(random_tensor(tensor.sizes().vec(), name));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x)); }
  nn::Linear up{4, 8}, down{8, 4};
};
TESSERA_MODULE(EvenPair);

/// The same of layers that are cut, whose parts are shown while they are called alone: in the pass behind the one that took them in.
TEST(DisjointWrappers, OneRanksPartsOnAllRanksAreRefused) {
  for (const bool slices : {false, true}) {
    SCOPED_TRACE(slices);
    for (const bool trains : {false, true}) {
      run_ranks(4, [&](World& world) {
        const Mesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
        EvenPair pair;
        nn::assign_paths(*pair);
        const auto tensor = parallelize_module(*pair, mesh["tp"], {{"up", ColumnParallel{}}, {"down", RowParallel{}}});
        std::vector<at::Tensor> wholes, own, first;
        for (const at::Tensor& parameter : pair->parameters()) wholes.push_back(parameter.detach().clone());
        const auto sharded = wrap_by("fsdp", *pair, {.shard = mesh["dp_shard"]}, {});
        for (size_t i = 0; i < wholes.size(); ++i) {
          const at::Tensor part = (slices ? pair->parameters()[i] : wholes[i]).detach().contiguous(), both = at::empty({2 * part.numel()}, part.options());
          comm::all_gather(mesh["tp"], both, part.reshape({-1}));
          own.push_back(part.clone());
          first.push_back(both.narrow(0, 0, part.numel()).view(part.sizes()).clone());
        }
        const auto give = [&](const std::vector<at::Tensor>& values) {
          size_t i = 0;
          for (const at::Tensor& parameter : pair->parameters()) parameter.set_data(values[i++].clone());
        };
        const auto pass = [&] {
          const at::AutoGradMode mode(trains);
          const at::Tensor loss = pair(random_tensor({3, 4}, "x")).sum();
          if (trains) loss.backward();
        };
        const auto refused = ::testing::HasSubstr("all other parts have the same values on every rank of tp");
        give(first);
        pass();
        EXPECT_THAT(refusal(pass), refused);
        pass();
        EXPECT_THAT(refusal(pass), refused) << "still";
        give(own);
        for (int more = 0; more < 28; ++more) pass();
      });
    }
  }
}

/// The same of parts that were sent between the cut and the wrapper, who shows them to their layers alone.
TEST(DisjointWrappers, OneRanksPartsThatWereSentBeforeTheyWereSharedOutAreRefused) {
  for (const bool sends : {true, false}) {
    run_ranks(4, [&](World& world) {
      const Mesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
      EvenPair pair;
      nn::assign_paths(*pair);
      const auto tensor = parallelize_module(*pair, mesh["tp"], {{"up", ColumnParallel{}}, {"down", RowParallel{}}});
      for (const at::Tensor& parameter : pair->parameters()) {
        const at::Tensor handle = parameter.data();
        if (sends) comm::broadcast(mesh["tp"], handle, 0);
      }
      const auto sharded = wrap_by("fsdp", *pair, {.shard = mesh["dp_shard"]}, {});
      const auto pass = [&] { pair(random_tensor({3, 4}, "x")).sum().backward(); };
      pass();
      if (sends) {
        EXPECT_THAT(refusal(pass), ::testing::HasSubstr("all other parts have the same values on every rank of tp"));
      } else {
        for (int more = 0; more < 3; ++more) pass();
      }
    });
  }
}

/// Parts of doubled units are all ranks' without anybody having sent them, unless others were drawn into them since.
TEST(DisjointWrappers, PartsOfRepeatedUnitsAreTrained) {
  for (const bool narrow : {false, true}) {
    for (const bool draws : {false, true}) {
      run_ranks(4, [&](World& world) {
        const Mesh mesh(world, {{"dp_shard", 2}, {"tp", 2}});
        EvenPair pair;
        {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& parameter : pair->up->parameters()) parameter.narrow(0, 4, 4).copy_(parameter.narrow(0, 0, 4));
          pair->down->weight.narrow(1, 4, 4).copy_(pair->down->weight.narrow(1, 0, 4));
        }
        nn::assign_paths(*pair);
        const auto tensor = parallelize_module(*pair, mesh["tp"], {{"up", ColumnParallel{}}, {"down", RowParallel{}}});
        for (const at::Tensor& parameter : pair->parameters()) {
          if (draws) parameter.detach().copy_(random_tensor(parameter.sizes().vec(), "drawn"));
        }
        const auto sharded = fully_shard(*pair, mesh["dp_shard"], {.param_dtype = narrow ? std::optional(at::kBFloat16) : std::nullopt});
        const auto pass = [&] { pair(random_tensor({3, 4}, "x")).sum().backward(); };
        pass();
        if (draws) {
          EXPECT_THAT(refusal(pass), HasSubstr("all other parts have the same values on every rank of tp"));
        } else {
          for (int more = 0; more < 7; ++more) EXPECT_NO_THROW(pass());
        }
      });
    }
  }
}

/// A trunk that is in two wrapped modules is clipped and updated once, by the newer one's gradient.
TEST(DisjointWrappers, WhatIsInTwoIsUpdatedOnce) {
  struct Head : torch::nn::Module {
    explicit Head(torch::nn::Linear of) : trunk(std::move(of)) {
      register_module("trunk", trunk);
      register_module("out", out);
    }
    at::Tensor forward(const at::Tensor& x) { return out(at::tanh(trunk(x))); }
    torch::nn::Linear trunk, out{4, 2};
  };
  struct ActorCritic : torch::nn::Module {
    ActorCritic() {
      register_module("actor", actor);
      register_module("critic", critic);
      const at::NoGradGuard no_grad;
      for (auto& [name, tensor, aliases] : nn::unique_parameters(*this)) tensor.copy_(random_tensor(tensor.sizes().vec(), name));
    }
    torch::nn::Linear trunk{3, 4};
    std::shared_ptr<Head> actor = std::make_shared<Head>(trunk), critic = std::make_shared<Head>(trunk);
  };
  const at::Tensor x = random_tensor({4, 3}, "x");
  const auto train = [&](int ranks) {
    std::pair<double, std::vector<at::Tensor>> seen;
    run_ranks(ranks, [&](World& world) {
      ActorCritic both;
      const DistributedDataParallel actor(*both.actor, world.group()), critic(*both.critic, world.group());
      auto optimizer = zero_optimizer(both, sgd_of_set);
      const auto [begin, rows] = chunk(4, ranks, world.rank());
      const at::Tensor mine = x.narrow(0, begin, rows);
      (both.actor->forward(mine) + both.critic->forward(mine)).square().sum().backward();
      const double norm = clip_grad_norm(both, 0.5).item<double>();
      optimizer.step();
      if (world.rank() == 0) seen = {norm, values_of(both)};
    });
    return seen;
  };
  ActorCritic plain;
  std::vector<at::Tensor> once;
  for (const auto& parameter : nn::unique_parameters(plain)) once.push_back(parameter.tensor);
  const auto sgd = sgd_of_set(once);
  (plain.actor->forward(x) + plain.critic->forward(x)).square().sum().backward();
  const double norm = clip_grad_norm(plain, 0.5).item<double>();
  sgd->step();
  for (const int ranks : {1, 2, 3}) {
    const auto [found, values] = train(ranks);
    EXPECT_NEAR(found, norm, 1e-5 * norm) << ranks;
    EXPECT_LT(largest_difference(values, values_of(plain)), parity) << ranks;
  }
}

TEST(DisjointWrappers, ClipTogether) {
  SharedNet whole;
  loss_of(whole.forward(whole_batch(samples).x), whole_batch(samples).y, samples).backward();
  const double expected = clip_grad_norm(whole, 0.1).item<double>();
  run_ranks(4, [&](World& world) {
    SharedNet net;
    const auto one = wrap_by("zero2", net, {.shard = world.group()}, {.only = in_first_set});
    const auto two = wrap_by("fsdp", net, halves_of("fsdp", world), {.only = in_second_set});
    const Batch mine = part_of(whole_batch(samples), 4, world.rank());
    loss_of(net.forward(mine.x), mine.y, samples).backward();
    EXPECT_NEAR(clip_grad_norm(net, 0.1).item<double>(), expected, 1e-5 * expected);
  });
}

TEST(DisjointWrappers, RefuseASetWithoutParametersAndAnotherOrderOnOneRank) {
  run_ranks(2, [](World& world) {
    for (const std::string& technique : techniques) {
      SharedNet net;
      const auto none = [](const nn::NamedParameter&) { return false; };
      EXPECT_THAT(refusal([&] { wrap_by(technique, net, {.shard = world.group()}, {.only = none}); }), HasSubstr("`only`")) << technique;
    }
    SharedNet net;
    const bool swapped = world.rank() == 1;
    const auto wrap = [&](ReplicaStart start) {
      return DistributedDataParallel(net, world.group(), {.only = swapped ? in_second_set : in_first_set, .replicas = start});
    };
    for (const ReplicaStart start : {ReplicaStart::Check, ReplicaStart::Broadcast}) {
      EXPECT_THAT(refusal([&] { (void)wrap(start); }), HasSubstr("wrap parts of one in the same order"));
    }
  });
}

/// unshard(model) is of all that shard it.
TEST(DisjointWrappers, UnshardTheModelTogether) {
  SharedNet whole;
  run_ranks(3, [&](World& world) {
    SharedNet net;
    const auto one = wrap_by("fsdp", net, {.shard = world.group()}, {.only = in_first_set});
    const auto two = wrap_by("fsdp", net, {.shard = world.group()}, {.only = in_second_set});
    unshard(net);
    EXPECT_TRUE(same_bits(values_of(net), values_of(whole)));
  });
}

/// The wrapper of the experts has fewer ranks, and knows nothing of whose tokens are dropped.
TEST(DisjointWrappers, TheExpertsWrapperLeavesDropoutOfDataRanksApart) {
  for (const std::string technique : {"ddp", "zero1", "fsdp"}) {
    std::mutex one_at_a_time;  // ranks are threads, and share libtorch's generator
    std::vector<at::Tensor> dropped(2);
    run_ranks(2, [&](World& world) {
      const auto owned = std::make_shared<torch::nn::Module>("Root");
      torch::nn::Module& root = *owned;
      nn::GroupedExperts experts(2, 12, 8, 0.02, 0.02);
      nn::Dropout drop(0.5);
      torch::nn::Linear dense(12, 12);
      root.register_module("experts", experts);
      root.register_module("drop", drop);
      root.register_module("dense", dense);
      fill_parameters(root);
      nn::assign_paths(root);
      const auto all = wrap_by(technique, root, {.shard = world.group()}, {.only = experts_of(root, false)});
      const auto of_experts = wrap_by(technique, root, {.shard = comm::Group::self()}, {.only = experts_of(root, true)});
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(3);
      dropped[static_cast<size_t>(world.rank())] = drop(at::ones({4, 32}));
    });
    EXPECT_FALSE(at::equal(dropped[0], dropped[1])) << technique;
  }
}

/// Ranks that were data ranks are one, of a cut model, in the next layout: they drop alike.
TEST(DisjointWrappers, AnotherLayoutSaysAnewWhoDropsApart) {
  std::mutex one_at_a_time;
  std::vector<at::Tensor> dropped(2);
  run_ranks(2, [&](World& world) {
    const auto root = std::make_shared<torch::nn::Module>("Root");
    nn::Dropout drop(0.5);
    root->register_module("drop", drop);
    root->register_module("dense", torch::nn::Linear(12, 12));
    fill_parameters(*root);
    nn::assign_paths(*root);
    {
      const DistributedDataParallel data_ranks(*root, world.group());
    }
    const DistributedDataParallel one(*root, comm::Group::self());
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(3);
    dropped[static_cast<size_t>(world.rank())] = drop(at::ones({4, 64}));
  });
  EXPECT_TRUE(at::equal(dropped[0], dropped[1]));
}

}  // namespace
}  // namespace tessera
