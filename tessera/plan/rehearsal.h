#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/events.h"
#include "tessera/pipeline/itinerary.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::plan {

/// A step with fewer micro-batches that shows all there is of the whole step's: each of its micro-batches does, action by action, what one of these does.
struct Rehearsal {
  int micro_batches = 0;                    ///< that are run
  std::vector<int> stands_for;              ///< of each micro-batch of the whole step: the one of these that does the same
  std::vector<pipeline::Leg> shown, whole;  ///< what the rank does, in this step and in the whole one
  int tags = 0;                             ///< by how much tags of one micro-batch's messages differ from those of the next
  std::vector<std::string> channels;        ///< the groups of these messages, by name
};

/// The shortest one for this rank of the pipeline, where that is less than the whole. Two micro-batches do the same if each of their actions is alike: of the
/// same kind and stage, the first and the last of its kind or not; and where a synchronizer looks at `neighbours`, the second or not, between the same. Nothing
/// for schedules whose weights change in their midst.
std::optional<Rehearsal> shortest_rehearsal(const std::function<schedules::Schedule(int micro_batches)>& make, int micro_batches, int rank,
                                            const std::vector<std::string>& channels, bool neighbours);

/// The one that is read from a step which another rank has run, of whatever micro-batches: `shown` is that rank's, by the names of what this one holds
/// (renamed_legs). What a rank does is the order of its actions alone, so ranks that warm up differently can be read from one. Nothing where it shows too
/// little.
std::optional<Rehearsal> rehearsal_by(std::vector<pipeline::Leg> shown, const std::function<schedules::Schedule(int micro_batches)>& make, int micro_batches,
                                      int rank, const std::vector<std::string>& channels, bool neighbours);

/// Tells `visit` of each event of the whole step: those before and after the actions as they were, and each action as it was shown, in the whole step's order;
/// with what stands for what, both -1 outside of actions. What lies in a bracket named `kLeftOut` stays out.
void for_each_event(const Events& shown, const Rehearsal& rehearsal, const std::function<void(const Event& event, int stand_in, int micro_batch)>& visit);

/// The events of the whole step by themselves: storages and calls that an action's micro-batch began have numbers of their own for each, messages its tags and
/// names. `keep`: which; copies cost some 100 ns each.
Events whole_step(const Events& shown, const Rehearsal& rehearsal, const std::function<bool(const Event&)>& keep = {});

}  // namespace tessera::plan
