#pragma once

#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/world.h"

namespace tessera::comm {

/// comm.check: before each collective the ranks of its group tell each other what they ask for, so that ranks that disagree get a CommError that names
/// all sides, the same on every rank, instead of a hang or of wrong numbers:
///
///   collective #12 of dp: rank 0 asks for all_reduce of [32] float32 (head); ranks 1-3 ask for all_gather of [4, 8] float32 (layers.0)
///
/// Collectives are compared in op, shape, dtype, reduction, root and order, which is the order of calls on the group; all_to_all in dtype, and in
/// how many elements each rank gives and its peer expects. A message is preceded by a note of its shape and dtype, which the receiver compares when it waits:
/// the error is the receiver's. Ranks in errors are the world's, calls are counted from 1 per group, and in parentheses stands the call's site.
/// A rank that makes no call at all is not found here: the others time out.
///
/// Cost: an all_gather of 256 bytes per rank before each collective (all_to_all: another of 16 n bytes per rank), waited for at once even where the call is
/// asynchronous: no rank goes on before all have started. A message travels in 1 + max(1, log4(bytes / 1 KiB), bytes / 4 MiB) parts, the last one padded to
/// at most four times its bytes. A dry world takes the memory of all that and compares nothing. A program whose ranks start collectives of two groups in
/// different orders works without the check and times out with it.
Decorator checking();

}  // namespace tessera::comm
