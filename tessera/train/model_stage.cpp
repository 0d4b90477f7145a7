#include "tessera/train/model_stage.h"

#include <utility>

#include "tessera/layout/slice.h"

namespace tessera {

void ModelStage::begin(const std::vector<data::MicroBatch>& micro_batches, std::vector<double> scales) {
  micro_batches_ = &micro_batches;
  scales_ = std::move(scales);
  losses_.assign(gives_loss() ? micro_batches.size() : 0, {});
}

at::Tensor ModelStage::run(const data::MicroBatch& micro, const std::vector<at::Tensor>& inputs) {
  if (whole_ != nullptr) return whole_->loss_sum(micro.tokens, micro.labels);
  if (stream_.of_length) stream_.of_length(micro.tokens.size(1));
  const auto labels = gives_loss() ? std::optional(micro.labels) : std::nullopt;
  return part_(part_->takes_tokens() ? micro.tokens : inputs.at(0), labels, micro.tokens.size(1));
}

std::optional<pipeline::TensorSpec> ModelStage::input_spec(int micro_batch, int /*input*/) const {
  const at::Tensor& tokens = (*micro_batches_)[static_cast<size_t>(micro_batch)].tokens;
  return pipeline::TensorSpec{.sizes = {tokens.size(0), chunk(tokens.size(1), stream_.parts, stream_.part).second, stream_.dim}, .dtype = stream_.dtype};
}

pipeline::StageOutputs ModelStage::forward(int micro_batch, const std::vector<at::Tensor>& inputs) {
  const auto i = static_cast<size_t>(micro_batch);
  at::Tensor out = run((*micro_batches_)[i], inputs);
  if (!gives_loss()) return {.values = {std::move(out)}};
  losses_[i] = out.detach();
  return {.values = {}, .loss = out.requires_grad() ? out.mul(scales_[i]) : at::Tensor()};
}

}  // namespace tessera
