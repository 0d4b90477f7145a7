#pragma once

#include <set>

#include <c10/core/Device.h>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// Connects this rank with `peers`, each of which calls this with it among its own, for messages of tensors on `device`. Where messages meet by their order
/// alone (Engine::matches_tags) two ranks may be connected inside their first one, and whoever starts that, a receive too, stands there until the other starts
/// it as well (NCCL): in a circle, for good, where the other first waits for something else of this rank's. So who starts messages with several ranks in
/// orders of their own, or with one in several groups, connects before. A message of one byte for each of `peers`; nothing where messages meet by their tags.
void connect(const Group& group, const std::set<int>& peers, at::Device device);

}  // namespace tessera::comm
