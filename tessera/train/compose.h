#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/data_parallel/communication_hook.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/model.h"
#include "tessera/nn/bucket_layout.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"
#include "tessera/offload/disk_bytes.h"
#include "tessera/optim/optimizer.h"
#include "tessera/pipeline/tied.h"
#include "tessera/precision/loss_scale.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/train/cut_model.h"
#include "tessera/train/inputs.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {

class HostGradients;

/// A model with everything that a configuration attaches to it. Members are destroyed from the last to the first: what is attached goes before the
/// model it is attached to.
struct Composition : CutModel {
  std::optional<pipeline::TiedCopies> tied;    ///< what the first and the last stage share
  Attachment recomputed;                       ///< what of it is computed again in backward
  Attachment moved;                            ///< what of it has activations that wait outside of the device
  std::vector<nn::NamedParameter> parameters;  ///< of each part; tied ones once
  std::vector<nn::NamedParameter> updated;     ///< what the optimizer updates, in the same order: the parameters, or the slices of them that this rank owns;
                                               ///< without those that follow another (nn::set_follows)
  comm::Group shard;                           ///< ranks over which those slices are cut; of one where this rank updates everything
  comm::Group terms;                           ///< ranks whose gradients are summed when data parallelism has summed its own (run.deterministic)
  std::vector<nn::NamedParameter> alone;       ///< parameters that no other rank has a gradient of: nobody reduces or slices them
  bool offloaded = false;                      ///< what the optimizer updates, its gradients and its state lie on the host beside the device
  bool updates_in_one_pass = false;            ///< every rank's optimizer does (optim::Optimizer), on the host, whatever parts of the model it has
  comm::Group cut;                             ///< ranks that layers are cut over, with those over which the slices are cut
  comm::Group elements;                        ///< ranks that hold different elements of the gradients: what a norm sums over
  comm::Group expert_elements;                 ///< the same of experts, which under run.deterministic may be more
  std::unique_ptr<optim::Optimizer> optimizer;
  precision::LossScale loss_scale;                        ///< what the loss is multiplied by before backward
  std::vector<std::shared_ptr<CommunicationHook>> hooks;  ///< of each part, or the whole: what compresses gradients; empty where they cross whole
  std::unique_ptr<GradientSynchronizer> synchronizer;
  DiskBytes disk;                                       ///< that what waits on disk has taken there
  HostGradients* host = nullptr;                        ///< it, where gradients go to the host as they come
  std::vector<const DistributedDataParallel*> buckets;  ///< of each part, or the whole, where it has a bucket layout that a checkpoint keeps

  /// Whether the first and the last stage have a copy each of what both use, on whichever rank.
  bool has_tied_copies() const { return tied.has_value(); }
  int stage_of(size_t part) const { return parts.empty() ? 0 : parts[part].stage; }
};

/// Folder of what lives on disk.
std::filesystem::path spill_folder(const Config& config);

/// Cuts the layers of a model on meta over the ranks of `tensor`, as [tensor] says; null where that is one rank. Collective.
std::unique_ptr<TensorParallel> cut_layers(const Config& config, LanguageModel& model, const comm::Group& tensor);

/// Attaches to a model's attention what reaches the keys and values of the other ranks of `columns`, as [context] says; null where that is one rank.
/// Collective.
std::unique_ptr<ContextParallel> cut_sequences(const Config& config, LanguageModel& model, const comm::Group& columns, int tensor_ranks);

/// Cuts a model on meta over the ranks of `model.layers` and `model.columns`, and keeps of it the stages that are this rank's of `model.pipeline`; `recompute`
/// attaches what lies around the first two and inside of the last. Collective.
void cut_model(const Config& config, const PipelineLayout& layout, CutModel& model, const std::function<void()>& recompute = {});

/// What a checkpoint of the whole model holds for other stages than this rank's.
std::vector<std::string> stored_for_others(const Config& config, const checkpoint::Manifest& manifest, const CutModel& model);

/// Refuses a model that cannot be cut over `ranks`: one forward pass on meta, of `seq_len` positions, whose layouts are followed from layer to layer. Throws
/// ConfigError.
void check_tensor_parallel(const Config& config, int ranks, int64_t seq_len);

/// Refuses what only the model's modules can tell, before any process group exists: a pattern of recompute.modules or zero.wrap that matches nothing, a unit of
/// stage 3 that alone takes more than run.memory_limit_bytes, a model that cannot be cut over the ranks of mesh.tp. Builds the model on meta: a millisecond a
/// layer. Throws ConfigError.
void check_modules(const Config& config, const MeshShape& axes);

/// The groups of optim.groups that are of frozen parameters alone (lora.modules), each with the reason: to be said aloud. Expects what check_modules takes.
std::vector<std::string> groups_without_effect(const Config& config);

/// Builds the model on meta, gives it memory and values on `device` (initial, of from_hf, or of `resume`), and attaches what the configuration asks for, in the
/// one order that works: precision, tensor parallelism, context parallelism, recompute, offload of activations, the cut into stages, then data parallelism of
/// each, plain or sharded (docs/architecture.md). Collective over the mesh. On meta nothing is read from disk: that is the dry run. Throws ConfigError.
Composition compose(const Config& config, const Mesh& mesh, at::Device device, const std::optional<ResumePoint>& resume = std::nullopt);

}  // namespace tessera
