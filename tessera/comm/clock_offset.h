#pragma once

#include <functional>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// Seconds to add to this rank's clock to read that of the group's rank 0, which may be of another host. Each other rank in turn asks rank 0 for its time,
/// `rounds` times; the question that came back soonest counts, for the answer was read somewhere in between (Cristian 1989): off by half its time at most. An
/// offset that this cannot tell from none is 0, so ranks that share a clock keep it. Collective. Traffic: 16 bytes a question. Clocks drift apart by up to
/// about 50 us a second, so ask close to what is to be compared.
double clock_offset(const Group& group, const std::function<double()>& clock, int rounds = 8);

}  // namespace tessera::comm
