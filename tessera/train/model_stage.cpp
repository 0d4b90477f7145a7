#include "tessera/train/model_stage.h"

#include <optional>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {

void LossPass::begin(const std::vector<data::MicroBatch>& micro_batches, std::vector<double> scales) {
  micro_batches_ = &micro_batches;
  scales_ = std::move(scales);
  losses_.assign(micro_batches.size(), {});
}

Pass::Size LossPass::size(int micro_batch) const {
  const data::MicroBatch& micro = (*micro_batches_)[static_cast<size_t>(micro_batch)];
  return {.rows = micro.rows, .seq_len = micro.seq_len, .columns = micro.columns(), .cut = micro.cut};
}

at::Tensor LossPass::run(int micro_batch, const Compute& compute) {
  const data::MicroBatch& micro = (*micro_batches_)[static_cast<size_t>(micro_batch)];
  const auto given = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return compute({.tokens = micro.tokens,
                  .labels = micro.labels,
                  .positions = given(micro.places.defined() ? micro.places : micro.positions),
                  .document_ids = given(micro.document_ids),
                  .padding = micro.padding,
                  .padding_size = micro.padding_size()});
}

at::Tensor LossPass::finish(int micro_batch, const at::Tensor& given) {
  const auto i = static_cast<size_t>(micro_batch);
  losses_[i] = given.detach();
  return given.requires_grad() ? given.mul(scales_.at(i)) : at::Tensor();
}

void LossPass::repeat_losses(size_t run) {
  const MemoryScope outputs(MemoryCategory::Outputs);
  for (size_t i = run; i < losses_.size(); ++i) losses_[i] = at::empty_like(losses_.front());
}

at::Tensor ModelStage::compute(const StageCall& call, const Pass::Size& size, const std::vector<at::Tensor>& inputs) {
  if (stream_.before_each) stream_.before_each(size);
  // What is computed again in backward takes it from here, in training; a pass without gradients has no other scope.
  std::optional<nn::SampleScope> sample;
  if (call.padding.defined()) {
    nn::SampleContext here = nn::SampleScope::current();
    here.padding = call.padding;
    here.padding_size = call.padding_size;
    sample.emplace(here);
  }
  if (whole_ != nullptr) return nn::call(*whole_, call.tokens, call.labels, call.positions, call.document_ids, call.last_alone);
  const auto labels = gives_loss() ? call.labels : std::nullopt;
  return part_(takes_tokens() ? call.tokens : inputs.at(0), labels, size.columns, call.positions, call.document_ids, call.last_alone);
}

pipeline::TensorSpec ModelStage::stream_of(int micro_batch) const {
  const Pass::Size size = pass_->size(micro_batch);
  return {.sizes = {size.rows, chunk(size.columns, stream_.parts, stream_.part).second, stream_.dim}, .dtype = stream_.dtype};
}

std::optional<pipeline::TensorSpec> ModelStage::input_spec(int micro_batch, int /*input*/) const { return stream_of(micro_batch); }

pipeline::StageOutputs ModelStage::forward(int micro_batch, const std::vector<at::Tensor>& inputs) {
  const Pass::Size size = pass_->size(micro_batch);
  at::Tensor out = pass_->run(micro_batch, [&](const StageCall& call) { return compute(call, size, inputs); });
  if (gives_loss()) return {.values = {}, .loss = out.defined() ? pass_->finish(micro_batch, out) : at::Tensor()};
  if (!out.defined()) {
    const pipeline::TensorSpec spec = stream_of(micro_batch);
    out = at::zeros(spec.sizes, at::TensorOptions(spec.dtype).device(part_->parameters().front().device()));
  }
  return {.values = {std::move(out)}};
}

}  // namespace tessera
