#include "tessera/comm/caller_waits.h"

#include <utility>

namespace tessera::comm {
namespace {
thread_local bool waits = false;
}

CallerWaits::CallerWaits() : before_(std::exchange(waits, true)) {}
CallerWaits::~CallerWaits() { waits = before_; }
bool CallerWaits::now() { return waits; }

}  // namespace tessera::comm
