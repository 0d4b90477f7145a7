#pragma once

#include <c10/core/Device.h>

#include "tessera/comm/group.h"
#include "tessera/config/config.h"

namespace tessera::precision {

enum class Saying { Aloud, Silent };

/// Makes of `precision.compute = auto` what `device` multiplies: bf16 where it has such products, else fp32. Afterwards the configuration holds what it became,
/// and `asked` what stood there (log.dir/config.toml keeps both); a second call changes nothing. All of a run reads the settled configuration: policy_from()
/// refuses one that is not.
///
/// Says in one line what it became and why, or, where bf16 is asked for by name and `device` lacks its products, that they are made in fp32.
void settle_compute(Config& config, c10::Device device, Saying saying = Saying::Aloud);

/// The same for the ranks of `group`, which get one answer: bf16 where the devices of all of them multiply it. The first says the line. Collective where the
/// answer depends on it, on every rank alike: one all-gather of 128 bytes a rank.
void settle_compute(Config& config, c10::Device device, const comm::Group& group);

}  // namespace tessera::precision
