#pragma once

#include "tessera/fsdp/sharded_units.h"

namespace tessera {

/// What gathered these units is gone, and their parameters stay slices: a forward over them, on this thread, is refused by name, for as long as one of them
/// lives.
void refuse_orphans(const ShardedUnits& units);

}  // namespace tessera
