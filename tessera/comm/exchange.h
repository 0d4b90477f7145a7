#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

/// Both halves of a step round a ring.
struct Exchange {
  Pending sent, received;

  void wait() {
    received.wait();
    sent.wait();
  }
};

/// Whether a place of a ring begins with its receive where every place sends to the one that is `distance` ahead of it, or behind it, and receives from the
/// other side. Two places that send to each other begin with different halves, and nowhere do all that wait for one another begin with the same: what engines
/// ask for that carry out two ranks' messages in the order of the calls, or let the first one of two ranks wait for the other (Engine::matches_tags,
/// connect.h).
inline bool receives_first(int place, int distance = 1) { return place / distance % 2 != 0; }

/// Starts sending `out` to rank `to` and receiving `in` from rank `from`; nothing for what is empty, of which both sides know. `receive_first`: see
/// receives_first().
inline Exchange exchange_async(const Group& group, const at::Tensor& out, int to, const at::Tensor& in, int from, int tag, bool receive_first) {
  Exchange exchange;
  if (receive_first && in.numel() > 0) exchange.received = recv_async(group, in, from, tag);
  if (out.numel() > 0) exchange.sent = send_async(group, out, to, tag);
  if (!receive_first && in.numel() > 0) exchange.received = recv_async(group, in, from, tag);
  return exchange;
}

}  // namespace tessera::comm
