#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/core/config.h"
#include "tessera/data/loader.h"
#include "tessera/train/compose.h"

namespace tessera {

/// Turns a rank's micro-batches into the gradient of the global batch. The loop does not know whether that is a plain pass or a pipeline.
class Engine {
 public:
  virtual ~Engine() = default;

  /// Forward and backward of every micro-batch; afterwards `grad()` of each parameter holds the gradient of the mean loss over all valid tokens of the global
  /// batch. Returns the summed loss of each micro-batch, fp32 [micro-batches of this rank], 0 for padding; never read on the host here.
  virtual at::Tensor forward_backward(const data::StepBatch& batch) = 0;
};

/// Forward and backward one micro-batch after the other, on the whole model.
class PlainEngine : public Engine {
 public:
  PlainEngine(const Config& config, Composition& run) : seed_(static_cast<uint64_t>(config.run.seed)), run_(run) {}
  at::Tensor forward_backward(const data::StepBatch& batch) override;

 private:
  uint64_t seed_;
  Composition& run_;
};

/// The engine that a configuration asks for.
std::unique_ptr<Engine> make_engine(const Config& config, Composition& run);

}  // namespace tessera
