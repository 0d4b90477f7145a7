#pragma once

#include <map>
#include <string>

#include <ATen/ATen.h>

#include "tessera/kernels/swiglu.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/norm.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/tensor_parallel/parallelize.h"

/// A small language model of the user's own, and how its parts on ranks compare to the whole.
namespace tessera::testing_support {

struct GatedImpl : nn::Module {
  GatedImpl(int64_t dim, int64_t hidden) : w1(dim, hidden), w2(hidden, dim), w3(dim, hidden) {
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("w3", w3);
  }
  at::Tensor forward(at::Tensor x) {
    if (writes) x.mul_(2);
    return w2(kernels::swiglu(w1(x), w3(x)));
  }
  nn::Linear w1, w2, w3;
  bool writes = false;  ///< into its input
};
TESSERA_MODULE(Gated);

struct TokenNetSizes {
  int64_t dim = 10, hidden = 17, vocabulary = 29;
};

/// tokens [B, S] -> embedding -> 2 x (h + dropout(gated(norm(h)))) -> norm -> head. Biases everywhere, so that one that is added twice shows.
struct TokenNetImpl : nn::Module {
  explicit TokenNetImpl(const TokenNetSizes& sizes = {})
      : embed(sizes.vocabulary, sizes.dim), norm(nn::LayerNormOptions({sizes.dim})), head(sizes.dim, sizes.vocabulary) {
    register_module("embed", embed);
    for (int i = 0; i < 2; ++i) {
      register_module("norm" + std::to_string(i), norms.emplace_back(nn::LayerNormOptions({sizes.dim})));
      register_module("gated" + std::to_string(i), gated.emplace_back(sizes.dim, sizes.hidden));
      register_module("drop" + std::to_string(i), drops.emplace_back(0.25));
    }
    register_module("norm", norm);
    register_module("head", head);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& tokens, const std::optional<at::Tensor>& labels) {
    at::Tensor h = embed(tokens);
    for (size_t i = 0; i < gated.size(); ++i) h = h + drops[i](gated[i](norms[i](h)));
    return labels ? head(norm(h), *labels) : head(norm(h));
  }
  nn::Embedding embed;
  std::vector<nn::LayerNorm> norms;
  std::vector<Gated> gated;
  std::vector<nn::Dropout> drops;
  nn::LayerNorm norm;
  nn::LanguageModelHead head;
};
TESSERA_MODULE(TokenNet);

inline ParallelPlan token_net_plan(bool sequence) {
  const TensorLayout stream = sequence ? TensorLayout::Sequence : TensorLayout::Replicated;
  ParallelPlan plan{{"embed", VocabParallelEmbedding{.output = stream}},
                    {"gated*", PrepareInput{.from = stream, .to = TensorLayout::Copied, .layers = {"w1", "w3"}}},
                    {"gated*.w1", ColumnParallel{.input = TensorLayout::Copied}},
                    {"gated*.w3", ColumnParallel{.input = TensorLayout::Copied}},
                    {"gated*.w2", RowParallel{.output = stream}},
                    {"head", VocabParallelHead{.input = stream}}};
  if (sequence) {
    for (const char* pattern : {"norm*", "drop*"}) plan.emplace_back(pattern, SequenceParallel{});
  }
  return plan;
}

struct Sample {
  at::Tensor tokens, labels;
};

inline Sample sample(int64_t batch, int64_t sequence, int64_t vocabulary) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  Sample made{at::randint(0, vocabulary, {batch, sequence}, generator, at::kLong), at::randint(0, vocabulary, {batch, sequence}, generator, at::kLong)};
  made.labels[0][0] = -100;
  return made;
}

using Tensors = std::map<std::string, at::Tensor>;

inline at::Tensor forward_backward(TokenNet& net, const Sample& batch) {
  const nn::SampleScope scope({.seed = 11, .step = 3, .first_sample = 4});
  const at::Tensor loss = net(batch.tokens, batch.labels);
  loss.backward();
  return loss.detach();
}

/// Largest difference between what this rank holds (values, or gradients) and the same part of the whole, of each tensor relative to its largest entry.
inline double difference_from(const torch::nn::Module& module, const Tensors& whole, bool values = false) {
  double worst = 0;
  for (const auto& [name, tensor, aliases] : nn::unique_parameters(module)) {
    const at::Tensor mine = values ? tensor.detach() : tensor.grad();
    if (!mine.defined()) return 1e30;
    const at::Tensor expected = take(whole.at(name), nn::slice_of(tensor));
    if (mine.sizes() != expected.sizes()) return 1e30;
    worst = std::max(worst, (mine - expected).abs().max().item<double>() / whole.at(name).abs().max().item<double>());
  }
  return worst;
}

}  // namespace tessera::testing_support
