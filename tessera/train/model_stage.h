#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/data/loader.h"
#include "tessera/models/model.h"
#include "tessera/pipeline/stage.h"

namespace tessera {

/// The residual stream, as this rank has it between stages.
struct StreamShape {
  int64_t dim = 0;
  at::ScalarType dtype = at::kFloat;
  int part = 0, parts = 1;                           ///< of the sequence (sequence parallelism)
  std::function<void(int64_t seq_len)> of_length{};  ///< told the length of the whole sequence before each forward; may be empty
};

/// A part of our models, or the whole, as a stage of a pipeline: the first takes tokens from the micro-batch, the last its labels.
class ModelStage final : public pipeline::Stage {
 public:
  /// The whole model, on one rank.
  explicit ModelStage(LanguageModel& model) : whole_(&model) {}
  ModelStage(ModelPart part, const StreamShape& stream) : part_(std::move(part)), stream_(stream) {}

  bool gives_loss() const { return whole_ != nullptr || part_->gives_loss(); }

  /// What the forwards that follow are of. The loss that backward begins from is the sum times the micro-batch's scale.
  void begin(const std::vector<data::MicroBatch>& micro_batches, std::vector<double> scales);

  /// The summed loss of each micro-batch, where this stage gives them.
  const std::vector<at::Tensor>& losses() const { return losses_; }

  pipeline::StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) override;
  std::optional<pipeline::TensorSpec> input_spec(int micro_batch, int input) const override;

 private:
  at::Tensor run(const data::MicroBatch& micro, const std::vector<at::Tensor>& inputs);

  LanguageModel* whole_ = nullptr;
  ModelPart part_ = nullptr;
  StreamShape stream_;
  const std::vector<data::MicroBatch>* micro_batches_ = nullptr;
  std::vector<double> scales_;
  std::vector<at::Tensor> losses_;
};

}  // namespace tessera
