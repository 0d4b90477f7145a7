#pragma once

#include <cmath>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn.h>

/// Models of plain libtorch, small, each with something that crosses between its layers: what splitting is tried on.
namespace tessera::testing_support {

struct ClassicLayerImpl : torch::nn::Module {
  ClassicLayerImpl() : fc(3, 3) { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) { return torch::relu(fc(x)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(ClassicLayer);

struct ClassicImpl : torch::nn::Module {
  ClassicImpl() : emb(10, 3), lm(3, 10) {
    register_module("emb", emb);
    register_module("layers", layers);
    layers->push_back(ClassicLayer());
    layers->push_back(ClassicLayer());
    register_module("lm", lm);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = emb(tokens);
    for (const auto& layer : *layers) x = layer->as<ClassicLayer>()->forward(x);
    return lm(x);
  }
  torch::nn::Embedding emb;
  torch::nn::ModuleList layers;
  torch::nn::Linear lm;
};
TORCH_MODULE(Classic);

struct EncoderImpl : torch::nn::Module {
  EncoderImpl(int64_t dim, int64_t layers, double dropout)
      : emb(50, dim),
        enc(torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(dim, 4).dim_feedforward(2 * dim).dropout(dropout)), layers),
        head(dim, 50) {
    register_module("emb", emb);
    register_module("enc", enc);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask) { return head(enc(emb(tokens), mask)); }
  torch::nn::Embedding emb;
  torch::nn::TransformerEncoder enc;
  torch::nn::Linear head;
};
TORCH_MODULE(Encoder);

struct ConvBlockImpl : torch::nn::Module {
  explicit ConvBlockImpl(int64_t channels)
      : a(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        b(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        na(channels),
        nb(channels) {
    register_module("a", a);
    register_module("na", na);
    register_module("b", b);
    register_module("nb", nb);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = nb(b(na(a(x)).relu_()));
    y += x;
    return y.relu_();
  }
  torch::nn::Conv2d a, b;
  torch::nn::BatchNorm2d na, nb;
};
TORCH_MODULE(ConvBlock);

/// With a connection from the first layer to the last, over every cut.
struct LongSkipImpl : torch::nn::Module {
  LongSkipImpl() : stem(torch::nn::Conv2dOptions(3, 8, 3).padding(1)), head(8, 5) {
    register_module("stem", stem);
    register_module("blocks", blocks);
    for (int i = 0; i < 4; ++i) blocks->push_back(ConvBlock(8));
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& image) {
    const at::Tensor first = stem(image);
    at::Tensor x = first;
    for (const auto& block : *blocks) x = block->as<ConvBlock>()->forward(x);
    return head((x + first).mean({2, 3}));
  }
  torch::nn::Conv2d stem;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(LongSkip);

struct TiedImpl : torch::nn::Module {
  TiedImpl() : emb(20, 8), norm(torch::nn::LayerNormOptions({8})) {
    register_module("emb", emb);
    register_module("layers", layers);
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(8, 8));
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = emb(tokens);
    for (const auto& layer : *layers) x = x + torch::gelu(layer->as<torch::nn::Linear>()->forward(x));
    return torch::nn::functional::linear(norm(x), emb->weight);
  }
  torch::nn::Embedding emb;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Tied);

/// Its output and its last state cross.
struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() : emb(20, 8), lstm(torch::nn::LSTMOptions(8, 8).num_layers(2).dropout(0.2)), head(8, 4) {
    register_module("emb", emb);
    register_module("lstm", lstm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto [y, state] = lstm(emb(tokens));
    return head(y) + std::get<0>(state).mean();
  }
  torch::nn::Embedding emb;
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};
TORCH_MODULE(Recurrent);

/// Integers, masks and expanded views cross; writes in place through views, and a scale without gradients.
struct OddImpl : torch::nn::Module {
  OddImpl() : emb(20, 8), a(8, 8), b(8, 8), c(8, 20), drop(0.3) {
    register_module("emb", emb);
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_module("drop", drop);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor mask = tokens > 3, places = torch::arange(tokens.size(1), tokens.options());
    const at::Tensor ids = (tokens.select(0, 0) + places).unsqueeze(0).expand({tokens.size(0), -1});
    at::Tensor y = a(emb(tokens) + emb(ids % 20));
    y.select(1, 0).mul_(2);
    at::Tensor scale;
    {
      const at::NoGradGuard no_grad;
      scale = y.abs().amax(-1, true);
    }
    y = drop(b(y / (scale + 1)).masked_fill_(mask.unsqueeze(-1), 0.5));
    y = y.index_put({std::optional<at::Tensor>(), std::optional<at::Tensor>(ids.select(0, 0).slice(0, 0, 1) * 0)}, y.sum(1, true));
    const at::Tensor half = y.slice(-1, 0, 4);
    half.relu_();
    y = torch::cat({half, y.slice(-1, 4, 8)}, -1) * torch::tensor({1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, 8.f});
    return (c(y + ids.unsqueeze(-1)) + places.unsqueeze(-1)).masked_fill(mask.unsqueeze(-1), 0).transpose(1, 2);
  }
  torch::nn::Embedding emb;
  torch::nn::Linear a, b, c;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Odd);

/// The second stage writes into what it receives.
struct WritesReceivedImpl : torch::nn::Module {
  WritesReceivedImpl() : a(4, 4), b(4, 4), n(torch::nn::LayerNormOptions({4})) {
    register_module("a", a);
    register_module("n", n);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = a(input);
    x.mul_(n->weight);
    return b(x).add_(n->bias);
  }
  torch::nn::Linear a, b;
  torch::nn::LayerNorm n;
};
TORCH_MODULE(WritesReceived);

/// Two results, one of them made by the first layer.
struct TwoResultsImpl : torch::nn::Module {
  TwoResultsImpl() : a(4, 4), b(4, 4) {
    register_module("a", a);
    register_module("b", b);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& target) {
    const at::Tensor early = a(x), late = b(early.relu());
    return {(late - target).square().sum(), early.square().mean()};
  }
  torch::nn::Linear a, b;
};
TORCH_MODULE(TwoResults);

/// Makes random numbers of its own.
struct DrawsImpl : torch::nn::Module {
  DrawsImpl() : a(4, 4), b(4, 4) {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor noise = torch::randn({4});
    return b(a(x) + noise) * torch::rand_like(x) + noise;
  }
  torch::nn::Linear a, b;
};
TORCH_MODULE(Draws);

/// In evaluation the first layer comes again behind the second.
struct SometimesUsedImpl : torch::nn::Module {
  SometimesUsedImpl() : a(4, 4), b(4, 4) {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return is_training() ? b(a(x)) : a(b(a(x))); }
  torch::nn::Linear a, b;
};
TORCH_MODULE(SometimesUsed);

}  // namespace tessera::testing_support
