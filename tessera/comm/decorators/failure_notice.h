#pragma once

#include <memory>

#include "tessera/comm/engine.h"
#include "tessera/comm/failure_watch.h"

namespace tessera::comm {

/// An engine whose calls, and waits for them, end by CommError once `notice` is given, with its cause: what the inner engine says when it is broken off
/// explains less, and on a device a wait returns although nothing will come.
std::shared_ptr<Engine> end_by_notice(const GroupInfo& group, std::shared_ptr<Engine> inner, std::shared_ptr<const FailureNotice> notice);

}  // namespace tessera::comm
