#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/along.h"
#include "tessera/nn/sharing.h"
#include "tests/nn/net.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr double kParity = 1e-5;  // of a tensor's largest entry

struct Reference {
  double loss;
  Tensors gradients, values;
  at::Tensor logits;
};

TokenNet made() {
  TokenNet net = on_meta([] { return TokenNet(); });
  materialize(net, 7, testing_support::test_device());
  return net;
}

Reference reference(const Sample& batch) {
  TokenNet net = made();
  Reference result;
  result.loss = forward_backward(net, batch).item<double>();
  for (const auto& parameter : nn::unique_parameters(*net)) {
    result.gradients[parameter.name] = parameter.tensor.grad().clone();
    result.values[parameter.name] = parameter.tensor.detach().clone();
  }
  const at::NoGradGuard no_grad;
  net->eval();
  result.logits = net(batch.tokens, std::nullopt);
  return result;
}

class WorldSizes : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(TensorParallel, WorldSizes, ::testing::Combine(::testing::Values(1, 2, 3, 5, 8), ::testing::Bool()));

TEST_P(WorldSizes, AnUnevenNetEqualsOneDevice) {
  const auto [ranks, sequence] = GetParam();
  for (const int64_t length : {11, 8}) {
    const Sample batch = sample(3, length, 29);
    const Reference expected = reference(batch);
    run_ranks(ranks, [&](World& world) {
      TokenNet net = on_meta([] { return TokenNet(); });
      const auto tensor = parallelize_module(net, world.group(), token_net_plan(sequence));
      materialize(net, 7, testing_support::test_device());
      EXPECT_EQ(difference_from(*net, expected.values, /*values=*/true), 0);
      for (int pass = 0; pass < 2; ++pass) {
        net->zero_grad();
        EXPECT_NEAR(forward_backward(net, batch).item<double>(), expected.loss, 5e-6 * expected.loss);
        nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
        EXPECT_LT(difference_from(*net, expected.gradients), kParity);
      }
      const at::NoGradGuard no_grad;
      net->eval();
      EXPECT_LT((net(batch.tokens, std::nullopt) - expected.logits).abs().max().item<double>(), 1e-5);
    });
  }
}

/// As docs/tensor-parallel.md shows it. `shared`: whether the term is dealt over those whose gradients are summed.
template <class Model>
at::Tensor penalty_of(const Model& model, bool shared) {
  at::Tensor loss = at::zeros({});
  for (const auto& parameter : model->parameters()) {
    double share = 1;
    for (const auto& sharing : nn::sharings_of(parameter)) {
      if (sharing.is_term && shared) share /= sharing.holders;
    }
    loss = loss + share * 1e-2 * parameter.square().sum();
  }
  return loss;
}

TEST_P(WorldSizes, APenaltyBesideTheModelIsDealtOverRanksThatSumGradients) {
  const auto [ranks, sequence] = GetParam();
  const Sample batch = sample(3, 11, 29);
  const nn::SampleScope scope({.seed = 11, .step = 3, .first_sample = 4});
  TokenNet whole = made();
  (whole(batch.tokens, batch.labels) + penalty_of(whole, /*shared=*/true)).backward();
  Tensors expected;
  for (const auto& parameter : nn::unique_parameters(*whole)) expected[parameter.name] = parameter.tensor.grad();
  run_ranks(ranks, [&, ranks = ranks, sequence = sequence](World& world) {
    TokenNet net = on_meta([] { return TokenNet(); });
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(sequence));
    materialize(net, 7, testing_support::test_device());
    for (const bool shared : {true, false}) {
      const nn::SampleScope here({.seed = 11, .step = 3, .first_sample = 4});
      net->zero_grad();
      (net(batch.tokens, batch.labels) + penalty_of(net, shared)).backward();
      nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
      const double difference = difference_from(*net, expected);
      if (shared || ranks == 1 || !sequence) {
        EXPECT_LT(difference, kParity);
      } else {
        EXPECT_GT(difference, 10 * kParity) << "once for each rank";
      }
    }
  });
}

/// Two queries a key.
struct SharedKeysImpl : nn::Module {
  SharedKeysImpl() : wq(6, 8), wk(6, 4), wo(8, 6) {
    register_module("wq", wq);
    register_module("wk", wk);
    register_module("wo", wo);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor q = wq(x).unflatten(-1, {-1, 2}), k = wk(x).unflatten(-1, {-1, 2});
    return wo((q * k.repeat_interleave(q.size(-2) / k.size(-2), -2)).flatten(-2)).square().sum();
  }
  nn::Linear wq, wk, wo;
};
TESSERA_MODULE(SharedKeys);

TEST(TensorParallel, APenaltyBesideTheModelIsDealtOverRanksThatShareKeys) {
  const auto queries = FeatureCut::query_heads(4, 2), keys = FeatureCut::key_value_heads(4, 2);
  const at::Tensor x = at::arange(30, at::kFloat).view({1, 5, 6}).sin();
  SharedKeys whole = on_meta([] { return SharedKeys(); });
  materialize(whole, 7, testing_support::test_device());
  (whole(x) + penalty_of(whole, /*shared=*/true)).backward();
  Tensors expected;
  for (const auto& parameter : nn::unique_parameters(*whole)) expected[parameter.name] = parameter.tensor.grad();
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](World& world) {
      SharedKeys net = on_meta([] { return SharedKeys(); });
      const auto tensor = parallelize_module(
          net, world.group(), {{"wq", ColumnParallel{.cut = queries}}, {"wk", ColumnParallel{.cut = keys}}, {"wo", RowParallel{.cut = queries}}});
      materialize(net, 7, testing_support::test_device());
      for (const bool shared : {true, false}) {
        net->zero_grad();
        (net(x) + penalty_of(net, shared)).backward();
        nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
        const double difference = difference_from(*net, expected);
        if (shared || ranks == 2) {
          EXPECT_LT(difference, kParity);
        } else {
          EXPECT_GT(difference, 10 * kParity) << "once for each holder";
        }
      }
    });
  }
}

/// The row of the padding gets no gradient, on whichever rank it lies.
TEST(TensorParallel, PaddingIsTheRowOfTheWholeVocabulary) {
  struct PaddedImpl : nn::Module {
    explicit PaddedImpl(int64_t padding) : embed(nn::EmbeddingOptions(8, 3).padding_idx(padding)) {
      register_module("embed", embed);
      const at::NoGradGuard no_grad;
      embed->weight.copy_(at::arange(24, at::kFloat).view({8, 3}));
    }
    nn::Embedding embed;
  };
  const at::Tensor ids = at::arange(8).repeat({2, 1});
  for (const int64_t padding : {1, 4, 7}) {
    at::Tensor expected = at::full({8, 3}, 2.0);
    expected[padding].zero_();
    run_ranks(3, [&](World& world) {
      const auto net = std::make_shared<PaddedImpl>(padding);
      const auto tensor = parallelize_module(*net, world.group(), {{"embed", VocabParallelEmbedding{}}});
      net->embed(ids).sum().backward();
      EXPECT_TRUE(at::equal(net->embed->weight.grad(), take(expected, nn::slice_of(net->embed->weight)))) << "padding " << padding << ", rank " << world.rank();
    });
  }
}

TEST(TensorParallel, AModuleWithValuesKeepsItsPart) {
  const Sample batch = sample(2, 7, 29);
  const Reference expected = reference(batch);
  run_ranks(3, [&](World& world) {
    TokenNet net = made();
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(false));
    EXPECT_EQ(difference_from(*net, expected.values, /*values=*/true), 0);
    forward_backward(net, batch);
    EXPECT_LT(difference_from(*net, expected.gradients), kParity);
  });
}

TEST(TensorParallel, AViewFromBeforeTheCutIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    TokenNet net = made();
    const at::Tensor kept = net->gated[0]->w2->weight.t();
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(false));
    EXPECT_THAT(refusal([&] { (void)kept.sum(); }), AllOf(HasSubstr("given a view of 'gated0.w2.weight'"), HasSubstr("in forward")));
  });
}

/// Each of these leaves values nearly right, and the comparison must see it.
TEST(TensorParallel, PlantedBugsAreFound) {
  const Sample batch = sample(2, 7, 29);
  const Reference expected = reference(batch);
  run_ranks(3, [&](World& world) {
    {  // Gradients of norms that are not summed.
      TokenNet net = on_meta([] { return TokenNet(); });
      const auto tensor = parallelize_module(net, world.group(), token_net_plan(true));
      materialize(net, 7, testing_support::test_device());
      forward_backward(net, batch);
      EXPECT_GT(difference_from(*net, expected.gradients), 10 * kParity);
    }
    {  // A bias that every rank adds.
      TokenNet net = on_meta([] { return TokenNet(); });
      const auto tensor = parallelize_module(net, world.group(), token_net_plan(false));
      materialize(net, 7, testing_support::test_device());
      net->gated[0]->w2->leave_bias_out(false);
      EXPECT_GT(std::abs(forward_backward(net, batch).item<double>() - expected.loss), 1e-4 * expected.loss);
    }
  });
}

TEST(TensorParallel, RowAndColumnAlone) {
  run_ranks(3, [](World& world) {
    const at::Tensor x = at::arange(10 * 4, at::kFloat).view({4, 10}) / 40;
    for (const bool column : {true, false}) {
      nn::Linear whole = on_meta([] { return nn::Linear(10, 8); }), cut = on_meta([] { return nn::Linear(10, 8); });
      struct Holder : torch::nn::Module {
        explicit Holder(nn::Linear& layer) { register_module("layer", layer); }
      };
      const auto whole_holder = std::make_shared<Holder>(whole), holder = std::make_shared<Holder>(cut);
      nn::assign_paths(*whole_holder);
      const ParallelStyle style = column ? ParallelStyle(ColumnParallel{.output = TensorLayout::Replicated}) : RowParallel{.input = TensorLayout::Replicated};
      const auto tensor = parallelize_module(*holder, world.group(), {{"layer", style}});
      materialize(*whole_holder, 3, testing_support::test_device());
      materialize(*holder, 3, testing_support::test_device());
      const at::Tensor a = x.clone().requires_grad_(), b = x.clone().requires_grad_();
      const at::Tensor y = whole(a), z = cut(b);
      EXPECT_LT((y - z).abs().max().item<double>(), 1e-5);
      y.square().sum().backward();
      z.square().sum().backward();
      EXPECT_LT((a.grad() - b.grad()).abs().max().item<double>(), 1e-5 * a.grad().abs().max().item<double>());
      EXPECT_LT(difference_from(*holder, {{"layer.weight", whole->weight.grad()}, {"layer.bias", whole->bias.grad()}}), kParity);
    }
  });
}

TEST(TensorParallel, AStatementSaysWhichPartOfTheWholeAModuleGives) {
  run_ranks(4, [](World& world) {
    const FeatureCut queries = FeatureCut::query_heads(6, 3), keys = FeatureCut::key_value_heads(6, 3);
    const auto layout_of = [&](const Gives& style, const at::Tensor& output) {
      TokenNet net = on_meta([] { return TokenNet(); });
      const auto tensor = parallelize_module(net, world.group(), {{"gated0", style}});
      return nn::output_layout(*net->gated[0], output).value();
    };
    // Three key-value heads: two ranks hold the first, and a query of it each.
    const int64_t first_key[] = {0, 0, 1, 2}, first_query[] = {0, 1, 2, 4}, some[] = {1, 1, 2, 2};
    const int rank = world.rank();
    const auto merged = layout_of({.layout = TensorLayout::Features, .cut = keys}, at::zeros({2, 8, 5}));
    EXPECT_EQ(merged.boxes, (std::vector<Box>{{{0, 0, 5 * first_key[rank]}, {2, 8, 5}}}));
    EXPECT_EQ(merged.gradient_partial_over.size(), rank < 2 ? 1u : 0u) << "each of the two knows a term";
    const auto heads = layout_of({.layout = TensorLayout::Features, .cut = queries, .dim = 2}, at::zeros({2, 8, some[rank], 5}));
    EXPECT_EQ(heads.boxes, (std::vector<Box>{{{0, 0, first_query[rank], 0}, {2, 8, some[rank], 5}}}));
    EXPECT_TRUE(heads.gradient_partial_over.empty());
    EXPECT_TRUE(layout_of({.layout = TensorLayout::Replicated}, at::zeros({2})).boxes.empty());
    EXPECT_FALSE(layout_of({.layout = TensorLayout::Copied}, at::zeros({2})).gradient_partial_over.empty());
    EXPECT_FALSE(layout_of({.layout = TensorLayout::Partial}, at::zeros({2})).partial_over.empty());
  });
}

/// Calls its layers as torch::nn::AnyModule and `->forward` do.
struct DirectImpl : nn::Module {
  explicit DirectImpl(bool any) : gated(4, 6), any(any) { register_module("gated", gated); }
  at::Tensor forward(const at::Tensor& x) {
    if (!any) return gated->forward(x);
    return gated->w2->forward(kernels::swiglu(gated->w1->forward(x), gated->w3->forward(x)));
  }
  Gated gated;
  bool any;
};

TEST(TensorParallel, LayersThatAreCalledDirectlyAreCutAllTheSame) {
  const ParallelPlan plan{{"gated.w1", ColumnParallel{}}, {"gated.w3", ColumnParallel{}}, {"gated.w2", RowParallel{}}};
  const at::Tensor x = at::sin(at::arange(12, at::kFloat)).view({3, 4});
  for (const bool any : {false, true}) {
    DirectImpl whole(any);
    materialize(whole, 2, testing_support::test_device());
    const at::Tensor expected = whole.forward(x);
    run_ranks(2, [&](World& world) {
      DirectImpl net(any);  // on the stack
      const auto tensor = parallelize_module(net, world.group(), plan, {.replicas = ReplicaStart::Broadcast});
      materialize(net, 2, testing_support::test_device());
      EXPECT_LT((net.forward(x) - expected).abs().max().item<double>(), 1e-6);
      net.forward(x).sum().backward();
    });
  }
}

TEST(TensorParallel, AModuleOfTheUserThatIsCalledDirectlyIsNamed) {
  const ParallelPlan plan{{"gated", PrepareInput{TensorLayout::Sequence, TensorLayout::Copied}},
                          {"gated.w1", ColumnParallel{TensorLayout::Copied}},
                          {"gated.w3", ColumnParallel{TensorLayout::Copied}},
                          {"gated.w2", RowParallel{.output = TensorLayout::Sequence}}};
  run_ranks(2, [&](World& world) {
    DirectImpl net(/*any=*/false);
    const auto tensor = parallelize_module(net, world.group(), plan, {.replicas = ReplicaStart::Broadcast});
    materialize(net, 2, testing_support::test_device());
    std::string refused;
    try {
      net.forward(at::ones({1, 2, 4})).sum().backward();
    } catch (const ConfigError& error) {
      refused = error.what();
    }
    EXPECT_THAT(refused, AllOf(HasSubstr("PrepareInput of 'gated'"), HasSubstr("`layer(x)` for `layer->forward(x)`")));
  });
}

/// libtorch gives the parameters other data, which says nothing of the whole that they are parts of: the parameters know it themselves.
TEST(TensorParallel, AnotherDtypeAfterTheCutKeepsThePartsAndAnotherShapeIsRefused) {
  run_ranks(2, [](World& world) {
    TokenNet net = on_meta([] { return TokenNet(); });
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(/*sequence=*/true));
    materialize(net, 7, testing_support::test_device());
    const Sample batch = sample(3, 8, 29);
    net->eval();  // no dropout
    const double loss = net(batch.tokens, batch.labels).item<double>();
    const Slice part = nn::slice_of(net->embed->weight);
    net->to(at::kBFloat16);
    EXPECT_NEAR(net(batch.tokens, batch.labels).item<double>(), loss, 0.02 * loss);
    EXPECT_EQ(nn::slice_of(net->embed->weight), part);
    net->norm->weight.set_data(at::ones({3}, net->norm->weight.options().requires_grad(false)));
    EXPECT_THAT(testing_support::refusal([&] { net(batch.tokens, batch.labels); }), AllOf(HasSubstr("'norm.weight'"), HasSubstr("data of another shape")));
  });
}

struct EvenImpl : nn::Module {
  EvenImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x)); }
  nn::Linear up{4, 6}, down{6, 4};
};
TESSERA_MODULE(Even);

/// Ranks that all hold one rank's parts would compute another model, and nothing of its shapes says so.
TEST(TensorParallel, OneRanksPartsOnAllRanksAreRefused) {
  run_ranks(2, [&](World& world) {
    Even net;
    const auto tensor = parallelize_module(*net, world.group(), {{"up", ColumnParallel{}}, {"down", RowParallel{}}}, {.replicas = ReplicaStart::Broadcast});
    const at::Tensor x = at::ones({2, 4});
    const auto pass = [&] { net(x).sum().backward(); };
    std::vector<at::Tensor> own, first;
    for (const at::Tensor& parameter : net->parameters()) {
      own.push_back(parameter.detach().clone());
      const at::Tensor whole = at::empty({2 * parameter.numel()}, parameter.options().requires_grad(false));
      comm::all_gather(world.group(), whole, parameter.detach().reshape({-1}).contiguous());
      first.push_back(whole.narrow(0, 0, parameter.numel()).view(parameter.sizes()).clone());
    }
    const auto give = [&](const std::vector<at::Tensor>& values) {
      size_t i = 0;
      for (const at::Tensor& parameter : net->parameters()) parameter.set_data(values[i++].clone());
    };
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      net(x);
    };
    std::string refused_once;
    const auto pass_or_refusal = [&] {
      try {
        pass();
      } catch (const ConfigError& error) {
        refused_once = error.what();
      }
    };
    const auto refused = AllOf(HasSubstr("'up.weight' and all other parts have the same values on every rank"), HasSubstr("checkpoint::load"));
    give(first);
    pass();
    EXPECT_THAT(testing_support::refusal(pass), refused);
    evaluate();
    EXPECT_THAT(testing_support::refusal(evaluate), refused);
    for (int alone = 0; alone < 4 && world.rank() == 0; ++alone) {  // a layer that waits for nobody
      const at::NoGradGuard no_grad;
      net->up(x);
    }
    give(own);
    for (int step = 0; step < 8; ++step) pass();
    give(first);
    for (int step = 0; step < 16; ++step) {  // as a loop goes on: an update makes them differ
      pass_or_refusal();
      const at::NoGradGuard no_grad;
      for (const at::Tensor& part : {net->up->weight, net->down->weight}) part.add_(0.1 * (1 + world.rank()));
    }
    EXPECT_THAT(refused_once, refused);
    give(own);
    for (int step = 0; step < 32; ++step) pass();
    const at::Tensor kept = own[0];  // one part that is alike, beside others that are not, may be meant so
    own[0] = first[0];
    give(own);
    for (int step = 0; step < 8; ++step) pass();
    net->up->weight.set_data(first[0].clone());  // nor is one that alone was given
    for (int step = 0; step < 16; ++step) pass();
    own[0] = kept;
    give(own);
    for (int step = 0; step < 32; ++step) pass();
    net->up->weight.set_data(at::eye(net->up->weight.size(0), net->up->weight.size(1)).roll(world.rank(), 1));  // as large a sum, in another order
    for (int step = 0; step < 64; ++step) pass();
  });
}

/// A model that grows between its naming and its cut: a rank's part may have the shape that the whole had.
TEST(TensorParallel, APartOfTheShapeThatTheWholeHadIsAPart) {
  run_ranks(2, [&](World& world) {
    const auto user = std::make_shared<int>();
    for (const bool used : {false, true}) {
      torch::nn::ModuleList grown(nn::Embedding(5, 3));
      const at::Tensor of_grown = grown->parameters().front();
      nn::assign_paths(*grown);
      if (used) nn::add_user(of_grown, user);  // more is known of it than its name
      of_grown.set_data(at::arange(30, at::kFloat).view({10, 3}));
      nn::assign_paths(*grown);
      of_grown.set_data(of_grown.detach().clone());
      if (!used) EXPECT_EQ(nn::slice_of(of_grown).name, "0.weight");
      const auto tensor = parallelize_module(*grown, world.group(), {{"0", VocabParallelEmbedding{}}}, {.replicas = ReplicaStart::Trust});
      EXPECT_EQ(nn::slice_of(of_grown), Slice::along("0.weight", {10, 3}, 0, 5 * world.rank(), 5)) << used;
      EXPECT_EQ(of_grown[0][0].item<double>(), 15 * world.rank());
      grown->to(at::kDouble);
      EXPECT_EQ(nn::slice_of(of_grown), Slice::along("0.weight", {10, 3}, 0, 5 * world.rank(), 5)) << used;
    }
  });
}

/// As weights are tied: the second layer's own stays registered, and computes nothing.
struct TiedSquareImpl : nn::Module {
  TiedSquareImpl() {
    register_module("a", a);
    register_module("b", b);
    b->weight = a->weight;
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
  nn::Linear a{6, 6}, b{6, 6};
};
TESSERA_MODULE(TiedSquare);

TEST(TensorParallel, TiedWeightsAreCutAlikeOrRefusedByName) {
  run_ranks(2, [&](World& world) {
    const auto refusal = [&](const ParallelPlan& plan) {
      TiedSquare net;
      return testing_support::refusal([&] { (void)parallelize_module(net, world.group(), plan, {.replicas = ReplicaStart::Broadcast}); });
    };
    const ColumnParallel whole{.output = TensorLayout::Replicated};
    EXPECT_THAT(refusal({{"a", ColumnParallel{}}, {"b", RowParallel{}}}),
                AllOf(HasSubstr("RowParallel of 'b'"), HasSubstr("ColumnParallel of 'a'"), HasSubstr("untie")));
    EXPECT_THAT(refusal({{"a", whole}}), AllOf(HasSubstr("'b' shares a weight"), HasSubstr("ColumnParallel of 'a'")));
    TiedSquare net;
    EXPECT_NO_THROW((void)parallelize_module(net, world.group(), {{"a", whole}, {"b", whole}}, {.replicas = ReplicaStart::Broadcast}));
  });
}

/// Two blocks that lie at two places each.
struct AlternatingImpl : nn::Module {
  AlternatingImpl() {
    for (const Gated& block : {a, b, a, b}) layers->push_back(block);
    register_module("layers", layers);
    testing_support::fill_parameters(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (Gated* block : {&a, &b, &a, &b}) x = x + (*block)(x);
    return x;
  }
  Gated a{10, 17}, b{10, 17};
  torch::nn::ModuleList layers;
};
TESSERA_MODULE(Alternating);

TEST(TensorParallel, ALayerAtSeveralPlacesIsCutOnce) {
  const at::Tensor x = testing_support::random_tensor({3, 4, 10}, "rounds");
  Alternating whole;
  const at::Tensor expected = whole(x);
  run_ranks(2, [&](World& world) {
    Alternating net;
    const auto parallel =
        parallelize_module(net, world.group(), {{"layers.*.w1", ColumnParallel{}}, {"layers.*.w3", ColumnParallel{}}, {"layers.*.w2", RowParallel{}}});
    EXPECT_LT((net(x) - expected).abs().max().item<double>(), 1e-4 * expected.abs().max().item<double>());
  });
}

/// tokens [S] -> embedding [S, D] -> dropout -> gated: the sequence is dimension 0.
struct OneSequenceImpl : nn::Module {
  OneSequenceImpl() {
    register_module("embed", embed);
    register_module("drop", drop);
    register_module("gated", gated);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& tokens) { return gated(drop(embed(tokens))); }
  nn::Embedding embed{29, 10};
  nn::Dropout drop{0.5};
  Gated gated{10, 17};
};
TESSERA_MODULE(OneSequence);

TEST_P(WorldSizes, MasksOfASequenceWithoutABatchAreThoseOfOneDevice) {
  const auto [ranks, stated] = GetParam();
  const at::Tensor tokens = sample(1, 11, 29).tokens[0];
  const auto made = [&](OneSequence& net) {
    const nn::SampleScope scope({.seed = 3, .step = 2, .first_sample = 4, .seq_len = stated ? 11 : 0});
    return net(tokens);
  };
  const auto build = [] {
    auto net = on_meta([] { return OneSequence(); });
    return net;
  };
  OneSequence whole = build();
  materialize(whole, 5);
  const at::Tensor want = made(whole).detach();
  const auto stream = TensorLayout::Sequence;
  run_ranks(ranks, [&](World& world) {
    OneSequence net = build();
    const auto tensor = parallelize_module(net, world.group(),
                                           {{"embed", VocabParallelEmbedding{.output = stream}},
                                            {"drop", SequenceParallel{}},
                                            {"gated", PrepareInput{.from = stream, .to = TensorLayout::Copied}},
                                            {"gated.w1", ColumnParallel{.input = TensorLayout::Copied}},
                                            {"gated.w3", ColumnParallel{.input = TensorLayout::Copied}},
                                            {"gated.w2", RowParallel{}}});
    materialize(net, 5);
    const at::Tensor y = made(net).detach();
    EXPECT_LT((y - want).abs().max().item<double>(), 1e-5);
  });
}

/// An encoder's sequence and a decoder's, which is cut behind it.
TEST(TensorParallel, SequencesOfTwoLengthsAreRefusedByName) {
  const auto stream = TensorLayout::Sequence;
  run_ranks(2, [&](World& world) {
    OneSequence net;
    const auto tensor = parallelize_module(net, world.group(),
                                           {{"embed", VocabParallelEmbedding{.output = stream}},
                                            {"drop", SequenceParallel{}},
                                            {"gated.w1", ColumnParallel{.input = stream}},
                                            {"gated.w3", ColumnParallel{.input = stream}},
                                            {"gated.w2", RowParallel{}}},
                                           {.replicas = ReplicaStart::Broadcast});
    const at::Tensor first = net->embed(sample(1, 8, 29).tokens), second = net->embed(sample(1, 12, 29).tokens);
    EXPECT_NO_THROW(net->drop(second));
    EXPECT_THAT(testing_support::refusal([&] { net->drop(first); }), AllOf(HasSubstr("'drop' takes a part of 4 positions"), HasSubstr("one length")));
    EXPECT_THAT(testing_support::refusal([&] { net->gated(first); }), AllOf(HasSubstr("'gated.w1'"), HasSubstr("one length")));
  });
}

/// What the first has said of all parameters the second would not change.
TEST(TensorParallel, OnePlanIsForTheWholeModel) {
  run_ranks(2, [&](World& world) {
    TokenNet net = on_meta([] { return TokenNet(); });
    auto tensor = parallelize_module(net, world.group(), {{"gated0.w1", ColumnParallel{}}, {"gated0.w3", ColumnParallel{}}, {"gated0.w2", RowParallel{}}});
    const ParallelPlan second{{"gated1.w1", ColumnParallel{}}, {"gated1.w3", ColumnParallel{}}, {"gated1.w2", RowParallel{}}};
    EXPECT_THAT(testing_support::refusal([&] { (void)parallelize_module(net, world.group(), second); }),
                AllOf(HasSubstr("'gated0.w1"), HasSubstr("one plan for the whole model")));
    tensor.reset();
    EXPECT_THAT(testing_support::refusal([&] { (void)parallelize_module(net, world.group(), second); }), HasSubstr("'gated0.w1"));
  });
}

TEST(TensorParallel, GradientsOfTheWholeAreClearedBeforeTheCut) {
  run_ranks(2, [](World& world) {
    TokenNet net = made();
    forward_backward(net, sample(2, 7, 29));
    EXPECT_THAT(testing_support::refusal([&] { (void)parallelize_module(net, world.group(), token_net_plan(false)); }),
                AllOf(HasSubstr("has a gradient of an earlier pass"), HasSubstr("zero_grad()")));
    net->zero_grad();
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(false));
    EXPECT_NO_THROW(forward_backward(net, sample(2, 7, 29)));
  });
}

/// By itself a part of a layer computes something of the right shape.
TEST(TensorParallel, LayersWithoutTheirHandleAreRefusedByName) {
  const Sample batch = sample(2, 7, 29);
  run_ranks(2, [&](World& world) {
    TokenNet net = made();
    auto tensor = parallelize_module(net, world.group(), token_net_plan(false));
    forward_backward(net, batch);
    tensor.reset();
    EXPECT_THAT(testing_support::refusal([&] { forward_backward(net, batch); }),
                AllOf(HasSubstr("parallelize_module: 'embed' is called"), HasSubstr("const auto parallel = ")));
  });
}

/// Parts of models of other seeds would make up one that nobody drew, and what is not cut would differ for good.
TEST(TensorParallel, RanksThatAreSeededApartAreRefusedOrTakeRankZeros) {
  const Sample batch = sample(2, 7, 29);
  const Reference expected = reference(batch);
  run_ranks(3, [&](World& world) {
    const auto own = [&] {
      TokenNet net = made();
      const at::NoGradGuard no_grad;
      if (world.rank() == 2) net->norms[1]->bias.add_(1);
      return net;
    };
    TokenNet net = own();
    EXPECT_THAT(testing_support::refusal([&] { (void)parallelize_module(net, world.group(), token_net_plan(false)); }),
                AllOf(HasSubstr("parallelize_module: the replicas differ: parameter 'norm1.bias'"), HasSubstr("is another one on rank 2")));
    TokenNet same = own();
    const auto tensor = parallelize_module(same, world.group(), token_net_plan(false), {.replicas = ReplicaStart::Broadcast});
    EXPECT_EQ(difference_from(*same, expected.values, /*values=*/true), 0);
  });
}

/// A name is all that ties a group to the terms.
TEST(TensorParallel, TermsAreSummedOverTheGroupOfThePlanOrRefused) {
  run_ranks(2, [&](World& world) {
    TokenNet net = on_meta([] { return TokenNet(); });
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(/*sequence=*/true));
    materialize(net, 7, testing_support::test_device());
    const comm::GroupInfo info{.name = "other", .rank = world.rank(), .size = 2, .timeout = std::chrono::seconds(60)};
    const comm::Group other(info, world.group().engine());
    forward_backward(net, sample(3, 8, 29));
    EXPECT_THAT(testing_support::refusal([&] { nn::sum_terms(other, nn::unique_parameters(*net)); }),
                AllOf(HasSubstr("parallel->group()"), HasSubstr("'other'")));
    EXPECT_NO_THROW(nn::sum_terms(tensor->group(), nn::unique_parameters(*net)));
  });
}

TEST(TensorParallel, Refusals) {
  run_ranks(2, [](World& world) {
    const auto refusal = [&](const ParallelPlan& plan) -> std::string {
      TokenNet net = on_meta([] { return TokenNet(TokenNetSizes{.dim = 10, .hidden = 17, .vocabulary = 1}); });
      try {
        (void)parallelize_module(net, world.group(), plan);
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_THAT(refusal({{"gatd0.w1", ColumnParallel{}}}), HasSubstr("nearest path is 'gated0.w1'"));
    EXPECT_THAT(refusal({}), HasSubstr("the plan has no entries"));
    EXPECT_THAT(refusal({{"gated*.w4", ColumnParallel{}}}), HasSubstr("nearest path is 'gated0.w"));
    EXPECT_THAT(refusal({{"gated0", Gives{.layout = TensorLayout::Features}}}), HasSubstr("known to the layers alone, but for heads"));
    EXPECT_THAT(refusal({{"gated0.w1", ColumnParallel{}}, {"gated0.w1", Gives{.layout = TensorLayout::Replicated}}}),
                HasSubstr("Gives of 'gated0.w1': the plan gives this module to ColumnParallel"));
    EXPECT_THAT(refusal({{"norm0", ColumnParallel{}}}), AllOf(HasSubstr("ColumnParallel of 'norm0': it is no nn::Linear")));
    EXPECT_THAT(refusal({{"gated0.w1", ColumnParallel{}}, {"gated0.*", RowParallel{}}}),
                HasSubstr("RowParallel of 'gated0.w1': the plan gives this module to ColumnParallel"));
    EXPECT_THAT(refusal({{"gated0.w1", ColumnParallel{.input = TensorLayout::Features}}}),
                HasSubstr("its input is sharded on features and copied is asked for: there is no way between them"));
    EXPECT_THAT(refusal({{"gated0.w2", RowParallel{.output = TensorLayout::Partial}}}), HasSubstr("would have the bias added once a rank"));
    EXPECT_THAT(refusal({{"embed", VocabParallelEmbedding{}}}), HasSubstr("model.vocab_size = 1 cannot be cut over more ranks"));
    EXPECT_THAT(refusal({{"gated0", PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Features}}}), HasSubstr("known to the layers alone"));
    EXPECT_THAT(refusal({{"gated0.w1", ColumnParallel{.cut = FeatureCut::query_heads(4, 2)}}}), HasSubstr("17 features are no multiple of 4 heads"));
    EXPECT_THAT(refusal({{"gated0.w1", ColumnParallel{.cut = {.heads = 4}}}}), HasSubstr("ColumnParallel of 'gated0.w1': heads say nothing"));
    EXPECT_THAT(refusal({{"gated0.w2", RowParallel{.cut = {.kv_heads = 4}}}}), HasSubstr("RowParallel of 'gated0.w2': heads say nothing"));
  });
}

}  // namespace
}  // namespace tessera
