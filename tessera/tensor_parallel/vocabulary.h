#pragma once

#include <cstdint>
#include <memory>

#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/interceptor.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/convert.h"

/// The vocabulary cut over the group: its rows by layout's rule, of the embedding and of the head alike, so that tied weights are cut once.
namespace tessera::tensor_parallel {

void cut_vocabulary(const at::Tensor& weight, const comm::Group& group);

/// Looks up the ids that this rank holds, zeros for the others; the ranks' results are added up. Elements sent: those of Partial -> `style.output`.
std::shared_ptr<nn::Interceptor> vocab_parallel_embedding(std::shared_ptr<Context> context, const VocabParallelEmbedding& style,
                                                          const nn::EmbeddingImpl& embedding);

/// Logits for some rows of the vocabulary; with labels the loss of the whole, each rank's logits staying where they are: three all-reduces of T fp32 numbers
/// (largest logit, sum of exponentials, the logit that the target expects), chunk by chunk (kernels::VocabularyParts). Without labels, logits are gathered.
/// Besides, what `style.input` -> Copied costs.
std::shared_ptr<nn::Interceptor> vocab_parallel_head(std::shared_ptr<Context> context, const VocabParallelHead& style, nn::LanguageModelHeadImpl& head);

}  // namespace tessera::tensor_parallel
