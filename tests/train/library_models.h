#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn.h>

#include "tessera/core/rng.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/sequential.h"
#include "tests/test_device.h"

/// Models as libtorch programs have them, small: what the plain loop is tried on.
namespace tessera::testing_support {

/// Two convolutions and a way around them, as residual networks are built.
struct ResidualBlockImpl : torch::nn::Module {
  ResidualBlockImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)),
        conv2(torch::nn::Conv2dOptions(out, out, 3).padding(1).bias(false)),
        bn1(out),
        bn2(out) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    if (in != out || stride != 1) {
      around = torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), torch::nn::BatchNorm2d(out));
      register_module("around", around);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = bn2(conv2(at::relu(bn1(conv1(x)))));
    return at::relu(inner + (around.is_empty() ? x : around->forward(x)));
  }
  torch::nn::Conv2d conv1, conv2;
  torch::nn::BatchNorm2d bn1, bn2;
  torch::nn::Sequential around{nullptr};
};
TORCH_MODULE(ResidualBlock);

struct ResNetImpl : torch::nn::Module {
  ResNetImpl() : stem(torch::nn::Conv2dOptions(1, 4, 3).padding(1)), norm(4), layers(ResidualBlock(4, 4, 1), ResidualBlock(4, 6, 2)), fc(6, 3) {
    register_module("stem", stem);
    register_module("norm", norm);
    register_module("layers", layers);
    register_module("fc", fc);
  }
  at::Tensor forward(const at::Tensor& x) { return fc(layers->forward(at::relu(norm(stem(x)))).mean({2, 3})); }
  torch::nn::Conv2d stem;
  torch::nn::BatchNorm2d norm;
  torch::nn::Sequential layers;
  torch::nn::Linear fc;
};

struct RecurrentModelImpl : torch::nn::Module {
  RecurrentModelImpl() : embed(11, 6), lstm(torch::nn::LSTMOptions(6, 8).num_layers(2).batch_first(true)), linear(8, 11) {
    register_module("embed", embed);
    register_module("lstm", lstm);
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& ids) { return linear(std::get<0>(lstm(embed(ids)))); }
  torch::nn::Embedding embed;
  torch::nn::LSTM lstm;
  torch::nn::Linear linear;
};

/// Digits: two convolutions, pooling, dropout whose mask depends on the sample and not on the rank.
struct DigitsImpl : torch::nn::Module {
  DigitsImpl() : conv1(1, 4, 3), conv2(4, 5, 3), fc1(20, 12), fc2(12, 3), dropout(0.25) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("dropout", dropout);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = at::relu(at::max_pool2d(conv2(at::relu(conv1(x))), 2));
    h = at::relu(fc1(h.flatten(1)));
    return at::log_softmax(fc2(dropout(h)), 1);
  }
  torch::nn::Conv2d conv1, conv2;
  torch::nn::Linear fc1, fc2;
  nn::Dropout dropout;
};

struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(int64_t dim, int64_t heads, int64_t context)
      : heads(heads),
        norm1(torch::nn::LayerNormOptions({dim})),
        norm2(torch::nn::LayerNormOptions({dim})),
        qkv(dim, 3 * dim),
        out(dim, dim),
        up(dim, 2 * dim),
        down(2 * dim, dim) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
    mask = register_buffer("mask", torch::tril(torch::ones({context, context})).view({1, 1, context, context}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), dim = x.size(2);
    const auto parts = qkv(norm1(x)).split(dim, 2);
    const auto by_head = [&](const at::Tensor& t) { return t.view({batch, length, heads, dim / heads}).transpose(1, 2); };
    at::Tensor scores = at::matmul(by_head(parts[0]), by_head(parts[1]).transpose(-2, -1)) / std::sqrt(static_cast<double>(dim / heads));
    scores = scores.masked_fill(mask.narrow(2, 0, length).narrow(3, 0, length).eq(0), -1e9);
    const at::Tensor h = x + out(at::matmul(at::softmax(scores, -1), by_head(parts[2])).transpose(1, 2).reshape({batch, length, dim}));
    return h + down(at::gelu(up(norm2(h))));
  }
  int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
  at::Tensor mask;
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  GptImpl() : tokens(11, 8), positions(6, 8), norm(torch::nn::LayerNormOptions({8})), head(torch::nn::LinearOptions(8, 11).bias(false)) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    for (int i = 0; i < 2; ++i) blocks->push_back(GptBlock(8, 2, 6));
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor h = tokens(ids) + positions(at::arange(ids.size(1)));
    for (const auto& block : *blocks) h = block->as<GptBlockImpl>()->forward(h);
    return head(norm(h));
  }
  torch::nn::Embedding tokens, positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

struct EncoderModelImpl : torch::nn::Module {
  EncoderModelImpl()
      : embed(11, 8),
        encoder(torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0), 2)),
        head(8, 11) {
    register_module("embed", embed);
    register_module("encoder", encoder);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(encoder(embed(ids).transpose(0, 1)).transpose(0, 1)); }
  torch::nn::Embedding embed;
  torch::nn::TransformerEncoder encoder;
  torch::nn::Linear head;
};

/// What a test needs of a model: how to make it, call it, and feed it.
struct LibraryModel {
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)> forward;
  std::function<std::pair<at::Tensor, at::Tensor>(int64_t samples, int64_t step)> batch;
  std::string wrap;  ///< units of fully_shard; empty: one
};

inline at::Tensor numbers(std::vector<int64_t> sizes, const std::string& name) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(5, name).fill_uniform(out, 0, n, -1.0f, 1.0f); });
}

inline at::Tensor ids(std::vector<int64_t> sizes, int64_t below, const std::string& name) {
  return ((numbers(std::move(sizes), name) + 1) * 0.5 * static_cast<double>(below)).to(at::kLong).clamp(0, below - 1);
}

template <class Impl>
LibraryModel images(const std::string& wrap = "") {
  return {[] { return std::make_shared<Impl>(); }, [](torch::nn::Module& model, const at::Tensor& x) { return dynamic_cast<Impl&>(model).forward(x); },
          [](int64_t samples, int64_t step) {
            const std::string at = std::to_string(step);
            return std::pair(numbers({samples, 1, 8, 8}, "images" + at), ids({samples}, 3, "classes" + at));
          },
          wrap};
}

template <class Impl>
LibraryModel texts(const std::string& wrap = "") {
  return {[] { return std::make_shared<Impl>(); }, [](torch::nn::Module& model, const at::Tensor& x) { return dynamic_cast<Impl&>(model).forward(x); },
          [](int64_t samples, int64_t step) {
            const at::Tensor text = ids({samples, 7}, 11, "text" + std::to_string(step));
            return std::pair(text.narrow(1, 0, 6).contiguous(), text.narrow(1, 1, 6).contiguous());
          },
          wrap};
}

inline LibraryModel library_model(const std::string& name) {
  if (name == "resnet") return images<ResNetImpl>("layers.*");
  if (name == "lstm") return texts<RecurrentModelImpl>("lstm");
  if (name == "digits") return images<DigitsImpl>();
  if (name == "gpt") return texts<GptImpl>("blocks.*");
  if (name == "encoder") return texts<EncoderModelImpl>("encoder.layers.*");
  auto model = images<ResNetImpl>("*");  // of ours, so that calls trigger the gathers
  model.make = [] { return nn::Sequential(nn::Linear(64, 12), at::tanh, nn::LayerNorm(nn::LayerNormOptions({12})), nn::Linear(12, 3)).ptr(); };
  model.forward = [](torch::nn::Module& model, const at::Tensor& x) { return nn::call(dynamic_cast<nn::SequentialImpl&>(model), x.flatten(1)); };
  return model;
}

/// Sum over the part, over how many there are in all.
inline at::Tensor library_loss(const at::Tensor& output, const at::Tensor& y, int64_t total) {
  const at::Tensor rows = output.reshape({-1, output.size(-1)});
  return at::nll_loss(at::log_softmax(rows, 1), y.reshape({-1}), {}, at::Reduction::Sum) / static_cast<double>(total);
}

}  // namespace tessera::testing_support
