#pragma once

#include <vector>

#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/parameter.h"
#include "tests/nn/net.h"

namespace tessera::testing_support {

/// An embedding and a head, which compute their weights' gradients where somebody offers a place; `tied`: one weight.
struct LanguageModel : torch::nn::Module {
  static constexpr int64_t kVocabulary = 11, kDim = 6;

  explicit LanguageModel(bool tied)
      : embedding(kVocabulary, kDim), head(tied ? nn::LanguageModelHead(embedding->weight) : nn::LanguageModelHead(kDim, kVocabulary)) {
    register_module("embedding", embedding);
    register_module("head", head);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) parameter.copy_(at::arange(parameter.numel(), at::kFloat).view_as(parameter).sin());
  }
  at::Tensor loss(int64_t first) {
    const at::Tensor ids = at::arange(first, first + 4).remainder(kVocabulary).view({1, 4});
    return loss(ids, embedding(ids).tanh());
  }
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& hidden) { return head->loss_sum(hidden, ids.add(1).remainder(kVocabulary)); }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : nn::unique_parameters(*this)) all.push_back(parameter.tensor.grad().clone());
    return all;
  }

  nn::Embedding embedding;
  nn::LanguageModelHead head;
};

/// The sum of the losses' gradients, on one process.
inline std::vector<at::Tensor> gradients_of_losses(bool tied, const std::vector<int64_t>& firsts) {
  LanguageModel model(tied);
  for (const int64_t first : firsts) model.loss(first).backward();
  return model.gradients();
}

}  // namespace tessera::testing_support
