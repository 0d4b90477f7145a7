#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/data/loader.h"
#include "tessera/models/model.h"
#include "tessera/pipeline/stage.h"

namespace tessera {

/// What a stage is given beside the stream. Tokens are read where the model begins, labels where it ends.
struct StageCall {
  at::Tensor tokens{};
  std::optional<at::Tensor> labels{};  ///< none: the model gives logits
  std::optional<at::Tensor> positions{}, document_ids{};
  bool last_alone = false;   ///< logits of the last position alone
  at::Tensor padding{};      ///< MicroBatch::padding
  int64_t padding_size = 0;  ///< MicroBatch::padding_size
};

/// Micro-batches on their way through the stages of a model: where tokens come from, and what becomes of what the last stage makes of them. Training,
/// validation and generation are passes; a stage knows none of them.
class Pass {
 public:
  virtual ~Pass() = default;

  struct Size {
    int64_t rows = 0;
    int64_t seq_len = 0;                       ///< of whole sequences
    int64_t columns = 0;                       ///< of them, those that this rank computes
    std::shared_ptr<const SequenceCut> cut{};  ///< where others compute the rest; null: nobody does
  };
  /// Known on every rank, before anything of the micro-batch is there.
  virtual Size size(int micro_batch) const = 0;

  /// Runs one stage: `compute` does what it is asked. Giving an undefined tensor says that there is nothing to compute; then what crosses holds zeros, and
  /// finish() is not called.
  using Compute = std::function<at::Tensor(const StageCall& call)>;
  virtual at::Tensor run(int micro_batch, const Compute& compute) = 0;

  /// Takes what the last stage gives, loss or logits. Returns the scalar that backward begins from; undefined: there is none.
  virtual at::Tensor finish(int micro_batch, const at::Tensor& given) = 0;
};

/// The residual stream, as this rank has it between stages.
struct StreamShape {
  int64_t dim = 0;
  at::ScalarType dtype = at::kFloat;
  int part = 0, parts = 1;                               ///< of the columns (sequence parallelism)
  std::function<void(const Pass::Size&)> before_each{};  ///< told of each forward before it begins, and of each action in training; may be empty
};

/// The summed loss of each micro-batch, for its gradient or for itself.
class LossPass final : public Pass {
 public:
  /// The micro-batches have to outlive the pass. The loss that backward begins from is the sum times the micro-batch's scale; without gradients none is asked.
  void begin(const std::vector<data::MicroBatch>& micro_batches, std::vector<double> scales = {});

  /// Fp32 []: where the model ends; elsewhere undefined.
  const std::vector<at::Tensor>& losses() const { return losses_; }
  /// Gives the micro-batches behind the first `run`, which were not run, losses of their own that take as much memory.
  void repeat_losses(size_t run);

  Size size(int micro_batch) const override;
  at::Tensor run(int micro_batch, const Compute& compute) override;
  at::Tensor finish(int micro_batch, const at::Tensor& given) override;

 private:
  const std::vector<data::MicroBatch>* micro_batches_ = nullptr;
  std::vector<double> scales_;
  std::vector<at::Tensor> losses_;
};

/// A part of our models, or the whole, as a stage of a pipeline.
class ModelStage final : public pipeline::Stage {
 public:
  /// The whole model, on one rank.
  explicit ModelStage(LanguageModel& model, const StreamShape& stream = {}) : whole_(&model), stream_(stream) {}
  ModelStage(ModelPart part, const StreamShape& stream) : part_(std::move(part)), stream_(stream) {}

  bool takes_tokens() const { return whole_ != nullptr || part_->takes_tokens(); }
  bool gives_loss() const { return whole_ != nullptr || part_->gives_loss(); }

  /// What the forwards that follow are of; it has to outlive them.
  void begin(Pass& pass) { pass_ = &pass; }

  pipeline::StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) override;
  std::optional<pipeline::TensorSpec> input_spec(int micro_batch, int input) const override;

 private:
  pipeline::TensorSpec stream_of(int micro_batch) const;
  at::Tensor compute(const StageCall& call, const Pass::Size& size, const std::vector<at::Tensor>& inputs);

  LanguageModel* whole_ = nullptr;
  ModelPart part_ = nullptr;
  StreamShape stream_;
  Pass* pass_ = nullptr;
};

}  // namespace tessera
