#pragma once

#include <utility>

#include "tessera/comm/group.h"

namespace tessera::pipeline {

/// How the ranks of a pipeline reach each other. Where an engine matches messages by their tags one group is enough. One that matches them by their order
/// alone, and carries those between two ranks out one after the other whichever way they go (NCCL, Engine::matches_tags), would wait in a circle where both
/// sides receive ahead of what they send: it needs a group for each direction, in which a rank does nothing but send to another, or nothing but receive from
/// it, and one for what is not in the order of the schedule. All have the same ranks in the same order.
struct Channels {
  comm::Group ahead{};   ///< to later ranks; and the pipeline's collectives
  comm::Group back{};    ///< to earlier ranks
  comm::Group beside{};  ///< tokens that were generated

  Channels() = default;
  Channels(comm::Group all) : ahead(all), back(all), beside(std::move(all)) {}  // NOLINT: one group is a set of channels
  Channels(comm::Group ahead, comm::Group back, comm::Group beside) : ahead(std::move(ahead)), back(std::move(back)), beside(std::move(beside)) {}

  int rank() const { return ahead.rank(); }
  int size() const { return ahead.size(); }
  /// Of a message from rank `from` to rank `to`.
  const comm::Group& between(int from, int to) const { return from < to ? ahead : back; }
};

}  // namespace tessera::pipeline
