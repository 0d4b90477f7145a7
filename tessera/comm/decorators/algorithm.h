#pragma once

#include <memory>

#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/decorators/standard.h"

namespace tessera::comm {

/// Carries out a collective as a plan of messages where `choice` names one, and hands it to the engine otherwise. Plans run one after the other on a thread of
/// the group, or at once on the caller's thread where it waits anyway and nothing is before it; so the engine must allow send and recv on one thread while
/// another posts its own. A collective of the engine waits until the plans before it are done; send and recv do not.
/// A plan's scratch is counted as MemoryCategory::Comm and lives as long as its work. Fails with what the engine says of the message that failed; all
/// later plans of the group fail then, too, for ranks may have stopped in different steps.
std::shared_ptr<Engine> make_algorithm_engine(std::shared_ptr<const AlgorithmChoice> choice, std::vector<int> hosts, const GroupInfo& group,
                                              std::shared_ptr<Engine> inner);

/// The same for every group of a world, whose ranks all chose alike: hosts are told through its store.
Decorator algorithm_choice(std::shared_ptr<const AlgorithmChoice> choice, const DecoratorContext& context);

}  // namespace tessera::comm
