#include "tessera/comm/traffic.h"

#include "tessera/core/error.h"

namespace tessera::comm {

Traffic traffic(Operation op, int ranks, int64_t bytes) {
  if (ranks == 1) return {};
  const int others = ranks - 1;
  const int64_t part = bytes / ranks;  // the recorder's bytes are a multiple of `ranks` wherever parts are equal
  switch (op) {
    case Operation::AllReduce:
      return {2 * others, 2 * bytes * others / ranks};
    case Operation::AllGather:
    case Operation::ReduceScatter:
    case Operation::AllToAll:
    case Operation::Scatter:
      return {others, others * part};
    case Operation::Broadcast:
    case Operation::Reduce:
      return {others, bytes};
    case Operation::Gather:
      return {1, part};
    case Operation::Send:
      return {1, bytes};
    case Operation::Recv:
    case Operation::Barrier:
      return {1, 0};
  }
  throw InternalError("internal error: traffic of an unknown collective");
}

}  // namespace tessera::comm
