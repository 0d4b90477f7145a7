#pragma once

#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/train/inputs.h"

/// Ranks on several hosts read a recipe, a command line and a text each: one that was edited on one of them alone would train other replicas than the rest,
/// with losses that look sound. So all compare what they were told before they make anything of it.
namespace tessera {

/// Whether all ranks of `group` bring the same text of it. Collective. Traffic: one all-gather of 8 bytes.
bool same_on_all(const comm::Group& group, const nlohmann::json& mine);

/// Throws ConfigError, on every rank the same, unless all ranks of `group` bring the same settings. Collective. Traffic: one all-gather of 8 bytes; where they
/// differ, of the settings too.
void check_ranks_agree(const comm::Group& group, const Settings& mine);

/// How a pipeline's stages are stepped through: its schedule, and what that is made for, by content where files say them.
Settings pipeline_settings(const Config& config);

/// What all ranks of a training run must have alike: shared_settings(), and the content of what paths name: tokenizer, texts, the table of collective
/// algorithms in use, a pipeline's schedule, and the model of from_hf where no checkpoint takes its place (its files' headers and the beginning of each
/// tensor); and whether there is a checkpoint.dir, and a checkpoint to go on from.
Settings run_settings(const Config& config, const Inputs& inputs, const comm::WorldOptions& options);

}  // namespace tessera
