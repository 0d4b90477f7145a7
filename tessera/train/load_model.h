#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/group.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/train/cut_model.h"
#include "tessera/train/expert_ranks.h"

namespace tessera {

/// Where a trained model comes from: one of the two is set.
struct ModelSource {
  std::filesystem::path from_hf;     ///< folder of a Hugging Face model
  std::filesystem::path checkpoint;  ///< a checkpoint, or a checkpoint.dir, of which the newest valid one is taken
};

/// A checkpoint and what it was trained with.
struct FoundCheckpoint {
  std::filesystem::path folder;
  checkpoint::Manifest manifest;
  Config config;                        ///< without the layout and the machine, which are not the reader's, and with `--set` on top, resolved
  std::vector<std::string> remarks{};   ///< to be said aloud once: newer ones that were passed over
  std::filesystem::path chosen_from{};  ///< the checkpoint.dir whose newest it was; empty: it was named
  std::string flag{};                   ///< which gave it
  std::vector<std::string> sets{};

  /// Whether it was there and is no more, as one that checkpoint.keep of a live run has removed.
  bool gone() const;
  /// The sentence about it.
  std::string removal() const;
};

/// A model that is known but not yet loaded.
struct FoundModel {
  Config config;                              ///< of FoundCheckpoint; only [model] and `--set` are known of a Hugging Face model
  std::optional<FoundCheckpoint> checkpoint;  ///< none: the folder of config.model.from_hf
};

/// In evaluation mode.
struct LoadedModel : CutModel {
  std::vector<std::unique_ptr<GradientSynchronizer>> fetched;  ///< what brings layers from the host when they are used; empty where all are on the device
};

/// The checkpoint `given`, or the newest valid one where it is a checkpoint.dir, chosen again (some times) where a run removes it meanwhile. `flag` names it in
/// messages. Throws ConfigError.
FoundCheckpoint find_checkpoint(const std::filesystem::path& given, const std::string& flag, const std::vector<std::string>& sets = {});

/// What it was trained with, and `sets` on top, resolved: without the layout and the machine, which are not the reader's. Throws ConfigError.
Config trained_config(const FoundCheckpoint& found, const std::vector<std::string>& sets = {});

/// How often a checkpoint is chosen from a checkpoint.dir before a reader gives up: a run that keeps one may remove it with every save.
inline constexpr int kMostChoices = 8;

/// In place of one that has gone, or that another rank chose, the newest of now. Throws ConfigError where it was named, or that is of another run or model.
void choose_again(FoundCheckpoint& found);

/// What `read` makes of a checkpoint by one process. Where it throws, for it has gone, it is called again for the newest of then.
template <class Read>
auto read_newest(FoundCheckpoint& found, const Read& read) -> decltype(read()) {
  for (int choice = 1;; ++choice) {
    try {
      return read();
    } catch (const ConfigError&) {
      if (!found.gone()) throw;
      if (choice == kMostChoices) throw ConfigError(found.removal());
    }
    choose_again(found);
  }
}

/// All ranks choose on their own, and a run may save meanwhile: where they came to different checkpoints of one checkpoint.dir, they choose again. Those that
/// differ all the same are for check_ranks_agree to refuse. Collective. Traffic: as of checkpoint::gather_json, some bytes a rank and choice.
void choose_together(FoundModel& found, const comm::Group& group);

/// Reads what is known of a model without its weights. Throws ConfigError.
FoundModel find_model(const ModelSource& source, const std::vector<std::string>& sets);

/// What is read for a model's first values, without a checkpoint or beside one: by checkpoint.partial some of it may begin anew, and weights in fewer bits lie
/// in none.
struct StartingFiles {
  bool weights = false;     ///< model.from_hf, for parameters
  bool adapters = false;    ///< lora.from_peft
  bool fewer_bits = false;  ///< model.from_hf, for what quantize.modules names
  // Folders that nobody named but the run which saved, and that do not hold what is read: what begins anew is drawn.
  bool no_weights = false, no_adapters = false;
};
StartingFiles starting_files(const FoundModel& found);

/// What `world_size` ranks make of a model that is only read: layers cut over mesh.tp of them, stages dealt over mesh.pp, sequences over mesh.cp, and that
/// many copies. Refuses by name
/// what reading has no use for (state to shard), techniques that this build lacks, layers and chains that cannot be cut. Starts no process group. Throws
/// ConfigError.
struct ReadingLayout {
  int copies = 1, tensor_ranks = 1, stage_ranks = 1, column_ranks = 1;
};
ReadingLayout reading_layout(const Config& config, int world_size);

/// Ranks that read one copy of a model together.
struct ReadingGroups {
  comm::Group layers{};         ///< each has a part of every layer
  pipeline::Channels stages{};  ///< each has some layers
  comm::Group columns{};        ///< each reads some columns of a sequence
  ExpertRanks experts{};        ///< each has some of the experts, or of each some
};
ReadingGroups reading_groups(const Config& config, const Mesh& mesh);

/// load_model(), and where a checkpoint that was chosen from a checkpoint.dir goes meanwhile, on any rank of `all`, that of the newest of then on all of them.
/// Collective over `all`, who share the groups.
LoadedModel load_newest(FoundModel& found, const ReadingGroups& groups, at::Device device, const comm::Group& all);

/// Loads weights alone, for eval and generate; each rank reads its part. What checkpoint.partial lets a checkpoint lack begins as it would in a run that goes
/// on. Collective over the groups. Throws ConfigError.
LoadedModel load_model(const FoundModel& found, const ReadingGroups& groups = {}, at::Device device = at::kCPU);

}  // namespace tessera
