#pragma once

#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/models/model.h"
#include "tessera/recompute/tiles.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {

/// The layers that recompute.ffn_tile goes through in tiles: of a mixture the shared experts, and the routed ones by their rows (tile_routed).
std::string tiled_layers(const Config& config);

/// Attaches tiles of routed experts, of the rows that have come to this rank: before experts are dealt. Nothing without recompute.ffn_tile or a mixture.
[[nodiscard]] Attachment tile_routed(const Config& config, LanguageModel& model);

/// Refuses a pattern of the configuration that matches no module of the model, naming its key.
void check_pattern(const char* key, LanguageModel& model, const std::string& pattern);

/// Attaches what [recompute] asks for; nothing where mode = none. With a budget, bytes and FLOPs are measured in one forward pass of the same model on meta,
/// with one micro-batch, of `columns` of its sequences' (0: all): the same choice in a real run and in a dry one. The budget is that of each rank of the
/// pipeline, for the layers of its stages. `parts`: where ranks hold parts of a sequence between layers. Throws ConfigError (see recompute()).
[[nodiscard]] Attachment recompute_blocks(const Config& config, LanguageModel& model, const PipelineLayout& layout, int64_t columns = 0,
                                          const TiledParts& parts = {});

}  // namespace tessera
