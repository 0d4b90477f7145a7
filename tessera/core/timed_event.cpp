#include "tessera/core/timed_event.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

TimedEvent::TimedEvent(at::Device device) : device_(device), event_(device.type(), c10::EventFlag::BACKEND_DEFAULT) {}

void TimedEvent::record() { event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }

double TimedEvent::seconds_since(const TimedEvent& earlier) const { return 1e-3 * earlier.event_.elapsedTime(event_); }

}  // namespace tessera
