#pragma once

#include "tessera/config/config.h"

namespace tessera {

/// Refuses, by name, the settings whose technique this build lacks: 'mesh.tp = 2: tensor parallelism is not part of this build; set mesh.tp = 1'.
/// A technique that arrives deletes its line.
void refuse_missing_techniques(const Config& config);

}  // namespace tessera
