#pragma once

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"

namespace tessera::nn {

/// Says that somebody starts collectives on the group's engine while backward runs, until the attachment goes. An engine has one sequence of collectives, the
/// same on every rank, and two users who start theirs as gradients come bring an order that depends on which parameters a rank used.
[[nodiscard]] Attachment use_engine(const comm::Group& group);

/// Whether several do.
bool is_engine_shared(const comm::Group& group);

}  // namespace tessera::nn
