#pragma once

#include <memory>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// Lets an engine of the host take tensors of accelerators, by pinned memory: what a call reads is copied to the host before it starts, for which the host
/// waits; what it writes is copied back when it is waited for, on a stream of its own, which the caller's current stream then waits for, and the host does not.
/// So several ranks can share one device, and machines whose devices cannot reach each other work, at the price of both copies. Takes as much pinned memory as
/// the call's tensors until the work is waited for. Tensors of the host pass through.
std::shared_ptr<Engine> stage_on_host(const GroupInfo& group, std::shared_ptr<Engine> engine);

}  // namespace tessera::comm
