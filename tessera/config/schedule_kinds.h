#pragma once

#include <string_view>

/// What rules between settings have to know of pipeline.schedule. The list of all schedules stands in pipeline/schedules/registry.cpp.
namespace tessera {

/// Whether the order of its actions depends on what they cost.
inline bool is_made_for_costs(std::string_view schedule) { return schedule == "zb_1p" || schedule == "zb_2p" || schedule == "zb_auto"; }

/// Whether stages update in the midst of a step.
inline bool is_asynchronous(std::string_view schedule) { return schedule == "pipedream" || schedule == "pipedream_2bw"; }

}  // namespace tessera
