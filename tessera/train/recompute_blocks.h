#pragma once

#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/models/model.h"

namespace tessera {

/// The layers that recompute.ffn_tile goes through in tiles.
inline constexpr const char* kFeedForward = "layers.*.feed_forward";

/// Refuses a pattern of the configuration that matches no module of the model, naming its key.
void check_pattern(const char* key, LanguageModel& model, const std::string& pattern);

/// Attaches what [recompute] asks for; nothing where mode = none. With a budget, bytes and FLOPs are measured in one forward pass of the same model on meta,
/// with one micro-batch, of `columns` of its sequences' (0: all): the same choice on every rank, in a real run and in a dry one. Throws ConfigError (see
/// recompute()).
[[nodiscard]] Attachment recompute_blocks(const Config& config, LanguageModel& model, int64_t columns = 0);

}  // namespace tessera
