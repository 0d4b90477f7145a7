#pragma once

#include <filesystem>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// A decorator that writes what a rank's groups enter and leave into one flight record, `dir`/rank_<rank>.bin (flight_record/flight_record.h).
///
/// States of a call: entered while the engine is being called; in flight once that has returned and the work is not done; waiting while the caller waits for
/// it; completed or failed at the end. Work that is done when the engine's call returns is handed on as it is, otherwise wrapped. On a device, where waits
/// return before work is done, a call is in flight until the device has come to it (an event of the caller's stream), begun until it is done, as the record's
/// thread sees five times a second while somebody holds the work. What is captured for a graph is not recorded.
///
/// Where the record cannot be made (a full disk, no permission) a warning says so, and the decorator hands every engine on undecorated: a
/// missing record is no reason for a run to fail.
Decorator flight_recording(const std::filesystem::path& dir, const Environment& environment);

}  // namespace tessera::comm
