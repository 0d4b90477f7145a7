#pragma once

#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// What the decorators of all groups of one rank may know.
struct DecoratorContext {
  const Environment& environment;
  const WorldOptions& options;
  c10::intrusive_ptr<c10d::Store> store;  ///< of the world; each decorator keeps to keys of its own
};

/// What a world wraps around each group's engine, innermost first; this function alone knows the order:
///   algorithm       runs a collective as a plan of messages (comm.algorithm)
///   check           compares what the ranks ask for (comm.check); its notes take the same way as the calls that they are about
///   flight record   writes down what this rank enters and leaves
///   inject          faults; outside of the record, so that a rank that hangs has not entered
///   the caller's    WorldOptions::decorators
std::vector<Decorator> standard_decorators(const DecoratorContext& context);

}  // namespace tessera::comm
