#include "tessera/nn/embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions given) : options(std::move(given)) {
  const int64_t rows = options.num_embeddings();
  require(!options.max_norm() && !options.scale_grad_by_freq() && !options.sparse(),
          "Embedding: max_norm, scale_grad_by_freq and sparse are not supported: they depend on the whole batch of one rank; leave them off");
  if (options.padding_idx() && *options.padding_idx() < 0) options.padding_idx(*options.padding_idx() + rows);
  require(!options.padding_idx() || (*options.padding_idx() >= 0 && *options.padding_idx() < rows), "Embedding: padding_idx ",
          options.padding_idx().value_or(0), " is no row of ", rows);
  weight = register_parameter("weight", at::empty({rows, options.embedding_dim()}));
  InitRule rule = InitRule::normal(0, 1);
  rule.zero_row = options.padding_idx();
  set_init(weight, rule);
  reset_parameters();
}

void EmbeddingImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  weight.normal_();
  if (options.padding_idx()) weight.select(0, *options.padding_idx()).zero_();
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) { return at::embedding(weight, ids, options.padding_idx().value_or(-1)); }

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::Embedding(num_embeddings=" << options.num_embeddings() << ", embedding_dim=" << options.embedding_dim() << ")";
}

}  // namespace tessera::nn
