#pragma once

#include <memory>

#include <c10/core/DeviceType.h>

#include "tessera/comm/group.h"

namespace tessera::comm {

/// Hands collectives on tensors of `device` to `special`, all others (barriers, too) to `general`. Calls of one are not ordered against calls of the other.
std::shared_ptr<Engine> make_by_device_engine(std::shared_ptr<Engine> general, c10::DeviceType device, std::shared_ptr<Engine> special);

}  // namespace tessera::comm
