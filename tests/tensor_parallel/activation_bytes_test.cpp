#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"

/// A transformer layer as users write it, with attention in plain operators and dropout masks that are kept, and what of it lives from forward to backward once
/// it is cut: the formulas of Korthikanti et al. (arXiv:2205.05198), which our own models stay below (tests/train/tensor_cost_test.cpp).
namespace tessera {
namespace {

/// x with a mask of one byte an element; in shape alone.
struct MaskedImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * at::ones(x.sizes(), x.options().dtype(at::kBool)); }
};
TESSERA_MODULE(Masked);

struct PlainAttentionImpl : nn::Module {
  PlainAttentionImpl(int64_t dim, int64_t heads) : features(dim / heads), wq(dim, dim), wk(dim, dim), wv(dim, dim), wo(dim, dim) {
    register_module("wq", wq);
    register_module("wk", wk);
    register_module("wv", wv);
    register_module("drop", drop);
    register_module("wo", wo);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {-1, features}).transpose(1, 2); };
    const at::Tensor scores = at::matmul(heads(wq(x)), heads(wk(x)).transpose(-2, -1)) * 0.125;
    return wo(at::matmul(drop(at::softmax(scores, -1)), heads(wv(x))).transpose(1, 2).flatten(-2));
  }
  int64_t features;
  nn::Linear wq, wk, wv, wo;
  Masked drop;
};
TESSERA_MODULE(PlainAttention);

struct PlainFeedForwardImpl : nn::Module {
  explicit PlainFeedForwardImpl(int64_t dim) : w1(dim, 4 * dim), w2(4 * dim, dim) {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(at::gelu(w1(x))); }
  nn::Linear w1, w2;
};
TESSERA_MODULE(PlainFeedForward);

struct PlainLayerImpl : nn::Module {
  PlainLayerImpl(int64_t dim, int64_t heads) : norm1(nn::LayerNormOptions({dim})), norm2(nn::LayerNormOptions({dim})), attention(dim, heads), ffn(dim) {
    register_module("norm1", norm1);
    register_module("attention", attention);
    register_module("drop1", drop1);
    register_module("norm2", norm2);
    register_module("ffn", ffn);
    register_module("drop2", drop2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + drop1(attention(norm1(x)));
    return h + drop2(ffn(norm2(h)));
  }
  nn::LayerNorm norm1, norm2;
  PlainAttention attention;
  PlainFeedForward ffn;
  Masked drop1, drop2;
};
TESSERA_MODULE(PlainLayer);

struct Sizes {
  int64_t s, b, h, a;
  int t;
};

struct PlainNetImpl : nn::Module {
  PlainNetImpl(const Sizes& sizes, int layers) : embed(64, sizes.h) {
    register_module("embed", embed);
    for (int i = 0; i < layers; ++i) register_module("layer" + std::to_string(i), this->layers.emplace_back(sizes.h, sizes.a));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = embed(tokens);
    for (auto& layer : layers) h = layer(h);
    return h;
  }
  nn::Embedding embed;
  std::vector<PlainLayer> layers;
};
TESSERA_MODULE(PlainNet);

ParallelPlan plan_of(const Sizes& sizes, bool sequence) {
  const TensorLayout stream = sequence ? TensorLayout::Sequence : TensorLayout::Replicated;
  const FeatureCut heads = FeatureCut::query_heads(sizes.a, sizes.a);
  ParallelPlan plan{{"embed", VocabParallelEmbedding{.output = stream}}};
  for (const char* part : {"attention", "ffn"}) {
    plan.emplace_back(std::string("layer*.") + part, PrepareInput{.from = stream, .to = TensorLayout::Copied});
  }
  for (const char* layer : {"wq", "wk", "wv"}) {
    plan.emplace_back(std::string("layer*.attention.") + layer, ColumnParallel{.input = TensorLayout::Copied, .cut = heads});
  }
  plan.emplace_back("layer*.attention.wo", RowParallel{.output = stream, .cut = heads});
  plan.emplace_back("layer*.ffn.w1", ColumnParallel{.input = TensorLayout::Copied});
  plan.emplace_back("layer*.ffn.w2", RowParallel{.output = stream});
  if (sequence) {
    for (const char* pattern : {"layer*.norm*", "layer*.drop*"}) plan.emplace_back(pattern, SequenceParallel{});
  }
  return plan;
}

int64_t kept(const Sizes& sizes, bool sequence, int layers, int rank) {
  const auto world = comm::World::dry(sizes.t, rank, std::make_shared<comm::Recorder>());
  PlainNet net = on_meta([&] { return PlainNet(sizes, layers); });
  net->to(at::kBFloat16);
  const auto tensor = parallelize_module(net, world.group(), plan_of(sizes, sequence));
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const at::Tensor tokens = at::empty({sizes.b, sizes.s}, at::TensorOptions(at::kLong).device(at::kMeta));
  const at::Tensor result = net(tokens);
  return tracker.current();
}

/// Of one layer and all ranks together, in terms of s b h on one.
double per_element(const Sizes& sizes, bool sequence) {
  int64_t bytes = 0;
  for (int rank = 0; rank < sizes.t; ++rank) bytes += kept(sizes, sequence, 2, rank) - kept(sizes, sequence, 1, rank);
  return static_cast<double>(bytes) / static_cast<double>(sizes.t * sizes.s * sizes.b * sizes.h);
}

TEST(ActivationBytes, OfAPlainLayerAreThoseOfTheFormulas) {
  for (const Sizes& sizes : {Sizes{512, 2, 1024, 16, 2},
                             {512, 1, 1024, 16, 4},
                             {384, 1, 768, 12, 3},
                             {256, 2, 2048, 16, 8},
                             {509, 1, 1152, 9, 2},
                             {509, 1, 1152, 9, 4},
                             {1021, 1, 640, 10, 8}}) {
    SCOPED_TRACE(::testing::Message() << "s " << sizes.s << " b " << sizes.b << " h " << sizes.h << " a " << sizes.a << " t " << sizes.t);
    const double t = sizes.t, scores = 5.0 * static_cast<double>(sizes.a * sizes.s) / static_cast<double>(sizes.h);
    const double whole = 10 + (24 + scores) / t, cut = (34 + scores) / t;
    EXPECT_NEAR(per_element(sizes, false), whole, 0.01 * whole);
    EXPECT_NEAR(per_element(sizes, true), cut, 0.01 * cut);
  }
}

}  // namespace
}  // namespace tessera
