#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/group.h"

namespace c10d {
class Backend;
}

namespace tessera::comm {

/// Hands collectives on tensors of `device` to `special`, all others (barriers, too) to `general`. Calls of one are not ordered against calls of the other.
c10::intrusive_ptr<c10d::Backend> make_by_device_backend(const GroupInfo& group, c10::intrusive_ptr<c10d::Backend> general, c10::DeviceType device,
                                                         c10::intrusive_ptr<c10d::Backend> special);

}  // namespace tessera::comm
