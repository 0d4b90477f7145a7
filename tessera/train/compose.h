#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/config.h"
#include "tessera/data_parallel/bucket_plan.h"
#include "tessera/data_parallel/communication_hook.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/gradient_synchronizer.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/model.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/optimizer.h"
#include "tessera/train/inputs.h"

namespace tessera {

/// Axes over which the batch is dealt.
const std::vector<std::string>& data_axes();

/// A model with everything that a configuration attaches to it. Members are destroyed from the last to the first: what is attached goes before the
/// model it is attached to.
struct Composition {
  std::shared_ptr<LanguageModel> model;
  std::vector<nn::NamedParameter> parameters;  ///< tied ones once
  std::unique_ptr<optim::Optimizer> optimizer;
  std::shared_ptr<CommunicationHook> hook;  ///< what compresses gradients; null where they cross whole
  std::unique_ptr<GradientSynchronizer> synchronizer;
  const DistributedDataParallel* buckets = nullptr;  ///< the synchronizer, where it has a bucket plan that a checkpoint keeps

  /// The plan in use; empty where gradients travel in no buckets.
  BucketPlan bucket_plan() const { return buckets ? buckets->plan() : BucketPlan{}; }
};

/// Builds the model on meta, gives it memory and values on `device` (initial, of from_hf, or of `resume`), and attaches what the configuration asks for, in the
/// one order that works: precision, then data parallelism (later techniques enter before them, see the order in docs/architecture.md). Collective over the
/// mesh. On meta nothing is read from disk: that is the dry run. Throws ConfigError.
Composition compose(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume = std::nullopt);

}  // namespace tessera
