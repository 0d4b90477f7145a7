#pragma once

#include <string>

#include "tessera/comm/call.h"
#include "tessera/comm/tags.h"
#include "tessera/core/error.h"

namespace tessera::comm::mpi {

/// Where a message goes in MPI: on the communicator of callers' messages, or on that of collectives among the messages of which they are made.
struct Lane {
  bool of_collectives = false;
  int tag = 0;
};

inline constexpr int kRootedTag = 0;  ///< of the messages that make up gather and scatter; MPI keeps those of one sender in order

/// Of a send or recv of the group of that name, where MPI takes tags up to `most_tag`. Throws ConfigError for a caller's tag above; a tag of tags.h becomes a
/// small one, which every MPI takes.
inline Lane lane_of(const Call& call, const std::string& group, int most_tag) {
  if (call.tag >= kEndOfTags) return {.of_collectives = true, .tag = kRootedTag + 1 + (call.tag - kEndOfTags)};
  require(call.tag <= most_tag, "comm.backend = mpi: ", call.op == Operation::Send ? "send to" : "recv from", " rank ", call.peer, " of group ", group,
          ": tag ", call.tag, " is above ", most_tag,
          ", the largest that this MPI takes (MPI_TAG_UB); take fewer micro-batches where stages of a pipeline send, or set comm.backend = auto");
  return {.tag = call.tag};
}

}  // namespace tessera::comm::mpi
