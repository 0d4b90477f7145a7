#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// How another framework does our step: what of our configuration it is, what our operators cost it that it does not fuse, what its host needs to ask for one,
/// and what its allocator and libraries hold beside tensors. Files are in plan/frameworks/, each line with its source; a user's own may be named in their
/// place.
struct Framework {
  std::string key{};                     ///< "nanotron", or the file
  std::string name{};                    ///< "Nanotron"
  std::vector<std::string> settings{};   ///< "precision.params=bf16": over the configuration
  bool whole_logits = false;             ///< all logits of a micro-batch exist at once
  bool stages_by_weights = false;        ///< stages_by_weights(), where nothing else is said
  Habits habits{};                       ///< in time
  double pipelined_launch_per_rank = 0;  ///< Habits::layer_collective_launch_per_rank, where there are stages
  double context_bytes = 0;              ///< of the device: its context, libraries' workspaces, buffers of collectives
  double logit_bytes = 0;                ///< of an element of the logits at the loss, beside ours
  double held_per_parameter = 0;         ///< bytes beside ours, of a rank's parameters: gradients that are kept beside their sums
  double held_when_sharded = 0;          ///< the same in place of that where the optimizer's state is sharded
  double held_per_sharded = 0;           ///< and then of the rank's share of them
  double kept_per_element = 0;           ///< bytes that a layer keeps for backward beside ours, of a token and feature of its stream
  double reserve = 1;                    ///< what is held over what the allocator's rules say (caching_allocator.h): fitted, the only such term
  std::map<std::string, std::string> sources{};
};

/// One of the files that tessera brings, by name, or a file. Throws ConfigError for a name that is neither (with the nearest), and for a file that is not of
/// this form.
Framework find_framework(const std::string& name_or_file);

/// Of a file's text; `origin` stands in messages.
Framework parse_framework(const std::string& text, const std::string& origin);

std::vector<std::string> framework_names();

/// Its settings for a layout: what it says of layers that are cut (tensor.*) goes with the cut.
std::vector<std::string> settings_of(const Framework& framework, int tp);

/// pipeline.split of programs that deal layers by their weights: a stage takes links until the weights so far are more than its share of all. Those of norms
/// and the embedding, which multiplies nothing, count none. {"cost"} where that leaves later stages nothing.
std::vector<std::string> stages_by_weights(const ModelConfig& model, int stages);

/// The machine, as the framework's host drives it in this configuration.
Machine driven(const Framework& framework, const Config& config, Machine machine);

/// Bytes that the framework's allocator holds of the device that needs most: what the dry run's reserves, and what it keeps beside our tensors, times its
/// reserve. Beside them lies the context. `reserve`: with that fitted term, or without. `pipeline_rank`: of those at that place of mesh.pp alone.
double reserved_bytes(const Framework& framework, const Config& config, const DryRun& run, bool reserve = true, std::optional<int> pipeline_rank = {});

/// Whether that and the contexts are within the run's limit.
bool fits(const Framework& framework, const Config& config, const DryRun& run);

/// "framework Nanotron: 61 GiB reserved and 2.8 GiB of contexts on the rank that needs most, which fit 74.5 GiB".
std::string verdict_of(const Framework& framework, const Config& config, const DryRun& run);

}  // namespace tessera::plan
