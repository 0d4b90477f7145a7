#include "tessera/expert_parallel/expert_parallel.h"

#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/events.h"
#include "tessera/layout/slice.h"
#include "tessera/models/mixture.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/record_events.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/weight_gradients.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::refusal;

constexpr int64_t kDim = 12;

ModelConfig sizes(int64_t experts, int64_t per_token = 2) {
  return {.family = "mixtral", .dim = kDim, .layers = 1, .heads = 2, .ffn_dim = 7, .experts = experts, .experts_per_token = per_token};
}

MixtureFeedForward on_meta_mixture(const ModelConfig& config) {
  auto mixture = on_meta([&] { return MixtureFeedForward(config); });
  nn::assign_paths(*mixture);
  return mixture;
}

/// Weights large enough that experts differ by more than roundings.
void draw(MixtureFeedForward& mixture) {
  materialize(*mixture, 5, testing_support::test_device());
  const at::NoGradGuard no_grad;
  for (const auto& parameter : mixture->parameters()) parameter.mul_(20);
}

at::Tensor numbers(int64_t rows, double phase) { return (at::arange(rows * kDim, at::kFloat) * 0.37 + phase).sin().view({1, rows, kDim}); }

using Tensors = std::map<std::string, at::Tensor>;

/// Output, and gradients of the input and of every parameter.
Tensors passes(MixtureFeedForward& mixture, const at::Tensor& input) {
  const at::Tensor x = input.clone().requires_grad_(true);
  const at::Tensor out = mixture(x);
  out.backward(numbers(input.size(1), 1.5));
  Tensors found{{"out", out.detach()}, {"x", x.grad()}};
  for (const auto& parameter : mixture->named_parameters()) found[parameter.key()] = parameter.value().grad().clone();
  return found;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-5 * std::max(1e-3, expected.abs().max().item<double>())) << what;
}

/// `tokens` of each rank; the oracle computes each rank's tokens with whole experts, and sums their gradients.
void expect_as_whole(const ModelConfig& config, const std::vector<int64_t>& tokens, int sharers = 1) {
  const int ranks = static_cast<int>(tokens.size());
  Tensors sums;
  std::vector<Tensors> expected;
  for (int rank = 0; rank < ranks; ++rank) {
    MixtureFeedForward whole = on_meta_mixture(config);
    draw(whole);
    expected.push_back(passes(whole, numbers(tokens[static_cast<size_t>(rank)], rank)));
    for (const auto& [name, gradient] : expected.back()) {
      if (name.starts_with("experts.")) sums[name] = sums.contains(name) ? sums[name] + gradient : gradient;
    }
  }
  run_ranks(ranks, [&](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group(), {.sharers = sharers});
    draw(mixture);
    const auto own = static_cast<size_t>(world.rank());
    const std::string where = " of rank " + std::to_string(own) + " of " + std::to_string(ranks);
    const auto parameters = mixture->named_parameters();
    for (const auto& [name, found] : passes(mixture, numbers(tokens[own], world.rank()))) {
      if (!sums.contains(name)) {
        expect_near(found, expected[own].at(name), name + where);
        continue;
      }
      EXPECT_EQ(found.numel() * ranks, sums.at(name).numel()) << name << where;
      expect_near(found, take(sums.at(name), nn::slice_of(parameters[name])), name + where);
    }
  });
}

TEST(ExpertParallel, EqualsWholeExpertsOnEachRanksTokens) {
  expect_as_whole(sizes(6), {5, 7});
  expect_as_whole(sizes(6), {5, 1, 4});
  expect_as_whole(sizes(10, 3), {5, 3, 7, 2, 4});
  expect_as_whole(sizes(8), {3, 3, 3, 3, 3, 3, 3, 3});
}

/// Who dealt them, and which part this rank has, stays with a parameter that is given other data.
TEST(ExpertParallel, KnowsItsPartsBehindACastAndAnAverage) {
  run_ranks(2, [&](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(sizes(6));
    const auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    const auto parameters = mixture->named_parameters();
    std::map<std::string, Slice> parts;
    for (const auto& parameter : parameters) parts[parameter.key()] = nn::slice_of(parameter.value());
    const auto expect_known = [&](const std::string& when) {
      for (const auto& parameter : parameters) {
        EXPECT_EQ(nn::slice_of(parameter.value()), parts.at(parameter.key())) << parameter.key() << when;
        EXPECT_EQ(nn::dealt_of(parameter.value()).size(), parameter.key().starts_with("experts.") ? 1u : 0u) << parameter.key() << when;
      }
    };
    mixture->to(at::kDouble);
    expect_known(" in another dtype");
    mixture->to(at::kFloat);
    for (const auto& parameter : parameters) parameter.value().set_data(parameter.value().detach() * 0.5);
    expect_known(" of an average");
    (void)passes(mixture, numbers(5, world.rank()));
    const at::Tensor w1 = parameters["experts.w1"];
    w1.set_data(at::ones({2 * w1.size(0), w1.size(1)}));
    EXPECT_THAT(refusal([&] { (void)mixture(numbers(5, world.rank())); }),
                AllOf(HasSubstr("expert_parallel: '"), HasSubstr(".w1'"), HasSubstr("was given data of another shape")));
  });
}

/// Ranks that all hold one rank's experts would compute another model, and nothing of its shapes says so; in training and in evaluation.
TEST(ExpertParallel, OneRanksExpertsOnAllRanksAreRefused) {
  for (const int sharers : {1, 2}) {
    run_ranks(2, [&](World& world) {
      MixtureFeedForward mixture =
          on_meta_mixture({.family = "mixtral", .dim = kDim, .layers = 1, .heads = 2, .ffn_dim = 8, .experts = 4, .experts_per_token = 2});
      const auto parallel = expert_parallel(*mixture, world.group(), {.sharers = sharers});
      draw(mixture);
      std::vector<at::Tensor> weights, own, first, copies;
      for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, true))) {
        weights.push_back(parameter.tensor);
        own.push_back(parameter.tensor.detach().clone());
        const at::Tensor whole = at::empty({2 * own.back().numel()}, own.back().options());
        comm::all_gather(world.group(), whole, own.back().reshape({-1}).contiguous());
        first.push_back(whole.narrow(0, 0, own.back().numel()).view(own.back().sizes()).clone());
        copies.push_back(first.back().view({2 * sharers, -1}).narrow(0, 0, 1).expand({2 * sharers, -1}).reshape(own.back().sizes()));
      }
      const auto give = [&](const std::vector<at::Tensor>& values) {
        for (size_t i = 0; i < weights.size(); ++i) weights[i].set_data(values[i].clone());
      };
      const auto train = [&] { (void)passes(mixture, numbers(5, world.rank())); };
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        (void)mixture(numbers(5, world.rank()));
      };
      const auto refused = AllOf(HasSubstr("experts' has the same weights on every rank of"), HasSubstr("checkpoint::load"));
      give(first);
      EXPECT_THAT(refusal(evaluate), refused);
      EXPECT_THAT(refusal(train), refused) << "still";
      give(own);
      train();
      give(first);
      EXPECT_THAT(refusal(train), refused);
      give(own);
      for (const size_t i : {1, 2}) weights[i].set_data(first[i].clone());
      train();  // what is alike beside what is not may be meant so
      weights[0].set_data(first[0].clone());
      train();  // nor is one that alone was given
      give(own);
      train();
      if (world.rank() == 1) give(first);
      train();       // nor what one rank alone was given
      give(copies);  // a layer that all experts begin as
      train();
    });
  }
}

/// As a port does that deals first, and draws or sends afterwards.
TEST(ExpertParallel, ExpertsThatAreDrawnOrSentAfterTheDealAreRefused) {
  for (const auto& [per_rank, dealt_on_meta] : std::vector<std::pair<int, bool>>{{1, false}, {2, false}, {2, true}}) {
    run_ranks(2, [&, per_rank = per_rank, dealt_on_meta = dealt_on_meta](World& world) {
      MixtureFeedForward mixture =
          on_meta_mixture({.family = "mixtral", .dim = kDim, .layers = 1, .heads = 2, .ffn_dim = 8, .experts = 2 * per_rank, .experts_per_token = 2});
      if (!dealt_on_meta) draw(mixture);
      const auto parallel = expert_parallel(*mixture, world.group());
      if (dealt_on_meta) draw(mixture);
      const auto experts = nn::unique_parameters(*mixture, experts_of(*mixture, true));
      EXPECT_THAT(refusal([&] { torch::nn::init::normal_(experts[0].tensor); }),
                  AllOf(HasSubstr("expert_parallel: aten::normal_ was given"), HasSubstr("before expert_parallel")));
      for (const auto& [name, tensor, aliases] : experts) {
        const at::Tensor handle = tensor.data();
        comm::broadcast(world.group(), handle, 0);
      }
      const auto forward = [&] {
        const at::NoGradGuard no_grad;
        (void)mixture(numbers(5, world.rank()));
      };
      if (per_rank == 1) return forward();  // which may be meant so
      EXPECT_THAT(refusal(forward), AllOf(HasSubstr("has the same weights on every rank"), HasSubstr("were written since the experts were dealt")));
    });
  }
}

TEST(ExpertParallel, TakesRanksWithoutTokensAndOneExpertForAll) {
  expect_as_whole(sizes(4), {0, 5});
  expect_as_whole(sizes(4), {0, 0, 3, 0});
  expect_as_whole(sizes(2, 1), {1, 1});
}

/// Each expert's width lies on several ranks, and so may the experts.
TEST(ExpertParallel, CutsExpertsByTheirWidth) {
  ModelConfig config = sizes(6);
  config.ffn_dim = 6;
  expect_as_whole(config, {5, 7}, 2);
  expect_as_whole(config, {5, 0, 4}, 3);
  expect_as_whole(config, {5, 1, 4, 3}, 2);
  expect_as_whole(config, {2, 3, 0, 4, 5, 1}, 3);
  expect_as_whole(config, {2, 3, 0, 4, 5, 1}, 2);
  config.shared_ffn_dim = 5;
  expect_as_whole(config, {0, 0, 7, 2}, 2);
}

TEST(ExpertParallel, KeepsCapacityAndSharedExpertsAsTheyAre) {
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  config.shared_gate = true;
  expect_as_whole(config, {5, 7});
  run_ranks(2, [&](World& world) {
    MoeConfig moe;
    moe.capacity_factor = 0.5;
    const at::Tensor x = numbers(9, world.rank());
    MixtureFeedForward whole = on_meta_mixture(config), mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group());
    for (MixtureFeedForward* one : {&whole, &mixture}) {
      draw(*one);
      (*one)->set_training(moe);
    }
    const Tensors expected = passes(whole, x), found = passes(mixture, x);
    for (const char* name : {"out", "x", "router.weight", "shared.w1.weight"}) expect_near(found.at(name), expected.at(name), name);
  });
}

/// Computed apart, results have the bits of a rank that has all experts, and so have gradients of weights, each of which is said to be of the rank that sent.
TEST(ExpertParallel, ComputesEachRanksRowsByThemselves) {
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  const std::vector<int64_t> tokens{5, 0, 9};
  std::vector<Tensors> whole;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    MixtureFeedForward mixture = on_meta_mixture(config);
    draw(mixture);
    whole.push_back(passes(mixture, numbers(tokens[rank], static_cast<double>(rank))));
  }
  run_ranks(3, [&](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group(), {.apart = true});
    draw(mixture);
    Attachment listening;
    std::map<std::string, std::map<int, at::Tensor>> told;
    for (const auto& parameter : mixture->named_parameters()) {
      if (!parameter.key().starts_with("experts.")) continue;
      listening.add(nn::GradientDispatcher::of(parameter.value()).listen([&told, name = parameter.key()](const at::Tensor& weight) {
        told[name][nn::GradientSource::current().value()] = std::exchange(weight.mutable_grad(), at::zeros_like(weight));
      }));
    }
    const auto own = static_cast<size_t>(world.rank());
    const Tensors found = passes(mixture, numbers(tokens[own], world.rank()));
    for (const char* name : {"out", "x", "router.weight", "shared.w1.weight"}) EXPECT_TRUE(at::equal(found.at(name), whole[own].at(name))) << name;
    EXPECT_EQ(told.size(), 3U);
    for (const auto& [name, by_rank] : told) {
      EXPECT_EQ(by_rank.size(), 3U);
      const Slice slice = nn::slice_of(mixture->named_parameters()[name]);
      for (const auto& [rank, gradient] : by_rank) {
        EXPECT_TRUE(at::equal(gradient, take(whole[static_cast<size_t>(rank)].at(name), slice))) << name << " of rank " << rank;
      }
    }
  });
}

/// Shapes do not follow the data: what a capacity leaves empty stays, behind all rows that are taken.
TEST(ExpertParallel, GivesAsManyRowsAsItTook) {
  run_ranks(2, [](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(sizes(4));
    const auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    auto* const experts = dynamic_cast<nn::GroupedExpertsImpl*>(mixture->named_children()["experts"].get());
    const at::Tensor out = experts->forward(numbers(9, world.rank()).view({9, kDim}), at::tensor({1, 2, 0, 3}, at::kLong));
    ASSERT_EQ(out.sizes(), at::IntArrayRef({9, kDim}));
    EXPECT_GT(out.narrow(0, 0, 6).abs().min().item<float>(), 0);
    EXPECT_EQ(out.narrow(0, 6, 3).abs().max().item<float>(), 0);
  });
}

/// Ranks 0 and 1 route the same tokens, and so do ranks 2 and 3; experts lie on all four, or each of four blocks on two.
TEST(ExpertParallel, ComputesRowsOnceWhereRanksRouteTheSameTokens) {
  ModelConfig config = sizes(8);
  config.ffn_dim = 12;
  for (const auto& [tokens, sharers] : {std::pair{1, 1}, {5, 1}, {6, 1}, {5, 2}, {1, 2}, {3, 4}}) {
    Tensors sums;
    std::vector<Tensors> expected;
    for (int pair = 0; pair < 2; ++pair) {
      MixtureFeedForward whole = on_meta_mixture(config);
      draw(whole);
      expected.push_back(passes(whole, numbers(tokens, pair + 0.4)));
      for (const auto& [name, gradient] : expected.back()) sums[name] = pair == 0 ? gradient : sums[name] + gradient;
    }
    run_ranks(4, [&](World& world) {
      const comm::Group same = world.subgroup({world.rank() / 2 * 2, world.rank() / 2 * 2 + 1}, "tp");
      MixtureFeedForward mixture = on_meta_mixture(config);
      const auto parallel = expert_parallel(*mixture, world.group(), {.sharers = sharers, .same_tokens = same});
      draw(mixture);
      const Tensors found = passes(mixture, numbers(tokens, world.rank() / 2 + 0.4));
      const Tensors& own = expected[static_cast<size_t>(world.rank() / 2)];
      for (const char* name : {"out", "x", "router.weight"}) expect_near(found.at(name), own.at(name), name);
      for (const char* name : {"experts.w1", "experts.w2", "experts.w3"}) {
        expect_near(found.at(name), take(sums.at(name), nn::slice_of(mixture->named_parameters()[name])), name);
      }
    });
  }
}

/// By themselves a rank's experts compute something; without the others, nothing of meaning.
TEST(ExpertParallel, ExpertsWithoutTheirHandleAreRefusedByName) {
  run_ranks(2, [](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(sizes(4));
    auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    passes(mixture, numbers(5, 0.4));
    parallel.reset();
    EXPECT_THAT(refusal([&] { passes(mixture, numbers(5, 0.4)); }), HasSubstr("expert_parallel: 'experts' is called, and what was returned for it is gone"));
  });
}

/// Whose experts ranks of one model hold has to be known wherever their gradients are summed.
TEST(ExpertParallel, RanksThatRouteTheSameTokensAreDealtToOrSayWhatTheyHold) {
  run_ranks(4, [](World& world) {
    const comm::Group pair = world.subgroup({world.rank() / 2 * 2, world.rank() / 2 * 2 + 1}, "tp");
    const comm::Group across = world.subgroup({world.rank() % 2, world.rank() % 2 + 2}, "ep");
    MixtureFeedForward mixture = on_meta_mixture(sizes(4));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*mixture, across, {.same_tokens = pair}); }),
                AllOf(HasSubstr("same_tokens (tp) has ranks that are not in the group (ep)"), HasSubstr("nn::add_sharing")));
    for (const auto& weight : nn::unique_parameters(*mixture, experts_of(*mixture, true))) {
      nn::add_sharing(weight.tensor, {.axis = "tp", .rank = pair.rank(), .holders = 2, .is_term = true});
    }
    EXPECT_NO_THROW((void)expert_parallel(*mixture, across, {.same_tokens = pair}));
  });
}

TEST(ExpertParallel, DrawsTheSameExpertsAndKeepsThoseWithValues) {
  ModelConfig like = sizes(6);
  like.ffn_dim = 3;
  MixtureFeedForward whole = on_meta_mixture(like);
  materialize(*whole, 5, testing_support::test_device());
  run_ranks(3, [&](World& world) {
    ModelConfig config = sizes(6);
    config.ffn_dim = 3;
    MixtureFeedForward drawn = on_meta_mixture(config), cut = on_meta_mixture(config), wide = on_meta_mixture(config);
    materialize(*cut, 5, testing_support::test_device());
    const auto first = expert_parallel(*drawn, world.group()), second = expert_parallel(*cut, world.group());
    const auto third = expert_parallel(*wide, world.group(), {.sharers = 3});
    materialize(*drawn, 5, testing_support::test_device());
    materialize(*wide, 5, testing_support::test_device());
    for (MixtureFeedForward* one : {&drawn, &cut, &wide}) {
      for (const auto& parameter : (*one)->named_parameters()) {
        const at::Tensor part = take(whole->named_parameters()[parameter.key()].detach(), nn::slice_of(parameter.value()));
        EXPECT_TRUE(at::equal(parameter.value(), part)) << parameter.key();
      }
    }
  });
}

/// A group of its own whose calls are noted.
comm::Group noted_group(const World& world, const std::shared_ptr<comm::Recorder>& records) {
  const comm::GroupInfo info{.name = "ep", .rank = world.rank(), .size = world.size(), .timeout = std::chrono::seconds(60)};
  return {info, comm::make_record_engine(records, info, world.group().engine())};
}

TEST(ExpertParallel, SendsTheChosenRowsOnce) {
  const int ranks = 4;
  const int64_t tokens = 6, per_token = 2, experts = 8;
  std::mutex mutex;
  std::map<std::string, int64_t> rows;
  run_ranks(ranks, [&](World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    MixtureFeedForward mixture = on_meta_mixture(sizes(experts));
    const auto parallel = expert_parallel(*mixture, noted_group(world, records));
    draw(mixture);
    std::vector<int64_t> to(ranks);
    passes(mixture, numbers(tokens, world.rank()));
    int64_t bytes = 0, calls = 0;
    for (const auto& record : records->records()) {
      bytes += record.sent_bytes;
      ++calls;
    }
    EXPECT_EQ(calls, 5);  // counts; rows there and back; their gradients back and there
    const std::lock_guard lock(mutex);
    rows["sent"] += bytes - (ranks - 1) * (experts / ranks + 1) * 8;  // what ranks compare of their weights lies behind the counts
  });
  // Of all ranks together a row that leaves comes back, and so does its gradient.
  EXPECT_EQ(rows["sent"] % (4 * kDim * 4), 0);
  EXPECT_LE(rows["sent"], 4 * ranks * tokens * per_token * kDim * 4);
  EXPECT_GE(rows["sent"], 4 * ranks * tokens * per_token * kDim * 4 / 2);
}

/// Rows set out, the shared expert is computed, and then what has come; going back, gradients of rows set out before the shared expert's backward.
TEST(ExpertParallel, ComputesSharedExpertsWhileRowsAreOnTheirWay) {
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  run_ranks(3, [&](World& world) {
    struct Noting : nn::Interceptor {
      std::function<void()> note;
      nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
        note();
        return next(std::move(inputs));
      }
    };
    const auto records = std::make_shared<comm::Recorder>();
    MixtureFeedForward mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, noted_group(world, records));
    draw(mixture);
    std::vector<size_t> calls;  // before the shared expert, before its backward
    const auto note = [&] { calls.push_back(records->records().size()); };
    const auto noting = std::make_shared<Noting>();
    noting->note = note;
    const auto attached = nn::attach(*mixture, "shared", noting);
    mixture->named_parameters()["shared.w2.weight"].register_hook([&](const at::Tensor&) { note(); });
    passes(mixture, numbers(5, world.rank()));
    EXPECT_THAT(calls, ::testing::ElementsAre(2, 5));  // counts and rows; results, and both ways back
  });
}

/// The same in what the rank does: between the start of the message that takes rows out and the wait for it, products of the shared expert, and no others; in
/// backward those of its gradients, while the rows' gradients come back.
TEST(ExpertParallel, HidesProductsBehindTheExchange) {
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  run_ranks(3, [&](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    EventStream stream;
    {
      const nn::RecordEvents recording(stream);
      passes(mixture, numbers(5, world.rank()));
    }
    std::vector<double> hidden;  // FLOPs between each all-to-all of rows and the wait for it
    bool on_its_way = false;
    for (const Event& event : stream.take()) {
      if (const auto* call = std::get_if<CollectiveEvent>(&event.what)) {
        on_its_way = call->op == "all_to_all" && call->dtype == at::kFloat;
        if (on_its_way) hidden.push_back(0);
      } else if (std::holds_alternative<WaitEvent>(event.what)) {
        on_its_way = false;
      } else if (const auto* done = std::get_if<OperatorEvent>(&event.what); done != nullptr && on_its_way) {
        hidden.back() += done->flops;
      }
    }
    const double product = 2.0 * 5 * kDim * 5;  // tokens, width, the shared expert's width
    EXPECT_THAT(hidden, ::testing::ElementsAre(3 * product, 0, 0, 6 * product));
  });
}

/// Whoever keeps books of what the experts' call saves has the shared expert computed behind it: the same bits.
TEST(ExpertParallel, GivesTheBitsOfOneAfterTheOther) {
  struct Hooks : nn::SavedTensorHooks {
    std::unique_ptr<nn::SavedTensor> pack(const at::Tensor&) override { return nullptr; }
  };
  struct Books : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      const nn::SavedTensorScope books(std::make_shared<Hooks>());
      return next(std::move(inputs));
    }
  };
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  config.shared_gate = true;
  run_ranks(2, [&](World& world) {
    Tensors found[2];
    for (const bool apart : {false, true}) {
      MixtureFeedForward mixture = on_meta_mixture(config);
      const auto parallel = expert_parallel(*mixture, world.group());
      draw(mixture);
      const Attachment attached = apart ? nn::attach(*mixture, "experts", std::make_shared<Books>()) : Attachment();
      found[apart ? 1 : 0] = passes(mixture, numbers(9, world.rank()));
    }
    for (const auto& [name, tensor] : found[0]) EXPECT_TRUE(at::equal(tensor, found[1].at(name))) << name;
  });
}

/// Whoever comes late: what is added up is added in one order.
TEST(ExpertParallel, GivesTheSameBitsHoweverRanksArrive) {
  ModelConfig config = sizes(6, 3);
  config.ffn_dim = 6;
  for (const int sharers : {1, 2}) {
    std::vector<Tensors> first(4);
    for (int run = 0; run < 4; ++run) {
      run_ranks(4, [&](World& world) {
        MixtureFeedForward mixture = on_meta_mixture(config);
        const int blocks = sharers == 1 ? 2 : 4;  // six experts over two ranks, or over two pairs
        const int base = world.rank() / blocks * blocks;
        std::vector<int> members(static_cast<size_t>(blocks));
        std::iota(members.begin(), members.end(), base);
        const auto parallel = expert_parallel(*mixture, world.subgroup(members, "ep"), {.sharers = sharers});
        draw(mixture);
        std::this_thread::sleep_for(std::chrono::milliseconds(3 * ((world.rank() * 5 + run * 3) % 4)));
        const Tensors found = passes(mixture, numbers(9, world.rank()));
        Tensors& expected = first[static_cast<size_t>(world.rank())];
        if (run == 0) expected = found;
        for (const auto& [name, tensor] : found) EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name << " of rank " << world.rank();
      });
    }
  }
}

TEST(ExpertParallel, RefusesWhatCannotBeDealt) {
  run_ranks(2, [](World& world) {
    MixtureFeedForward odd = on_meta_mixture(sizes(5)), even = on_meta_mixture(sizes(4));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*odd, world.group()); }), HasSubstr("'experts' has 5 experts, which 2 ranks do not divide"));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*even, world.group(), {.sharers = 2}); }), HasSubstr("experts of width 7, which 2 sharers do not divide"));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*even, world.group(), {.sharers = 3}); }), HasSubstr("sharers = 3 of 2 ranks"));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*even, world.group(), {.experts = "expert"}); }), HasSubstr("experts"));
    EXPECT_THAT(refusal([&] { (void)expert_parallel(*even, world.group(), {.experts = "router"}); }), HasSubstr("is no GroupedExperts"));
  });
}

TEST(ExpertParallel, TellsItsWeightsFromTheRest) {
  MixtureFeedForward mixture = on_meta_mixture(sizes(4));
  std::vector<std::string> theirs, rest;
  for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, true))) theirs.push_back(parameter.name);
  for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, false))) rest.push_back(parameter.name);
  EXPECT_THAT(theirs, ::testing::ElementsAre("experts.w1", "experts.w2", "experts.w3"));
  EXPECT_THAT(rest, ::testing::ElementsAre("router.weight"));
}

}  // namespace
}  // namespace tessera
