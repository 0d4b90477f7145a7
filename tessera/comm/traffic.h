#pragma once

#include <cstdint>

#include "tessera/comm/operation.h"

namespace tessera::comm {

/// What a collective costs one rank at least, with algorithms that are optimal in bandwidth (ring, chain, pairwise).
struct Traffic {
  int steps = 0;           ///< messages one after the other
  int64_t sent_bytes = 0;  ///< by the rank that sends most
  bool operator==(const Traffic&) const = default;
};

/// `bytes` is the size of the whole: the reduced tensor, the gathered result, what is scattered or dealt.
///   all_reduce                        2(n-1) steps   2 bytes (n-1)/n
///   all_gather, reduce_scatter,
///   all_to_all (equal parts)          n-1 steps      bytes (n-1)/n
///   broadcast, reduce                 n-1 steps      bytes
///   gather                            1 step         bytes / n
///   scatter                           n-1 steps      bytes (n-1)/n
///   send                              1 step         bytes
///   recv, barrier                     1 step         0
/// Nothing where n = 1.
Traffic traffic(Operation op, int ranks, int64_t bytes);

}  // namespace tessera::comm
