// What check_parallel_plan follows, and what it refuses, operator by operator: every call that passes gives what one process gives.

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/kernels/attention.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/nn/sharing.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr int64_t kBatch = 2, kLength = 6, kDim = 8, kHeads = 6, kHeadDim = 4, kWide = kHeads * kHeadDim;

struct SitesImpl;

/// What a model of the user does before its column-wise layers, between them and the row-wise one, and behind that.
struct Written {
  std::function<at::Tensor(SitesImpl&, const at::Tensor& x)> before;
  std::function<at::Tensor(SitesImpl&, const at::Tensor& u, const at::Tensor& v)> between;
  std::function<at::Tensor(SitesImpl&, const at::Tensor& y, const at::Tensor& x)> behind;
  int64_t width = kWide;  ///< of what w2 takes
};

struct SitesImpl : nn::Module {
  explicit SitesImpl(const Written& written)
      : written(written),
        w1(nn::LinearOptions(kDim, kWide)),
        w3(nn::LinearOptions(kDim, kWide)),
        w2(nn::LinearOptions(written.width, kDim).bias(false)),
        gate(kDim, kDim),
        project(kDim, kDim),
        norm(nn::LayerNormOptions({kDim})),
        head_norm(nn::LayerNormOptions({kHeadDim})),
        positions(kLength, kDim) {
    register_module("w1", w1);
    register_module("w3", w3);
    register_module("w2", w2);
    register_module("gate", gate);
    register_module("project", project);
    register_module("norm", norm);
    register_module("head_norm", head_norm);
    register_module("positions", positions);
    gamma = register_parameter("gamma", at::empty({kDim}));
    nn::set_init(gamma, nn::InitRule::uniform(0.5, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = written.before ? written.before(*this, x) : x;
    const at::Tensor u = w1(h), v = w3(h);
    const at::Tensor y = w2(written.between ? written.between(*this, u, v) : u * v);
    return written.behind ? written.behind(*this, y, x) : y;
  }
  Written written;
  nn::Linear w1, w3, w2, gate, project;
  nn::LayerNorm norm, head_norm;
  nn::Embedding positions;
  at::Tensor gamma;
};
TESSERA_MODULE(Sites);

struct SitesHolderImpl : nn::Module {
  explicit SitesHolderImpl(const Written& written) : net(written) { register_module("net", net); }
  at::Tensor forward(const at::Tensor& x) { return net(x); }
  Sites net;
};
TESSERA_MODULE(SitesHolder);

ParallelPlan plan_of(TensorLayout stream, bool heads) {
  const FeatureCut cut = heads ? FeatureCut::query_heads(kHeads, kHeads) : FeatureCut{};
  ParallelPlan plan{{"net", PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Copied}},
                    {"net.w1", ColumnParallel{.input = TensorLayout::Copied, .cut = cut}},
                    {"net.w3", ColumnParallel{.input = TensorLayout::Copied, .cut = cut}},
                    {"net.w2", RowParallel{.output = stream, .cut = cut}}};
  if (stream != TensorLayout::Replicated) plan.emplace_back("net", PrepareOutput{.from = stream, .to = TensorLayout::Replicated});
  if (stream == TensorLayout::Sequence) {
    for (const char* path : {"net.norm", "net.project", "net.positions"}) plan.emplace_back(path, SequenceParallel{});
    plan.emplace_back("net.positions", PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Sequence});
  }
  return plan;
}

std::string refusal_of(const Written& written, const ParallelPlan& plan, int ranks) {
  SitesHolder net = on_meta([&] { return SitesHolder(written); });
  try {
    check_parallel_plan(*net, ranks, plan, [&] { net(at::empty({kBatch, kLength, kDim}, at::kMeta)); });
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// The result and every gradient of the plan on `ranks` ranks are those of one process.
void expect_parity(const Written& written, const ParallelPlan& plan, int ranks) {
  const at::Tensor x = at::sin(at::arange(kBatch * kLength * kDim, at::kFloat)).view({kBatch, kLength, kDim}).to(at::get_default_dtype_as_scalartype());
  const auto weighted = [](const at::Tensor& y) { return (y * at::cos(at::arange(y.numel(), at::kFloat)).view(y.sizes())).sum(); };
  SitesHolder whole = on_meta([&] { return SitesHolder(written); });
  materialize(whole, 7, testing_support::test_device());
  const at::Tensor expected = whole(x);
  weighted(expected).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& parameter : nn::unique_parameters(*whole)) gradients[parameter.name] = parameter.tensor.grad();
  run_ranks(ranks, [&](World& world) {
    SitesHolder net = on_meta([&] { return SitesHolder(written); });
    const auto tensor = parallelize_module(net, world.group(), plan);
    materialize(net, 7, testing_support::test_device());
    const at::Tensor y = net(x);
    ASSERT_EQ(y.sizes(), expected.sizes());
    EXPECT_LT((y - expected).abs().max().item<double>(), 1e-5 * (1 + expected.abs().max().item<double>()));
    weighted(y).backward();
    for (const auto& parameter : nn::unique_parameters(*net)) {  // those of sequence parallelism have one on all ranks or on none
      if (!parameter.tensor.grad().defined()) parameter.tensor.mutable_grad() = at::zeros_like(parameter.tensor);
    }
    nn::sum_terms(tensor->group(), nn::unique_parameters(*net));
    for (const auto& parameter : nn::unique_parameters(*net)) {
      const at::Tensor of_whole = gradients.at(parameter.name);
      const at::Tensor part = of_whole.defined() ? take(of_whole, nn::slice_of(parameter.tensor)) : at::zeros_like(parameter.tensor);
      const double largest = of_whole.defined() ? of_whole.abs().max().item<double>() : 0;
      EXPECT_LE((parameter.tensor.grad() - part).abs().max().item<double>(), 1e-5 * largest + 1e-7) << parameter.name;
    }
  });
}

void expect_followed(const char* name, const Written& written, TensorLayout stream = TensorLayout::Replicated, bool heads = false) {
  SCOPED_TRACE(name);
  const ParallelPlan plan = plan_of(stream, heads);
  for (const int ranks : heads ? std::vector{2, 4, 6} : std::vector{2}) {
    SCOPED_TRACE(ranks);
    const std::string said = refusal_of(written, plan, ranks);
    EXPECT_EQ(said, "");
    if (said.empty()) expect_parity(written, plan, ranks);
  }
}

void expect_refused(const char* name, const Written& written, const char* why, TensorLayout stream = TensorLayout::Replicated, bool heads = false) {
  EXPECT_THAT(refusal_of(written, plan_of(stream, heads), 2), HasSubstr(why)) << name;
}

using CallBetween = decltype(Written::between);
using CallBehind = decltype(Written::behind);
using CallBefore = decltype(Written::before);

at::Tensor heads_of(const at::Tensor& u) { return u.view({u.size(0), u.size(1), -1, kHeadDim}).transpose(1, 2); }
at::Tensor merged(const at::Tensor& u) { return u.transpose(1, 2).flatten(-2); }
at::Tensor attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) * 0.5;
  const at::Tensor future = at::ones({kLength, kLength}, q.options().dtype(at::kBool)).triu(1);
  return at::matmul(scores.masked_fill(future, -1e9).softmax(-1), v);
}
at::Tensor indices(const at::Tensor& like, std::vector<int64_t> values) {
  return like.is_meta() ? at::empty({static_cast<int64_t>(values.size())}, like.options().dtype(at::kLong)) : at::tensor(values, at::kLong);
}

TEST(LayoutRules, FeaturesAreFollowed) {
  const std::vector<std::pair<const char*, CallBetween>> calls{
      {"unary", [](auto&, auto& u, auto&) { return at::gelu(u) + u.sigmoid().square() - u.clamp(-1, 1).exp() + u.tanh().abs().sqrt().pow(3); }},
      {"binary", [](auto&, auto& u, auto& v) { return at::where(u > v, u * v, u / (v.square() + 1)) + at::maximum(u, v).addcmul(u, v, 2) - (1 - u); }},
      {"constants",
       [](auto&, auto& u, auto& v) {
         return (u * at::ones({kLength, 1}, u.options())).masked_fill(at::ones({kLength, 1}, u.options().dtype(at::kBool)).tril(-2), 0) + v * 2;
       }},
      {"made anew", [](auto&, auto& u, auto&) { return u + at::ones_like(u) * 3 + at::zeros_like(u) + u.new_full({1}, 2); }},
      {"in place", [](auto&, auto& u, auto& v) { return (u * 2).add_(v).mul_(v).relu_(); }},
      {"swiglu", [](auto&, auto& u, auto& v) { return kernels::swiglu(u, v); }},
      {"cast", [](auto&, auto& u, auto&) { return u.to(at::kDouble).to(at::kFloat).contiguous().clone(); }},
      {"reduced", [](auto&, auto& u, auto&) { return u - u.mean(1, true) + u.amax({1}, true) * u.prod(1, true) + u.sum(0, true) + u.square().sum({0, 1}); }},
      {"ordered",
       [](auto&, auto& u, auto&) { return u.softmax(1) + u.cumsum(1) + std::get<0>(u.sort(1)) + std::get<0>(u.topk(1, 1)) + std::get<0>(u.max(1, true)); }},
      {"picked", [](auto&, auto& u, auto&) { return u * u.select(1, 0).unsqueeze(1) + u.narrow(1, 2, 1) + u.index_select(1, indices(u, {1, 1, 0, 2, 3, 5})); }},
      {"lists",
       [](auto&, auto& u, auto& v) {
         const auto parts = u.split(3, 1), rows = v.unbind(1), pieces = u.chunk(2, 1), uneven = v.split_with_sizes({2, 4}, 1);
         return at::cat({parts[1], parts[0]}, 1) + at::stack(rows, 1) * at::cat({pieces[1], pieces[0]}, 1) + at::cat({uneven[1], uneven[0]}, 1);
       }},
      {"padded", [](auto&, auto& u, auto&) { return at::constant_pad_nd(u, {0, 0, 1, -1}) + u; }},
      {"moved",
       [](auto&, auto& u, auto&) {
         return u.permute({2, 0, 1}).transpose(0, 1).transpose(1, 2).unsqueeze(0).squeeze(0) + u.flatten(0, 1).t().t().unflatten(0, {kBatch, -1}) +
                u.unsqueeze(1).expand({-1, 3, -1, -1}).mean(1) + u.repeat({1, 2, 1}).narrow(1, 3, kLength);
       }},
      {"viewed",
       [](auto&, auto& u, auto&) { return u.view({-1, u.size(-1)}).softmax(0).view({kBatch, kLength, -1}) + u.reshape({kBatch, 2, 3, -1}).flatten(1, 2); }},
      {"products",
       [](auto&, auto& u, auto&) {
         const at::Tensor mix = at::full({kLength, kLength}, 0.25, u.options()).tril(), rows = at::full({5, kBatch * kLength}, 0.5, u.options());
         const at::Tensor sums = at::addmm(at::ones({5, 1}, u.options()), rows, u.flatten(0, 1));
         return at::matmul(mix, u) + at::bmm(mix.unsqueeze(0).repeat({kBatch, 1, 1}), u) + at::einsum("ts,bsf->btf", {mix, u}) +
                at::mm(rows, u.flatten(0, 1)).sum(0) + sums.mean(0);
       }},
      {"taken apart", [](auto&, auto& u, auto&) { return u.unflatten(-1, {-1, 2}).softmax(-1).flatten(-2); }},
      {"gated over positions", [](auto&, auto& u, auto&) { return at::glu(u, 1).repeat({1, 2, 1}); }},
  };
  for (const auto& [name, call] : calls) expect_followed(name, {.before = {}, .between = call, .behind = {}});
  expect_followed("interleaved",
                  {.before = {}, .between = [](auto&, auto& u, auto& v) { return at::stack({u, v}, -1).flatten(-2); }, .behind = {}, .width = 2 * kWide});
  expect_followed("repeated", {.before = {}, .between = [](auto&, auto& u, auto&) { return u.repeat_interleave(2, -1); }, .behind = {}, .width = 2 * kWide});
}

TEST(LayoutRules, HeadsAreFollowed) {
  const std::vector<std::pair<const char*, CallBetween>> calls{
      {"attention", [](auto&, auto& u, auto& v) { return merged(attended(heads_of(u), heads_of(v), heads_of(u))); }},
      {"contiguous",
       [](auto&, auto& u, auto& v) { return attended(heads_of(u), heads_of(v), heads_of(v)).transpose(1, 2).contiguous().view({kBatch, kLength, -1}); }},
      {"reshaped",
       [](auto&, auto& u, auto& v) { return attended(heads_of(u), heads_of(v), heads_of(v)).permute({0, 2, 1, 3}).reshape({kBatch, kLength, -1}); }},
      {"unflattened", [](auto&, auto& u, auto&) { return u.unflatten(-1, {-1, kHeadDim}).softmax(-1).flatten(2); }},
      {"einsum",
       [](auto&, auto& u, auto& v) {
         const auto heads = [](const at::Tensor& y) { return y.unflatten(-1, {-1, kHeadDim}); };
         const at::Tensor weights = at::einsum("bqhd, bkhd -> bhqk", {heads(u), heads(v)}).softmax(-1);
         return at::einsum("bhqk,bkhd->bqhd", {weights, heads(u)}).flatten(-2);
       }},
      {"batched",
       [](auto&, auto& u, auto& v) {
         const auto rows = [](const at::Tensor& y) { return heads_of(y).reshape({-1, kLength, kHeadDim}); };
         const at::Tensor weights = at::baddbmm(at::zeros({1, 1, 1}, u.options()), rows(u), rows(v).transpose(1, 2)).softmax(-1);
         return merged(at::bmm(weights, rows(u)).view({kBatch, -1, kLength, kHeadDim}));
       }},
      {"scaled dot product",
       [](auto&, auto& u, auto& v) { return merged(at::scaled_dot_product_attention(heads_of(u), heads_of(v), heads_of(v), {}, 0, true)); }},
      {"masked",
       [](auto&, auto& u, auto& v) {
         const at::Tensor mask = at::ones({kLength, kLength}, u.options()).tril();
         return merged(at::scaled_dot_product_attention(heads_of(u), heads_of(v), heads_of(v), mask));
       }},
      {"flash", [](auto&, auto& u, auto& v) { return merged(kernels::flash_attention(heads_of(u), heads_of(v), heads_of(v), true)); }},
      {"rotated",
       [](auto&, auto& u, auto&) {
         const at::Tensor angles = at::ones({kLength, kHeadDim / 2}, u.options());
         return merged(kernels::rope(heads_of(u).transpose(1, 2), angles.cos(), angles.sin()).transpose(1, 2));
       }},
      {"normed",
       [](auto&, auto& u, auto&) {
         const at::Tensor ones = at::ones({kHeadDim}, u.options());
         return merged(at::layer_norm(heads_of(u), {kHeadDim}, ones) + kernels::rms_norm(heads_of(u), ones, 1e-5) +
                       heads_of(u) / heads_of(u).norm(2, -1, true));
       }},
  };
  for (const auto& [name, call] : calls) expect_followed(name, {.before = {}, .between = call, .behind = {}}, TensorLayout::Replicated, /*heads=*/true);
  // Without a -1 the plan says how many features a head has.
  const Written by_plan{.before = {},
                        .between = [](auto&, auto& u, auto&) { return u.view({kBatch, kLength, u.size(-1) / kHeadDim, kHeadDim}).softmax(-1).flatten(2); },
                        .behind = {}};
  EXPECT_EQ(refusal_of(by_plan, plan_of(TensorLayout::Replicated, true), 2), "");
  expect_parity(by_plan, plan_of(TensorLayout::Replicated, true), 2);
  EXPECT_THAT(refusal_of(by_plan, plan_of(TensorLayout::Replicated, false), 2), HasSubstr("may not be rearranged as the whole would be"));
  // As above, with features that are not cut by heads, and of which each rank happens to hold whole ones.
  expect_followed("attention", {.before = {}, .between = calls[0].second, .behind = {}});
}

TEST(LayoutRules, KeysAndTheirQueriesAreFollowed) {
  struct GroupedImpl : nn::Module {
    GroupedImpl(bool repeats, int64_t keys)
        : repeats(repeats), keys(keys), wq(kDim, kWide), wk(kDim, keys * kHeadDim), wv(kDim, keys * kHeadDim), wo(kWide, kDim) {
      register_module("wq", wq);
      register_module("wk", wk);
      register_module("wv", wv);
      register_module("wo", wo);
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor q = heads_of(wq(x)), k = heads_of(wk(x)), v = heads_of(wv(x));
      if (!repeats) return wo(merged(at::scaled_dot_product_attention(q, k, v, {}, 0, true, {}, /*enable_gqa=*/true)));
      const auto repeated = [&](const at::Tensor& y) {
        return y.unsqueeze(2).expand({-1, -1, kHeads / keys, -1, -1}).reshape({kBatch, -1, kLength, kHeadDim});
      };
      return wo(merged(attended(q, repeated(k), repeated(v))));
    }
    bool repeats;
    int64_t keys;
    nn::Linear wq, wk, wv, wo;
  };
  const auto plan = [](int64_t heads, int64_t keys) {
    const FeatureCut q = FeatureCut::query_heads(heads, keys), k = FeatureCut::key_value_heads(heads, keys);
    return ParallelPlan{{"wq", ColumnParallel{.cut = q}}, {"wk", ColumnParallel{.cut = k}}, {"wv", ColumnParallel{.cut = k}}, {"wo", RowParallel{.cut = q}}};
  };
  const auto refusal = [&](bool repeats, int64_t keys, int ranks, const ParallelPlan& plan) -> std::string {
    const auto net = on_meta([&] { return std::make_shared<GroupedImpl>(repeats, keys); });
    try {
      check_parallel_plan(*net, ranks, plan, [&] { net->forward(at::empty({kBatch, kLength, kDim}, at::kMeta)); });
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  const at::Tensor x = at::sin(at::arange(kBatch * kLength * kDim, at::kFloat)).view({kBatch, kLength, kDim});
  for (const auto& [repeats, keys, ranks] : {std::tuple{false, 3, 2}, {false, 3, 3}, {false, 3, 4}, {false, 2, 6}, {true, 3, 2}, {true, 2, 2}}) {
    SCOPED_TRACE(::testing::Message() << keys << " on " << ranks);
    EXPECT_EQ(refusal(repeats, keys, ranks, plan(kHeads, keys)), "");
    const auto whole = on_meta([&] { return std::make_shared<GroupedImpl>(repeats, keys); });
    nn::assign_paths(*whole);
    materialize(*whole, 3, testing_support::test_device());
    const at::Tensor expected = whole->forward(x);
    run_ranks(ranks, [&, repeats = repeats, keys = keys](World& world) {
      const auto net = on_meta([&] { return std::make_shared<GroupedImpl>(repeats, keys); });
      const auto tensor = parallelize_module(*net, world.group(), plan(kHeads, keys));
      materialize(*net, 3, testing_support::test_device());
      EXPECT_LT((net->forward(x) - expected).abs().max().item<double>(), 1e-5);
    });
  }
  // Each key is dealt with the queries of another.
  ParallelPlan other = plan(kHeads, 3);
  for (const size_t keys : {1, 2}) other[keys].second = ColumnParallel{.cut = FeatureCut::query_heads(3, 3)};
  EXPECT_EQ(refusal(false, 3, 2, other), "") << "the same as by keys";
  other[0].second = ColumnParallel{.cut = FeatureCut::query_heads(kHeads, kHeads)};
  EXPECT_THAT(refusal(false, 3, 2, other), HasSubstr("cut in different ways"));
}

TEST(LayoutRules, PositionsAreFollowed) {
  const std::vector<std::pair<const char*, CallBehind>> calls{
      {"over features", [](auto&, auto& y, auto&) { return y.softmax(-1) + y.mean(-1, true) + at::layer_norm(y, {kDim}) + y.cumsum(2) + y.norm(2, -1, true); }},
      {"over the batch", [](auto&, auto& y, auto&) { return y + y.mean(0, true) * y.select(0, 1); }},
      {"one sample", [](auto&, auto& y, auto&) { return y[0]; }},
      {"turned", [](auto&, auto& y, auto&) { return y.transpose(1, 2).softmax(1).transpose(1, 2) + y.permute({1, 0, 2}).transpose(0, 1); }},
      {"rows",
       [](auto&, auto& y, auto&) { return y.flatten(0, 1).softmax(-1).unflatten(0, {kBatch, -1}) + y.view({-1, kDim}).softmax(-1).view({kBatch, -1, kDim}); }},
      {"rows of sizes that were asked for",
       [](auto&, auto& y, auto&) {
         return y.reshape({y.size(0) * y.size(1), kDim}).exp().view({y.size(0), y.size(1), kDim}) + y.view({kBatch, y.size(1), 4, -1}).flatten(-2);
       }},
      {"lists",
       [](auto&, auto& y, auto&) {
         const auto halves = y.split(4, -1), samples = y.unbind(0);
         return at::cat({halves[1], halves[0]}, -1) + at::stack(samples, 0);
       }},
      {"constants",
       [](auto&, auto& y, auto&) {
         return at::matmul(y, at::full({kDim, kDim}, 0.1, y.options()).triu()) + at::linear(y, at::full({kDim, kDim}, 0.2, y.options()));
       }},
      {"labels", [](auto&, auto& y, auto&) { return at::einsum("bsd,de->bse", {y, at::full({kDim, kDim}, 0.1, y.options())}); }},
      {"layers of the sequence", [](auto& net, auto& y, auto&) { return net.project(net.norm(y)) + y; }},
      {"places", [](auto& net, auto& y, auto& x) { return y + net.positions(at::arange(x.size(1), x.options().dtype(at::kLong))); }},
  };
  for (const auto& [name, call] : calls) expect_followed(name, {.before = {}, .between = {}, .behind = call}, TensorLayout::Sequence);
}

TEST(LayoutRules, SumsAreFollowedWhereTheyStaySums) {
  const std::vector<std::pair<const char*, CallBehind>> calls{
      {"scaled", [](auto&, auto& y, auto&) { return y * 0.5 - y.neg() / 4 + y * at::full({kDim}, 3, y.options()); }},
      {"moved",
       [](auto&, auto& y, auto&) {
         return y.transpose(1, 2).reshape({kBatch, -1}).view({kBatch, kDim, kLength}).transpose(1, 2) + y.flatten(1).unflatten(1, {kLength, kDim});
       }},
      {"joined",
       [](auto&, auto& y, auto&) { return at::cat({y, y * 2}, 1).narrow(1, 3, kLength) + at::stack({y, y}, 0).sum(0) + y.select(1, 0).unsqueeze(1); }},
      {"reduced", [](auto&, auto& y, auto&) { return y + y.mean({0, 1}, true) + y.sum(-1, true); }},
      {"lists",
       [](auto&, auto& y, auto&) {
         const auto parts = y.chunk(2, -1);
         return at::cat({parts[1], parts[0]}, -1);
       }},
      {"cast", [](auto&, auto& y, auto&) { return y.to(at::kDouble).to(at::kFloat).clone(); }},
  };
  for (const auto& [name, call] : calls) expect_followed(name, {.before = {}, .between = {}, .behind = call}, TensorLayout::Partial);
}

TEST(LayoutRules, AnythingIsDoneToACopy) {
  expect_followed(
      "before",
      {.before = [](auto&, auto& x) { return x / x.norm() + x.softmax(1) - at::cat({x.chunk(2, 1)[1], x.chunk(2, 1)[0]}, 1); }, .between = {}, .behind = {}});
}

TEST(LayoutRules, SumsAreRefusedWhereTheyWouldNotStaySums) {
  const auto refused = [](const char* name, const CallBehind& call, const char* why = "is not max(0, a + b)") {
    expect_refused(name, {.before = {}, .between = {}, .behind = call}, why, TensorLayout::Partial);
  };
  const char* term = "would be one rank's term";
  refused("gamma", [](auto& net, auto& y, auto&) { return y * net.gamma; }, term);
  refused("linear", [](auto& net, auto& y, auto&) { return net.gate(y); }, term);
  refused("gated", [](auto& net, auto& y, auto&) { return y * net.gate(at::ones({kDim}, y.options())).sigmoid(); }, term);
  refused("constant bias", [](auto&, auto& y, auto&) { return at::linear(y, at::ones({kDim, kDim}, y.options()), at::ones({kDim}, y.options())); });
  refused("addmm",
          [](auto&, auto& y, auto&) { return at::addmm(at::ones({kDim}, y.options()), y.flatten(0, 1), at::ones({kDim, kDim}, y.options())).view(y.sizes()); });
  refused("divisor", [](auto&, auto& y, auto&) { return at::ones({kDim}, y.options()) / y; });
  refused("floor", [](auto&, auto& y, auto&) { return y.div(0.1, "floor"); });
  refused("integers", [](auto&, auto& y, auto&) { return y.to(at::kLong).to(at::kFloat); });
  refused("squared", [](auto&, auto& y, auto&) { return y * y; });
  refused("largest", [](auto&, auto& y, auto&) { return y.amax({-1}, true) + y; });
  refused("joined", [](auto&, auto& y, auto&) { return at::cat({y, at::ones_like(y).detach() * at::ones({1}, y.options())}, -1).narrow(-1, 4, 8); });
  refused("shifted", [](auto&, auto& y, auto&) { return y + 1; }, "would be added once for each");
}

TEST(LayoutRules, WhatIsCopiedMeetsNoParameter) {
  const auto refused = [](const char* name, const CallBefore& call) {
    expect_refused(name, {.before = call, .between = {}, .behind = {}}, "would be one rank's term");
  };
  refused("positions", [](auto& net, auto& x) { return x + net.positions(at::arange(kLength, x.options().dtype(at::kLong))); });
  refused("gamma", [](auto& net, auto& x) { return x * net.gamma; });
  refused("made of gamma", [](auto& net, auto& x) { return x * (net.gamma * at::ones({kLength, kDim}, x.options())); });
  refused("made of a weight", [](auto& net, auto& x) { return at::matmul(x, net.gate->weight * at::ones({kDim, kDim}, x.options())); });
  refused("lists", [](auto& net, auto& x) {
    const auto parts = x.chunk(2, 1);
    return at::cat({parts[0] * net.gamma, parts[1]}, 1);
  });
}

TEST(LayoutRules, FeaturesAreRefusedWhereItMatters) {
  const auto refused = [](const char* name, const CallBetween& call, const char* why, int64_t width = kWide) {
    for (const bool heads : {false, true}) {
      if (heads && width != kWide) continue;
      expect_refused(name, {.before = {}, .between = call, .behind = {}, .width = width}, why, TensorLayout::Replicated, heads);
    }
  };
  const char *all = "it needs all features", *order = "may not be rearranged as the whole would be", *unknown = "cannot be followed through this operator";
  refused("softmax over heads", [](auto&, auto& u, auto&) { return u.unflatten(-1, {-1, kHeadDim}).softmax(2).flatten(-2); }, all);
  refused("mean over heads", [](auto&, auto& u, auto&) { return heads_of(u).mean(1).repeat({1, 1, 3}); }, all, 12);
  refused("heads of all", [](auto&, auto& u, auto&) { return u.view({kBatch, kLength, kHeads, -1}).softmax(-1).flatten(-2); }, order);
  refused("heads of all", [](auto&, auto& u, auto&) { return at::layer_norm(u.unflatten(-1, {kHeads, -1}), {2}).flatten(-2); }, order);
  refused(
      "heads of all, by number", [](auto&, auto& u, auto&) { return u.view({kBatch, kLength, kHeads, u.size(-1) / kHeads}).softmax(-1).flatten(-2); }, order);
  refused("sizes of the whole", [](auto&, auto& u, auto&) { return u.view({kBatch, kLength, kHeads, kHeadDim}).flatten(-2); }, order);
  refused("fused gate", [](auto&, auto& u, auto&) { return u.view({kBatch, kLength, 2, -1}).select(2, 0); }, order, kWide / 2);
  refused(
      "fused gate in halves",
      [](auto&, auto& u, auto&) {
        const auto parts = u.chunk(2, -1);
        return parts[0] * parts[1];
      },
      all, kWide / 2);
  refused("side by side", [](auto&, auto& u, auto& v) { return at::cat({u, v}, -1); }, all, 2 * kWide);
  refused("with its negative", [](auto&, auto& u, auto&) { return at::cat({u, -u}, -1); }, all, 2 * kWide);
  refused("stacked", [](auto&, auto& u, auto& v) { return at::stack({u, v}, -2).flatten(-2); }, "takes", 2 * kWide);
  refused("repeated", [](auto&, auto& u, auto&) { return u.repeat({1, 1, 2}); }, all, 2 * kWide);
  refused(
      "split",
      [](auto&, auto& u, auto&) {
        const auto parts = u.split(6, -1);
        return at::cat({parts[1], parts[0]}, -1);
      },
      all);
  refused("unbound", [](auto&, auto& u, auto&) { return u * u.unbind(-1)[0].unsqueeze(-1); }, all);
  refused(
      "split by sizes",
      [](auto&, auto& u, auto&) {
        const auto parts = u.split_with_sizes({6, 6}, -1);
        return at::cat({parts[1], parts[0]}, -1);
      },
      all);
  refused("loss", [](auto&, auto& u, auto& v) { return u * at::mse_loss(u, v); }, unknown);
  refused("distance", [](auto&, auto& u, auto& v) { return u * at::dist(u, v); }, unknown);
  refused("average pool", [](auto&, auto& u, auto&) { return u * at::adaptive_avg_pool1d(u, 1); }, all);
  refused("pool of more", [](auto&, auto& u, auto&) { return u * at::adaptive_avg_pool1d(u, 2).sum(); }, "cannot be followed");
  refused("max pool", [](auto&, auto& u, auto&) { return at::max_pool1d(u, 3, 1, 1); }, "cannot be followed");
  refused("instance norm", [](auto&, auto& u, auto&) { return at::instance_norm(u, {}, {}, {}, {}, true, 0, 1e-5, false); }, "tensor parallelism: ");
  refused("index", [](auto&, auto& u, auto&) { return u.index({indices(u, {0, 1})}).repeat({1, 1, 1}); }, unknown);
  refused("order", [](auto&, auto& u, auto&) { return u * at::arange(u.size(-1), u.options()); }, "with a tensor that is whole");
  refused("drawn", [](auto&, auto& u, auto&) { return at::dropout(u, 0.5, true); }, unknown);
  refused("masked by draws", [](auto&, auto& u, auto&) { return u * at::bernoulli(at::full_like(u, 0.5)); }, unknown);
  refused(
      "in place",
      [](auto&, auto& u, auto&) {
        const at::Tensor room = at::zeros(u.sizes(), u.options());
        room.copy_(u);
        return room;
      },
      "the two do not go together");
  refused(
      "into a row",
      [](auto&, auto& u, auto&) {
        const at::Tensor room = at::zeros({1, 1, 1}, u.options());
        at::add_out(const_cast<at::Tensor&>(room), u, u);
        return room;
      },
      "tensor parallelism: ");
  refused("weight of a layer", [](auto& net, auto& u, auto&) { return u + net.w3->weight.sum(); }, "of which this rank holds a part");
  refused("head norm", [](auto& net, auto& u, auto&) { return net.head_norm(u.unflatten(-1, {-1, kHeadDim})).flatten(-2); }, "that of a part of the features");
  refused("table", [](auto&, auto& u, auto&) { return at::ones({3, 1}, u.options()).index({u.to(at::kLong)}).squeeze(-1); }, unknown);
  refused("labels", [](auto&, auto& u, auto& v) { return at::einsum("bsf,btf->bst", {u, v}).repeat({1, 1, 2}); }, all, 12);
  refused("open labels", [](auto&, auto& u, auto&) { return at::einsum("...f,sf->...f", {u, u.select(0, 0)}); }, "write all labels");
  refused(
      "alibi",
      [](auto&, auto& u, auto& v) {
        return merged(at::matmul((at::matmul(heads_of(u), heads_of(v).transpose(-2, -1)) + at::ones({kHeads, 1, 1}, u.options())), heads_of(v)));
      },
      "with a tensor that is whole");
}

TEST(LayoutRules, PositionsAreRefusedWhereItMatters) {
  const auto refused = [](const char* name, const CallBehind& call, const char* why = "it needs the whole sequence") {
    expect_refused(name, {.before = {}, .between = {}, .behind = call}, why, TensorLayout::Sequence);
  };
  const char* unknown = "cannot be followed through this operator";
  refused("turned", [](auto&, auto& y, auto&) { return y + y.transpose(1, 2).mean(2).unsqueeze(1); });
  refused("turned softmax", [](auto&, auto& y, auto&) { return y.transpose(1, 2).softmax(-1).transpose(1, 2); });
  refused("rows", [](auto&, auto& y, auto&) { return y - y.flatten(0, 1).mean(0); });
  refused("norm", [](auto&, auto& y, auto&) { return y / y.view({-1, kDim}).norm(); });
  refused("four dimensions", [](auto&, auto& y, auto&) { return y - y.unflatten(-1, {2, 4}).mean(1, true).flatten(-2); });
  refused("stacked", [](auto&, auto& y, auto&) { return y - at::stack({y, y}).mean({0, 2}).unsqueeze(1); });
  refused("attention", [](auto&, auto& y, auto&) { return at::matmul(at::matmul(y, y.transpose(1, 2)).softmax(-1), y); });
  refused("attention of heads", [](auto&, auto& y, auto&) {
    const at::Tensor h = y.unflatten(-1, {2, 4}).transpose(1, 2);
    return attended(h, h, h).transpose(1, 2).flatten(-2);
  });
  refused("attention of keys",
          [](auto&, auto& y, auto&) { return at::scaled_dot_product_attention(y.unsqueeze(1), y.unsqueeze(1), y.unsqueeze(1)).squeeze(1); });
  refused("labels", [](auto&, auto& y, auto&) { return at::einsum("bsd,btd->bst", {y, y}); });
  refused("unbound", [](auto&, auto& y, auto&) { return y * y.unbind(1)[0].unsqueeze(1); });
  refused("first position", [](auto&, auto& y, auto&) { return y + y.select(1, 0).unsqueeze(1); });
  refused("loss", [](auto&, auto& y, auto&) { return y * at::mse_loss(y, y * 2); }, unknown);
  refused("average pool", [](auto&, auto& y, auto&) { return y + at::adaptive_avg_pool1d(y.transpose(1, 2), 1).transpose(1, 2); });
  refused("moving average", [](auto&, auto& y, auto&) { return at::avg_pool1d(y.transpose(1, 2), 3, 1, 1).transpose(1, 2); }, "cannot be followed");
  refused(
      "batch norm", [](auto&, auto& y, auto&) { return at::batch_norm(y.transpose(1, 2), {}, {}, {}, {}, true, 0, 1e-5, false).transpose(1, 2); },
      "cannot be followed");
  refused(
      "instance norm", [](auto&, auto& y, auto&) { return at::instance_norm(y.transpose(1, 2), {}, {}, {}, {}, true, 0, 1e-5, false).transpose(1, 2); },
      "tensor parallelism: ");
  refused("places", [](auto&, auto& y, auto&) { return y + at::arange(y.size(1), y.options()).unsqueeze(-1); }, "with a tensor that is whole");
  refused("another length", [](auto&, auto& y, auto&) { return y.repeat_interleave(2, 1); }, "takes a part of 6 positions, and gets one of 12");
  refused("another dimension", [](auto&, auto& y, auto&) { return y.transpose(0, 1); }, "(dimension 1), and gets what is sharded on sequence (dimension 0)");
  refused("gated", [](auto& net, auto& y, auto&) { return y * net.gate(at::ones({1, kDim}, y.options())); }, "would be one rank's term");
  refused("gamma", [](auto& net, auto& y, auto&) { return y * net.gamma; }, "that of a part of the sequence");
}

/// A norm of each head is one of queries: its gradient is a term on every rank, which the style has summed.
TEST(LayoutRules, AParameterWhoseTermsAreSummedMeetsHeads) {
  Written written{.before = {}, .between = [](auto& net, auto& u, auto&) { return net.head_norm(u.unflatten(-1, {-1, kHeadDim})).flatten(-2); }, .behind = {}};
  ParallelPlan plan = plan_of(TensorLayout::Replicated, true);
  plan.emplace_back("net.head_norm", SequenceParallel{});
  for (const int ranks : {2, 4}) {
    EXPECT_EQ(refusal_of(written, plan, ranks), "");
    expect_parity(written, plan, ranks);
  }
}

/// Some operators in a row, drawn from those that users write; the same ones on a part and on the whole, however large either is.
class Drawn {
 public:
  explicit Drawn(uint32_t seed) : seed_(seed) {}

  at::Tensor operator()(at::Tensor t) const {
    std::minstd_rand random(seed_ * 7919 + 1);
    random.discard(3);
    const int steps = 1 + static_cast<int>(random() % 4);
    for (int step = 0; step < steps; ++step) t = next(t, random);
    return t;
  }

 private:
  static at::Tensor next(const at::Tensor& t, std::minstd_rand& random) {
    const auto dims = static_cast<uint32_t>(t.dim());
    const uint32_t which = random() % 36, one = random(), two = random();
    if (dims == 0) return t.exp();
    const int64_t dim = one % dims, other = two % dims;
    switch (which) {
      case 0:
        return t.transpose(dim, other);
      case 1:
        return t.flatten(std::min(dim, other), std::max(dim, other));
      case 2:
        return t.unflatten(dim, {2, -1});
      case 3:
        return t.unflatten(dim, {-1, 2});
      case 4:
        return t.unflatten(-1, {-1, kHeadDim}).transpose(1, 2);
      case 5:
        return t.softmax(dim);
      case 6:
        return t - t.mean(dim, true);
      case 7:
        return t.amax(dim, false);
      case 8:
        return t.select(dim, 0);
      case 9:
        return t * t.narrow(dim, 0, 1);
      case 10:
        return at::cat({t.chunk(2, dim).back(), t.chunk(2, dim).front()}, dim);
      case 11:
        return at::stack(t.unbind(dim), other);
      case 12:
        return at::stack({t, t * 2}, two % (dims + 1));
      case 13:
        return at::cat({t, t.sigmoid()}, dim);
      case 14:
        return t.repeat_interleave(2, dim);
      case 15:
        return t.cumsum(dim);
      case 16:
        return t.unsqueeze(two % (dims + 1));
      case 17:
        return t.squeeze();
      case 18:
        return at::matmul(t, t.transpose(-2, -1)).softmax(-1);
      case 19:
        return at::matmul(t.transpose(-2, -1).softmax(-1), t);
      case 20:
        return t.reshape({-1, 2});
      case 21:
        return t.reshape({t.size(0), -1});
      case 22:
        return t.reshape({kBatch, kLength, -1});
      case 23:
        return t.reshape({kBatch, -1, kHeadDim});
      case 24:
        return t.view({kBatch, kLength, kHeads, -1});
      case 25:
        return t.view({kBatch, kLength, -1, kHeadDim});
      case 26:
        return t.reshape({t.size(0), t.size(1), -1});
      case 27:
        return t * at::ones({kLength, 1}, t.options());
      case 28:
        return t / t.norm(2, dim, true);
      case 29:
        return at::glu(t, dim);
      case 30:
        return t + t.transpose(dim, other);
      case 31:
        return t.tril();
      case 32:
        return t.unsqueeze(2).expand({-1, -1, 3, -1}).flatten(dim, dim + 1);
      case 33:
        return at::einsum("abc,abd->acd", {t, t.exp()});
      case 34:
        return std::get<0>(t.sort(dim));
      default:
        return t.view({-1, t.size(-1)}).softmax(0).view(t.sizes());
    }
  }

  uint32_t seed_;
};

/// Whether the check lets it pass; then it gives what one process gives. Nothing where that has no result itself.
std::optional<bool> passes(const Written& written, TensorLayout stream, bool heads) {
  SitesHolder whole = on_meta([&] { return SitesHolder(written); });
  try {
    materialize(whole, 7, testing_support::test_device());
    whole(at::ones({kBatch, kLength, kDim}));
  } catch (const c10::Error&) {
    return {};
  }
  const int ranks = heads ? 3 : 2;
  std::string said;
  try {
    said = refusal_of(written, plan_of(stream, heads), ranks);
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  if (said.empty()) expect_parity(written, plan_of(stream, heads), ranks);
  return said.empty();
}

/// In fp32, sums that cancel are all noise.
struct InDouble {
  InDouble() { at::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
  ~InDouble() { at::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
};

TEST(LayoutRules, WhateverPassesGivesWhatOneProcessGives) {
  const InDouble precise;
  int run = 0, passed = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const Drawn drawn(seed);
    const auto count = [&](const std::optional<bool>& result) {
      run += result ? 1 : 0;
      passed += result.value_or(false) ? 1 : 0;
    };
    const auto between = [drawn](auto&, const at::Tensor& u, const at::Tensor&) {
      const at::Tensor t = drawn(u);
      return t.reshape({kBatch, kLength, -1});
    };
    // How wide the whole is.
    int64_t width = 0;
    try {
      width = drawn(at::ones({kBatch, kLength, kWide})).reshape({kBatch, kLength, -1}).size(-1);
    } catch (const c10::Error&) {
    }
    if (width >= 12) {
      for (const bool heads : {false, true}) {
        if (heads && width != kWide) continue;
        count(passes({.before = {}, .between = between, .behind = {}, .width = width}, TensorLayout::Replicated, heads));
      }
    }
    for (const TensorLayout stream : {TensorLayout::Sequence, TensorLayout::Partial}) {
      count(passes({.before = {}, .between = {}, .behind = [drawn](auto&, auto& y, auto&) { return drawn(y); }}, stream, false));
    }
  }
  EXPECT_GT(passed, 200) << "of " << run;
  EXPECT_GT(run - passed, 200);
}

/// What parameters have a part in is found in the memory it was written into.
TEST(LayoutRules, WhatIsWrittenIntoIsRemembered) {
  const auto refused = [](const CallBefore& call) {
    EXPECT_THAT(refusal_of({.before = call, .between = {}, .behind = {}}, plan_of(TensorLayout::Replicated, false), 2), HasSubstr("would be one rank's term"));
  };
  refused([](auto& net, auto& x) {
    const at::Tensor room = at::zeros({2, kDim}, x.options());
    room.select(0, 1).copy_(net.gamma);
    return x + room.select(0, 1);
  });
  refused([](auto& net, auto& x) {
    const at::Tensor room = at::zeros({2, kDim}, x.options()), row = room.select(0, 0);
    room.add_(net.gamma);
    return x + row;
  });
}

/// A norm whose gradient is summed over the ranks has to see a part on each.
TEST(LayoutRules, WhatIsSummedOnceAStepDoesNotMeetTheWhole) {
  Written written{.before = {}, .between = {}, .behind = [](auto& net, auto& y, auto&) { return net.norm(y); }};
  ParallelPlan plan = plan_of(TensorLayout::Replicated, false);
  EXPECT_EQ(refusal_of(written, plan, 2), "");
  plan.emplace_back("net.norm", SequenceParallel{});
  EXPECT_THAT(refusal_of(written, plan, 2), HasSubstr("would be one rank's term"));
}

}  // namespace
}  // namespace tessera
