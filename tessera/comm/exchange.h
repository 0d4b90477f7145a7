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

/// Starts sending `out` to rank `to` and receiving `in` from rank `from`; nothing for what is empty, of which both sides know. `receive_first`: neighbours
/// begin with different halves, for engines that carry out what two ranks exchange in the order of the calls.
inline Exchange exchange_async(const Group& group, const at::Tensor& out, int to, const at::Tensor& in, int from, int tag, bool receive_first) {
  Exchange exchange;
  if (receive_first && in.numel() > 0) exchange.received = recv_async(group, in, from, tag);
  if (out.numel() > 0) exchange.sent = send_async(group, out, to, tag);
  if (!receive_first && in.numel() > 0) exchange.received = recv_async(group, in, from, tag);
  return exchange;
}

}  // namespace tessera::comm
